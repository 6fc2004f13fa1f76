"""The profile of a twin: corrections, expected errors and token tables, and what network they belong to."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import DType, Geometry
from prolepsis.coding.predictors import Predictor
from prolepsis.coding.predictors.twin import TwinPredictor
from prolepsis.coding.profile import KeptOutside, Profile
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.tables import SHAPE, TokenTables, is_valid
from prolepsis.coding.twin_network import MIXED, VARIANTS, Target, TwinNetwork, correction_bytes
from prolepsis.coding.twin_options import OWN, PRODUCTS, ROUNDINGS
from prolepsis.errors import InputError
from prolepsis.kernels.kv_contexts import LARGEST_CODE

VERSION = 1
"""Of the twin's arithmetic: predictions made under another number may differ in their last bits."""
PREDICTOR_NAMES = {f"{variant}/{VERSION}": variant for variant in (*VARIANTS, MIXED)}
"""Names in files, and the variants they stand for."""


@dataclass(frozen=True)
class TwinProfile(KeptOutside):
    """What was fitted to one model's KV of one cache dtype. It holds no weights: whoever codes has the model.

    variant: of `twin_network.VARIANTS`, or MIXED, which has a choice (`TwinNetwork.mixed`). corrections: uint8
    [layers - 1, hidden, bytes], rows of CORRECTION_TYPE. codes: uint16 [layers, 2, kv_heads, head_dim], the expected
    error of each channel (`profile.scale_codes`). frequencies: uint16 [contexts, 128], as `TokenTables` takes them.
    network_is: `TwinNetwork.fingerprint`. static: the static profile of an integer cache, whose steps are coded with
    it. network: given by `bound_to`. open_loop: of `TwinPredictor`; such a profile has no corrections, and is for
    measuring only.
    """

    geometry: Geometry
    rope: RopeSpec | None
    variant: str
    corrections: NDArray[np.uint8]
    codes: NDArray[np.uint16]
    frequencies: NDArray[np.uint16]
    network_is: str
    static: Profile | None = None
    network: TwinNetwork | None = None
    open_loop: bool = False
    choice: NDArray[np.uint8] | None = None

    @property
    def predictor_name(self) -> str:
        """As stored in files."""
        return f"{self.variant}{'-open' * self.open_loop}/{VERSION}"

    @property
    def hidden(self) -> int:
        """Numbers of the hidden state."""
        return self.corrections.shape[1]

    @property
    def is_as_target(self) -> bool:
        """Whether a choice takes all weights of the target as they are."""
        return self.choice is not None and not self.choice.any()

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128, in hex, of everything that coding depends on."""
        digest = xxhash.xxh3_128(f"{self.predictor_name} {self.network_is}".encode())
        for array in to_arrays(self).values():
            digest.update(np.ascontiguousarray(array).data)
        digest.update(b"" if self.static is None else self.static.to_bytes())
        return digest.hexdigest()

    def bound_to(self, target: Target) -> "TwinProfile":
        """This profile, able to code.

        Raises:
            InputError: it was calibrated with another model, or is of another shape than its network.
        """
        if self.choice is None:
            network = TwinNetwork.of(target, VARIANTS[self.variant])
        else:
            network = TwinNetwork.mixed(target, self.choice)
        if network.fingerprint != self.network_is:
            raise InputError("the profile was calibrated with the weights of another model")
        _, layers, heads, dim = self.geometry
        shape, plan = (layers, heads, dim, self.hidden), target.plan
        if shape != (plan.layers, target.kv_heads, target.head_dim, plan.hidden):
            raise InputError(f"the profile is damaged: it speaks of the shape {shape}, and its network has another")
        return replace(self, network=network)

    def predictor(self, rope: RopeSpec | None) -> Predictor:
        """The twin.

        Raises:
            InputError: another RoPE; or `bound_to` was not called.
        """
        if rope != self.rope:
            raise InputError(f"the profile was calibrated for {self.rope}, but the KV has {rope}")
        if self.network is None:
            raise InputError(f"the profile is one of {self.variant} and needs the model (TwinProfile.bound_to)")
        return self._predictor

    @cached_property
    def _predictor(self) -> TwinPredictor:
        """Made once: its workspaces serve all who code with this profile."""
        assert self.network is not None
        target, network = self.network.target, self.network.corrected(list(self.corrections))
        codes, dtype = self.codes.astype(np.int32), self.geometry.dtype
        return TwinPredictor(self.predictor_name, target, network, codes, dtype, open_loop=self.open_loop)

    def tables(self, dtype: DType) -> TokenTables:
        """The profile's own."""
        return self._tables

    @cached_property
    def _tables(self) -> TokenTables:
        return TokenTables(self.geometry.dtype, self.frequencies)


def to_arrays(profile: TwinProfile) -> dict[str, NDArray[Any]]:
    """The arrays of a profile, by name."""
    arrays: dict[str, NDArray[Any]] = {
        "corrections": profile.corrections,
        "codes": profile.codes,
        "frequencies": profile.frequencies,
    }
    return arrays if profile.choice is None else arrays | {"choice": profile.choice}


def from_arrays(
    arrays: Mapping[str, NDArray[Any]],
    variant: str,
    geometry: Geometry,
    rope: RopeSpec | None,
    hidden: int,
    network_is: str,
    static: Profile | None,
) -> TwinProfile:
    """The inverse of `to_arrays`. hidden: numbers of the hidden state.

    Raises:
        ValueError: an array is missing, unknown, of another shape or type, or holds numbers that no profile has.
    """
    _, layers, heads, dim = geometry
    wanted: dict[str, tuple[Any, tuple[int, ...]]] = {
        "corrections": (np.uint8, (layers - 1, hidden, correction_bytes(geometry))),
        "codes": (np.uint16, (layers, 2, heads, dim)),
        "frequencies": (np.uint16, SHAPE),
    }
    if variant == MIXED:
        wanted["choice"] = (np.uint8, (layers, len(PRODUCTS)))
    if arrays.keys() != wanted.keys():
        raise ValueError(f"arrays that differ from what was expected: {sorted(wanted.keys() ^ arrays.keys())}")
    for name, (kind, shape) in wanted.items():
        if (arrays[name].shape, arrays[name].dtype) != (shape, kind):
            raise ValueError(f"{name} is {arrays[name].dtype} {arrays[name].shape}, expected {kind.__name__} {shape}")
    if arrays["codes"].max() > LARGEST_CODE:
        raise ValueError("codes hold a scale that is not finite")
    if not is_valid(arrays["frequencies"]):
        raise ValueError("token frequencies that do not sum to 4096")
    choice = arrays.get("choice")
    if choice is not None and not np.isin(choice, [OWN, *ROUNDINGS]).all():
        raise ValueError("a choice holds an option that this version does not know")
    return TwinProfile(
        geometry, rope, variant, arrays["corrections"], arrays["codes"], arrays["frequencies"], network_is, static,
        choice=choice,
    )  # fmt: skip
