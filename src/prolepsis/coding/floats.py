"""The 16-bit floats of a KV cache."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError

DType = Literal["bf16", "fp16"]


@dataclass(frozen=True)
class FloatFormat:
    """A 16-bit float: sign, exponent, `mantissa_bits`. `exponent_bias`: float32's exponent code minus its own."""

    mantissa_bits: int
    exponent_bias: int


_DTYPE_OF: dict[str, DType] = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "float16": "fp16"}

FORMATS: dict[DType, FloatFormat] = {"bf16": FloatFormat(7, 0), "fp16": FloatFormat(10, 112)}


def to_float(bits: NDArray[np.uint16], dtype: DType) -> NDArray[np.float32]:
    """The values of 16-bit patterns, exactly."""
    if dtype == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


@cache
def moderate_values(dtype: DType) -> NDArray[np.float32]:
    """float32 [65536]: the value of every pattern as statistics should see it.

    NaN and infinities are 0, and nothing is larger than 2**99, so that sums stay finite.
    """
    values = to_float(np.arange(1 << 16, dtype=np.uint16), dtype)
    limit = np.float32(2.0**99)
    return np.clip(np.where(np.isfinite(values), values, np.float32(0)), -limit, limit)


def as_bits(kv: Any, dtype: str | None) -> tuple[NDArray[np.uint16], DType]:
    """(uint16 bit patterns, dtype name) of a KV array.

    Takes uint16 with `dtype` said, NumPy float16, or a torch bfloat16 / float16 tensor (torch is not imported).

    Raises:
        InputError: another type, an unknown dtype, or a dtype that contradicts the array.
    """
    kind = str(getattr(kv, "dtype", type(kv).__name__))
    if dtype is not None and dtype not in get_args(DType):
        raise InputError(f"KV cache dtype {dtype!r} is not supported; choose one of {', '.join(get_args(DType))}")
    named = _DTYPE_OF.get(kind)
    if named is None and kind != "uint16":
        raise InputError(f"KV of type {kind} cannot be coded; give uint16 bit patterns, float16 or torch.bfloat16")
    if named is not None and dtype not in (None, named):
        raise InputError(f"the KV is {kind}, but dtype={dtype!r} was asked for")
    chosen = named or cast(DType | None, dtype)
    if chosen is None:
        raise InputError("uint16 bit patterns need dtype='bf16' or dtype='fp16'")
    if kind.startswith("torch."):
        import torch

        return kv.detach().cpu().contiguous().view(torch.int16).numpy().view(np.uint16), chosen
    return np.ascontiguousarray(kv).view(np.uint16), chosen
