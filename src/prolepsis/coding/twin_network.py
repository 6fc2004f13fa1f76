"""The twin's network: the target's own weights, fewer bits of activations, and corrections from layer to layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import xxhash
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import Geometry
from prolepsis.coding.twin_fingerprint import said
from prolepsis.coding.twin_options import OWN, PRODUCTS, ROUNDINGS
from prolepsis.errors import InputError
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
from prolepsis.quant.matrices import Blocks, Placed, packed, rounded, unpacked
from prolepsis.quant.rtn import rtn

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

MIXED = "twin-mixed"
"""The name of a twin whose products are rounded by a choice (`twin_options`) that its profile has."""


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

    def product(self, layer: int, group: int) -> range:
        """The matrices of `plan.weights` that a product of the twin has: KV, QUERY, ATTENTION_OUT, GATE_UP or DOWN."""
        source, skipped, count = _PARTS[group]
        first = int(self.plan.groups[4 * layer + source, 0]) + skipped
        return range(first, first + count)

    def order(self, layer: int, group: int) -> int:
        """`qmatmul.ORDER` of the activations of a product."""
        return int(self.plan.groups[4 * layer + _PARTS[group][0], 2])

    def rounded(self, matrix: int, option: int) -> Placed:
        """A matrix of `plan.weights`, rounded by a number of `twin_options.ROUNDINGS`."""
        weights = self.plan.weights
        return Placed(rtn(unpacked(weights, matrix), ROUNDINGS[option]), int(weights.matrices[matrix, OUT_COLUMN]))


# Products of a layer that the twin takes: the target's group, and which of its matrices.
_PARTS = {
    KV: (forward.QKV, 1, 2),
    QUERY: (forward.QKV, 0, 1),
    ATTENTION_OUT: (forward.ATTENTION_OUT, 0, 1),
    GATE_UP: (forward.GATE_UP, 0, 2),
    DOWN: (forward.DOWN, 0, 1),
}


@dataclass(frozen=True)
class TwinNetwork:
    """The twin of `target`, without corrections. K and V are projected with the target's weights as they are.

    made: the weights that the target has in another form. groups: `twin_pass.Network.groups`. choice: of a mixed twin.
    """

    target: Target
    made: Weights
    groups: NDArray[np.int64]
    choice: NDArray[np.uint8] | None = None

    @classmethod
    def of(cls, target: Target, variant: Variant) -> "TwinNetwork":
        """Rounds what has to be rounded."""
        weights = target.plan.weights

        def made(layer: int, group: int) -> list[Placed]:
            matrices = target.product(layer, group)
            kinds = kinds_of(weights, matrices.start, len(matrices))
            if group == KV or np.isin(kinds, variant.keeps).all():
                return []
            columns = [int(weights.matrices[matrix, OUT_COLUMN]) for matrix in matrices]
            return [
                rounded(unpacked(weights, matrix), variant.rounds_to, column).placed()
                for matrix, column in zip(matrices, columns, strict=True)
            ]

        return cls._made(target, variant.fine, made)

    @classmethod
    def mixed(cls, target: Target, choice: NDArray[np.uint8]) -> "TwinNetwork":
        """Rounds by a choice, uint8 [layers, len(PRODUCTS)] of OWN and numbers of ROUNDINGS.

        Raises:
            InputError: the target has another number of layers.
        """
        if len(choice) != target.plan.layers:
            raise InputError(f"a choice for {len(choice)} layers does not fit a model of {target.plan.layers}")

        def made(layer: int, group: int) -> list[Placed]:
            option = OWN if group == KV else int(choice[layer, PRODUCTS.index(group)])
            return [] if option == OWN else [target.rounded(matrix, option) for matrix in target.product(layer, group)]

        return replace(cls._made(target, False, made), choice=choice)

    @classmethod
    def _made(cls, target: Target, fine: bool, made: Callable[[int, int], list[Placed]]) -> "TwinNetwork":
        """made: of a layer and a product, its matrices in another form; none where the target's are taken."""
        placed: list[Placed] = []
        groups = np.zeros((GROUPS * target.plan.layers, 5), np.int64)
        for layer in range(target.plan.layers):
            for group in _PARTS:
                matrices, others = target.product(layer, group), made(layer, group)
                row = matrices.start, TARGETS, group == KV or fine, target.order(layer, group)
                if others:
                    row = len(placed), MADE, fine, NATURAL
                groups[GROUPS * layer + group] = row[0], len(matrices), *row[1:]
                placed += others
        return cls(target, packed(placed), groups)

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
        compile_products(network)
        return network


def compile_products(network: Network) -> None:
    """The products of its kinds of weights and widths of activations."""
    places = {TARGETS: network.plan.weights, MADE: network.made, CORRECTIONS: network.corrections}
    for first, count, place, fine, _ in network.groups.tolist():
        need(kinds_of(places[place], first, count), not fine)
