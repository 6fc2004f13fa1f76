"""KV as it is stored (`cache_dtypes.KV`), in pieces of tokens."""

from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import FORMATS, KV, Geometry, QuantisedKV, arrays_of, values_of
from prolepsis.errors import InputError


def empty(geometry: Geometry, tokens: int) -> KV:
    """Room for the KV of `tokens` tokens."""
    shape, kind = _layout(geometry, tokens)
    values = np.empty(shape, kind)
    return QuantisedKV(values, np.empty(shape[:4], np.uint16)) if FORMATS[geometry.dtype].limit else values


def token_count(kv: KV) -> int:
    """How many tokens it holds."""
    return int(values_of(kv).shape[2])


def part(kv: KV, first: int, stop: int) -> KV:
    """Some of the tokens, not copied."""
    return _each(kv, lambda array: array[:, :, first:stop])


def copy(kv: KV) -> KV:
    """A contiguous copy."""
    return _each(kv, lambda array: np.ascontiguousarray(array.copy()))


def codable(kv: KV) -> KV:
    """`kv`, copied if kernels cannot take it: read-only, or a layer's K or V not in one piece."""
    fitting = all(array.flags.writeable and array[0, 0].flags.c_contiguous for array in arrays_of(kv))
    return kv if fitting else copy(kv)


def put(out: KV, first: int, kv: KV) -> None:
    """Copy `kv` to the tokens of `out` from `first` on."""
    for target, source in zip(arrays_of(out), arrays_of(kv), strict=True):
        target[:, :, first : first + source.shape[2]] = source


def as_scalars(kv: KV) -> NDArray[np.uint16] | None:
    """`kv` itself where it is made of scalars, which values of 16 bits are."""
    return cast(NDArray[np.uint16], kv) if isinstance(kv, np.ndarray) and kv.dtype == np.uint16 else None


def require_fit(kv: KV, geometry: Geometry, tokens: int | None = None) -> None:
    """Raises InputError for another type or shape than that of KV of this geometry, with `tokens` tokens if given."""
    values = values_of(kv)
    shape, kind = _layout(geometry, tokens or 0)
    if (values.dtype, values.ndim, values.shape[:2] + values.shape[3:]) != (kind, 5, shape[:2] + shape[3:]):
        layers, _, _, heads, width = shape
        raise InputError(
            f"KV is {values.dtype} {values.shape}, expected {kind} ({layers}, 2, tokens, {heads}, {width})"
        )
    if isinstance(kv, QuantisedKV) != bool(FORMATS[geometry.dtype].limit):
        raise InputError(f"KV is {type(kv).__name__}, but QuantisedKV is what holds int8 and int4, and only these")
    if isinstance(kv, QuantisedKV) and (kv.steps.dtype, kv.steps.shape) != (np.uint16, values.shape[:4]):
        raise InputError(f"steps are {kv.steps.dtype} {kv.steps.shape}, expected uint16 {values.shape[:4]}")
    if tokens is not None and token_count(kv) != tokens:
        raise InputError(f"KV of {token_count(kv)} tokens where {tokens} are needed")


def _layout(geometry: Geometry, tokens: int) -> tuple[tuple[int, ...], np.dtype]:
    """(shape of the values as stored, their type)."""
    dtype, layers, heads, dim = geometry
    width = dim // 2 if dtype == "int4" else dim
    kind = np.int8 if dtype == "int8" else np.uint16 if FORMATS[dtype].bits == 16 else np.uint8
    return (layers, 2, tokens, heads, width), np.dtype(kind)


def _each(kv: KV, change: Callable[[NDArray], NDArray]) -> KV:
    return QuantisedKV(*map(change, kv)) if isinstance(kv, QuantisedKV) else change(kv)
