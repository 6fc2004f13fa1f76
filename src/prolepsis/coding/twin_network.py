"""The twin's network: the target's own weights, fewer bits of activations, and corrections from layer to layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import xxhash
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import Geometry
from prolepsis.coding.twin_fingerprint import said
from prolepsis.kernels import forward
from prolepsis.kernels.cells import CODES, quantised_codes
from prolepsis.kernels.forward import Plan
from prolepsis.kernels.products import need
from prolepsis.kernels.qmatmul import NATURAL, OUT_COLUMN, Weights, kinds_of
from prolepsis.kernels.twin_pass import (
    ATTENTION_OUT,
    CORRECTION,
    CORRECTIONS,
    DOWN,
    GATE_UP,
    GROUPS,
    KV,
    MADE,
    QUERY,
    TARGETS,
    Network,
)
from prolepsis.quant.matrices import Blocks, packed, rounded, unpacked

CORRECTION_TYPE = "Q8_0"  # of GGUF: int8 with a scale for each 32 columns
_CORRECTION = GGMLQuantizationType[CORRECTION_TYPE]


def correction_bytes(geometry: Geometry) -> int:
    """Bytes of a row of corrections: one number for each channel of a layer's K and V."""
    width, (per_block, size) = 2 * geometry.kv_heads * geometry.head_dim, GGML_QUANT_SIZES[_CORRECTION]
    return width // per_block * size


class Variant(NamedTuple):
    """A kind of twin. keeps: kinds of weights that are taken as the target has them; others are rounded to `rounds_to`.
    fine: whether all activations have 16 bits, and not only those that K and V are projected from.
    """

    keeps: tuple[int, ...]
    rounds_to: str
    fine: bool


REFERENCE = Variant(tuple(CODES.values()), "", True)
"""The target itself, in the arithmetic of `kernels.forward`: what corrections aim at."""

_QUANTISED = quantised_codes(8)

VARIANTS = {
    "twin-int4": Variant(quantised_codes(4), "Q4_1", False),
    "twin-int8": Variant(_QUANTISED, "Q8_0", False),
    "twin-int8a16": Variant(_QUANTISED, "Q8_0", True),
}


class Target(NamedTuple):
    """A loaded model, as the twin needs it. plan: its weights and shape."""

    plan: Plan
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def positions(self) -> int:
        """How many there are angles for."""
        return len(self.plan.cos) // (self.plan.rotary_dim // 2)

    @property
    def kv_width(self) -> int:
        """Channels of K and V of one layer."""
        return 2 * self.kv_heads * self.head_dim


# Products of a layer of the target that the twin takes: the twin's group, the target's, and which of its matrices.
_PARTS = (
    (KV, forward.QKV, 1, 2),
    (QUERY, forward.QKV, 0, 1),
    (ATTENTION_OUT, forward.ATTENTION_OUT, 0, 1),
    (GATE_UP, forward.GATE_UP, 0, 2),
    (DOWN, forward.DOWN, 0, 1),
)


@dataclass(frozen=True)
class TwinNetwork:
    """The twin of `target`, without corrections. K and V are projected with the target's weights as they are.

    made: the weights that the target has in another form. groups: `twin_pass.Network.groups`.
    """

    target: Target
    made: Weights
    groups: NDArray[np.int64]

    @classmethod
    def of(cls, target: Target, variant: Variant) -> "TwinNetwork":
        """Rounds what has to be rounded."""
        plan = target.plan
        blocks: list[Blocks] = []
        groups = np.zeros((GROUPS * plan.layers, 5), np.int64)
        for layer in range(plan.layers):
            for group, source, skipped, count in _PARTS:
                first = int(plan.groups[4 * layer + source, 0]) + skipped
                kinds = kinds_of(plan.weights, first, count)
                if group == KV or np.isin(kinds, variant.keeps).all():
                    fine, order = group == KV or variant.fine, plan.groups[4 * layer + source, 2]
                    groups[GROUPS * layer + group] = first, count, TARGETS, fine, order
                    continue
                groups[GROUPS * layer + group] = len(blocks), count, MADE, variant.fine, NATURAL
                for matrix in range(first, first + count):
                    column = int(plan.weights.matrices[matrix, OUT_COLUMN])
                    blocks.append(rounded(unpacked(plan.weights, matrix), variant.rounds_to, column))
        return cls(target, packed([one.placed() for one in blocks]), groups)

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128, in hex, of every number that a prediction depends on, but for the corrections."""
        plan = self.target.plan
        shape = (plan.layers, plan.hidden, plan.intermediate, plan.heads, plan.rotary_dim, *self.target[1:])
        digest = xxhash.xxh3_128(f"{shape} {plan.eps!r} {plan.score_scale!r} {plan.embedding}".encode())
        first_turns = [table[: plan.rotary_dim] for table in (plan.cos, plan.sin)]
        groups = self.groups[:, :4]  # orders are a part of the weights
        for array in (*said(plan.weights, 64), plan.norms, *first_turns, *said(self.made, 1), groups):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def corrected(self, corrections: Sequence[NDArray[np.uint8]], first: int = 0) -> Network:
        """With the corrections of the layers from `first` on: uint8 [hidden, bytes], of CORRECTION_TYPE."""
        made = packed([Blocks(CORRECTION_TYPE, data, self.target.kv_width).placed() for data in corrections])
        groups = self.groups.copy()
        for index, layer in enumerate(range(first, first + len(corrections))):
            fine = groups[GROUPS * layer + QUERY, 3]
            groups[GROUPS * layer + CORRECTION] = index, 1, CORRECTIONS, fine, NATURAL
        network = Network(self.target.plan, self.made, made, groups, -self.target.plan.sin)
        _compile(network)
        return network


def _compile(network: Network) -> None:
    """The products of its kinds of weights and widths of activations."""
    places = {TARGETS: network.plan.weights, MADE: network.made, CORRECTIONS: network.corrections}
    for first, count, place, fine, _ in network.groups.tolist():
        need(kinds_of(places[place], first, count), not fine)
