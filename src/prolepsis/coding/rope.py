"""What the codec needs to know about a model's rotary position embedding."""

from functools import cache
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.kernels import rope_table as tables

_Factor = Annotated[float, Meta(ge=1e-3, le=1e9)]


class RopeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pair i of the first `dim` channels of K turns by
    position / scaling_factor * theta ** (-2 i / dim) / frequency_factors[i] radians.

    style: the pairs are (2 i, 2 i + 1) for "interleaved", (i, i + dim / 2) for "half".
    """

    theta: Annotated[float, Meta(ge=1, le=1e12)]
    dim: Annotated[int, Meta(ge=2, le=4096, multiple_of=2)]
    style: Literal["interleaved", "half"]
    scaling_factor: _Factor = 1.0
    frequency_factors: tuple[_Factor, ...] | None = None

    def __post_init__(self) -> None:
        if self.frequency_factors is not None and len(self.frequency_factors) != self.dim // 2:
            raise ValueError(f"{len(self.frequency_factors)} frequency factors for {self.dim // 2} turned pairs")

    def checked(self) -> "RopeSpec":
        """The same, once every field is known to be within its bounds. Raises InputError for one that is not."""
        try:
            return msgspec.convert(msgspec.to_builtins(self), RopeSpec)
        except (ValueError, TypeError) as error:
            raise InputError(f"RoPE cannot be used: {error}") from error

    def table(self, start: int, count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(cos, sin) for positions start ... start + count - 1, each float32 [count, dim / 2]."""
        return tables.rope_table(np.arange(start, start + count), _frequencies(self))


@cache
def _frequencies(rope: RopeSpec) -> NDArray[np.float64]:
    factors = rope.frequency_factors or (1.0,) * (rope.dim // 2)
    return tables.inv_freq(rope.theta, rope.dim, [f * rope.scaling_factor for f in factors])
