"""KV as it is stored (`cache_dtypes.KV`), in pieces of tokens."""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import FORMATS, KIVI_RUN, KV, Geometry, KiviKV, QuantisedKV, arrays_of, values_of
from prolepsis.coding.cache_dtypes import token_count as token_count
from prolepsis.errors import InputError


def empty(geometry: Geometry, tokens: int) -> KV:
    """Room for the KV of `tokens` tokens. Raises InputError where these are no whole rows of kivi4."""
    shape, kind = _layout(geometry, tokens)
    values = np.empty(shape, kind)
    if geometry.dtype == "kivi4":
        return KiviKV(values, *np.empty((2, *shape[:5]), np.uint16))
    return QuantisedKV(values, np.empty(shape[:4], np.uint16)) if FORMATS[geometry.dtype].limit else values


def part(kv: KV, first: int, stop: int) -> KV:
    """Some of the tokens, not copied. Raises InputError where these are no whole rows of kivi4."""
    if isinstance(kv, KiviKV):
        first, stop = _rows(first), _rows(stop)
    return _each(kv, lambda array: array[:, :, first:stop])


def copy(kv: KV) -> KV:
    """A contiguous copy."""
    return _each(kv, lambda array: np.ascontiguousarray(array.copy()))


def codable(kv: KV) -> KV:
    """`kv`, copied if kernels cannot take it: read-only, or a layer's K or V not in one piece."""
    fitting = all(array.flags.writeable and array[0, 0].flags.c_contiguous for array in arrays_of(kv))
    return kv if fitting else copy(kv)


def put(out: KV, first: int, kv: KV) -> None:
    """Copy `kv` to the tokens of `out` from `first` on. Raises InputError as `part`."""
    if isinstance(kv, KiviKV):
        first = _rows(first)
    for target, source in zip(arrays_of(out), arrays_of(kv), strict=True):
        target[:, :, first : first + source.shape[2]] = source


def joined(parts: Sequence[KV]) -> KV:
    """All tokens of some KV of one geometry, one after the other, in one piece."""
    first, arrays = parts[0], [np.concatenate(same, axis=2) for same in zip(*map(arrays_of, parts), strict=True)]
    return arrays[0] if isinstance(first, np.ndarray) else type(first)(*arrays)


def as_scalars(kv: KV) -> NDArray[np.uint16] | None:
    """`kv` itself where it is made of scalars, which values of 16 bits are."""
    return cast(NDArray[np.uint16], kv) if isinstance(kv, np.ndarray) and kv.dtype == np.uint16 else None


def require_fit(kv: KV, geometry: Geometry, tokens: int | None = None) -> None:
    """Raises InputError for another type or shape than that of KV of this geometry, with `tokens` tokens if given."""
    values = values_of(kv)
    shape, kind = _layout(geometry, tokens or 0)
    if (values.dtype, values.ndim, values.shape[:2] + values.shape[3:]) != (kind, len(shape), shape[:2] + shape[3:]):
        rest = ", ".join(map(str, shape[3:]))
        across = "rows" if geometry.dtype == "kivi4" else "tokens"
        raise InputError(f"KV is {values.dtype} {values.shape}, expected {kind} ({shape[0]}, 2, {across}, {rest})")
    if isinstance(kv, KiviKV) != (geometry.dtype == "kivi4"):
        raise InputError(f"KV is {type(kv).__name__}, but KiviKV is what holds kivi4, and only this")
    if isinstance(kv, QuantisedKV) != (FORMATS[geometry.dtype].limit > 0 and not isinstance(kv, KiviKV)):
        raise InputError(f"KV is {type(kv).__name__}, but QuantisedKV is what holds int8 and int4, and only these")
    if isinstance(kv, QuantisedKV) and (kv.steps.dtype, kv.steps.shape) != (np.uint16, values.shape[:4]):
        raise InputError(f"steps are {kv.steps.dtype} {kv.steps.shape}, expected uint16 {values.shape[:4]}")
    if isinstance(kv, KiviKV) and any((a.dtype, a.shape) != (np.uint16, values.shape[:5]) for a in kv[1:]):
        raise InputError(f"steps and minimums are no uint16 {values.shape[:5]}, one for each run")
    if tokens is not None and token_count(kv) != tokens:
        raise InputError(f"KV of {token_count(kv)} tokens where {tokens} are needed")


def _layout(geometry: Geometry, tokens: int) -> tuple[tuple[int, ...], np.dtype]:
    """(shape of the values as stored, their type)."""
    dtype, layers, heads, dim = geometry
    if dtype == "kivi4":
        return (layers, 2, _rows(tokens), heads, dim, KIVI_RUN // 2), np.dtype(np.uint8)
    width = dim // 2 if dtype == "int4" else dim
    kind = np.int8 if dtype == "int8" else np.uint16 if FORMATS[dtype].bits == 16 else np.uint8
    return (layers, 2, tokens, heads, width), np.dtype(kind)


def _rows(tokens: int) -> int:
    if tokens % KIVI_RUN:
        raise InputError(f"kivi4 can be cut at multiples of {KIVI_RUN} tokens only, not at {tokens}")
    return tokens // KIVI_RUN


def _each(kv: KV, change: Callable[[NDArray], NDArray]) -> KV:
    if isinstance(kv, np.ndarray):
        return change(kv)
    return type(kv)(*map(change, kv))
