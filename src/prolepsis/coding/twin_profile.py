"""The profile of a twin: corrections, expected errors and token tables, and what network they belong to."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import xxhash
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import DType, Geometry
from prolepsis.coding.predictors import Predictor
from prolepsis.coding.predictors.twin import TwinPredictor
from prolepsis.coding.profile import Profile
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.tables import TokenTables
from prolepsis.coding.twin_network import VARIANTS, Target, TwinNetwork
from prolepsis.errors import InputError

VERSION = 1
"""Of the twin's arithmetic: predictions made under another number may differ in their last bits."""


@dataclass(frozen=True)
class TwinProfile:
    """What was fitted to one model's KV of one cache dtype. It holds no weights: whoever codes has the model.

    variant: of `twin_network.VARIANTS`. corrections: uint8 [layers - 1, hidden, bytes], rows of CORRECTION_TYPE. codes:
    uint16 [layers, 2, kv_heads, head_dim], the expected error of each channel (`profile.scale_codes`). frequencies:
    uint16 [contexts, 128], as `TokenTables` takes them. network_is: `TwinNetwork.fingerprint`. static: the static
    profile of an integer cache, whose steps are coded with it. network: given by `bound_to`.
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

    embedded = False  # it is too large to go into every session file

    @property
    def predictor_name(self) -> str:
        """As stored in files."""
        return f"{self.variant}/{VERSION}"

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128, in hex, of everything that coding depends on."""
        digest = xxhash.xxh3_128(f"{self.predictor_name} {self.network_is}".encode())
        for array in (self.corrections, self.codes, self.frequencies):
            digest.update(np.ascontiguousarray(array).data)
        digest.update(b"" if self.static is None else self.static.to_bytes())
        return digest.hexdigest()

    @property
    def steps(self) -> Profile | None:
        """That of an integer cache's steps."""
        return None if self.static is None else self.static.steps

    def bound_to(self, target: Target) -> "TwinProfile":
        """This profile, able to code.

        Raises:
            InputError: it was calibrated with another model.
        """
        network = TwinNetwork.of(target, VARIANTS[self.variant])
        if network.fingerprint != self.network_is:
            raise InputError("the profile was calibrated with the weights of another model")
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
        network = self.network.corrected(list(self.corrections))
        codes = self.codes.astype(np.int32)
        return TwinPredictor(self.predictor_name, self.network.target, network, codes, self.geometry.dtype)

    def tables(self, dtype: DType) -> TokenTables:
        """The profile's own."""
        return self._tables

    @cached_property
    def _tables(self) -> TokenTables:
        return TokenTables(self.geometry.dtype, self.frequencies)
