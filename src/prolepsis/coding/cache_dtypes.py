"""What a KV cache stores, for every cache dtype; and the same as scalars, which is what the codec works on.

A *scalar* is a uint16: the sign in bit 15, a magnitude below. A float's scalar is its own bits, an fp8's with the sign
moved up. An integer q is q, or 0x8000 | (-1 - q) where it is negative, so that a larger magnitude is
farther from zero, whatever the dtype. Integers are multiples of a *step* (elsewhere: quantisation
scale) that each token's head has of its own, in fp16. Codes of kivi4 are such integers, less 8, in runs that have a
step and a minimum each (`runs`).
"""

from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.kv.stored import DTYPES as DTYPES
from prolepsis.kv.stored import FORMATS as FORMATS
from prolepsis.kv.stored import KIVI_BLOCK as KIVI_BLOCK
from prolepsis.kv.stored import KIVI_RUN as KIVI_RUN
from prolepsis.kv.stored import KV as KV
from prolepsis.kv.stored import STEP_BITS as STEP_BITS
from prolepsis.kv.stored import TOKEN_DTYPES as TOKEN_DTYPES
from prolepsis.kv.stored import CacheFormat as CacheFormat
from prolepsis.kv.stored import DType as DType
from prolepsis.kv.stored import KiviKV as KiviKV
from prolepsis.kv.stored import QuantisedKV as QuantisedKV
from prolepsis.kv.stored import arrays_of as arrays_of
from prolepsis.kv.stored import token_count as token_count
from prolepsis.kv.stored import values_of as values_of

_NAMED: dict[str, DType] = {  # array types that say their dtype, as NumPy, torch and ml_dtypes call them
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
_BITS_OF = {"uint16": 16, "uint8": 8}  # array types that hold bit patterns


class Geometry(NamedTuple):
    """Shape and dtype of one token's KV."""

    dtype: DType
    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, kv: KV, dtype: DType) -> "Geometry":
        """That of `kv`."""
        layers, _, _, heads, width, *_ = values_of(kv).shape
        return cls(dtype, layers, heads, width * (2 if dtype == "int4" else 1))

    @property
    def steps(self) -> "Geometry | None":
        """That of the steps, which are an fp16 cache of one channel a head; None for floats.

        Those of kivi4 are one of head_dim channels, in which a row stands for KIVI_RUN tokens.
        """
        channels = self.head_dim if self.dtype == "kivi4" else 1
        return Geometry("fp16", self.layers, self.kv_heads, channels) if FORMATS[self.dtype].limit else None

    @property
    def minimums(self) -> "Geometry | None":
        """That of the minimums of kivi4, which is that of the steps."""
        return self.steps if self.dtype == "kivi4" else None


def as_stored(kv: Any, dtype: str | None) -> tuple[KV, DType]:
    """(KV as it is stored, dtype) of KV in any form.

    Takes uint16 (bf16, fp16) and uint8 (fp8) bit patterns with `dtype` said; NumPy float16; bfloat16, float8_e4m3fn and
    float8_e5m2 of ml_dtypes; QuantisedKV and KiviKV; and tensors of torch of all these types (torch is not imported).

    Raises:
        InputError: another type or shape, an unknown dtype, or a dtype that contradicts the array.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"KV cache dtype {dtype!r} is not supported; choose one of {', '.join(DTYPES)}")
    dtype = None if dtype is None else str(dtype)  # no subclass of it
    if isinstance(kv, KiviKV):
        return _kivi(kv, dtype), "kivi4"
    stored: KV
    stored, chosen = _quantised(kv) if isinstance(kv, QuantisedKV) else _patterns(kv, cast(DType | None, dtype))
    if dtype not in (None, chosen):
        raise InputError(f"the KV is {_type_name(values_of(kv))}, which is {chosen}, but dtype={dtype!r} was asked for")
    shape = values_of(stored).shape
    if len(shape) != 5 or shape[1] != 2 or 0 in shape[:2] + shape[3:]:
        raise InputError(f"KV of shape {shape}, expected (layers, 2, tokens, kv_heads, head_dim)")
    if isinstance(stored, QuantisedKV) and stored.steps.shape != shape[:4]:
        raise InputError(f"steps of shape {stored.steps.shape} for KV of shape {shape}, expected {shape[:4]}")
    return stored, chosen


def _patterns(kv: Any, dtype: DType | None) -> tuple[NDArray[Any], DType]:
    kind = _type_name(kv)
    if kind not in _NAMED and kind not in _BITS_OF:
        raise InputError(
            f"KV of type {kind} cannot be coded; give uint16 or uint8 bit patterns, {', '.join(_NAMED)} or QuantisedKV"
        )
    if kind in _NAMED:
        return _bits(kv), _NAMED[kind]
    fitting = [name for name, form in FORMATS.items() if form.bits == _BITS_OF[kind] and not form.limit]
    if dtype not in fitting:
        raise InputError(f"{kind} bit patterns need dtype={' or dtype='.join(map(repr, fitting))}")
    return _bits(kv), dtype


def _kivi(kv: KiviKV, dtype: str | None) -> KiviKV:
    if dtype not in (None, "kivi4"):
        raise InputError(f"the KV is KiviKV, which is kivi4, but dtype={dtype!r} was asked for")
    kinds, shapes = [_type_name(array) for array in kv], [array.shape for array in kv]
    shape = shapes[0]
    whole = len(shape) == 6 and shape[1] == 2 and shape[5] == KIVI_RUN // 2 and 0 not in shape[:2] + shape[3:]
    if kinds != ["uint8", "uint16", "uint16"] or not whole or shape[4] % KIVI_RUN or shapes[1:] != [shape[:5]] * 2:
        raise InputError(
            f"KiviKV of {', '.join(f'{kind} {shape}' for kind, shape in zip(kinds, shapes, strict=True))}; give codes "
            f"as uint8 (layers, 2, rows, kv_heads, head_dim, {KIVI_RUN // 2}), of whole runs, and steps and minimums "
            "as uint16 of all dimensions but the last"
        )
    return KiviKV(*map(np.ascontiguousarray, kv))


def _quantised(kv: QuantisedKV) -> tuple[QuantisedKV, DType]:
    kinds = _type_name(kv.values), _type_name(kv.steps)
    if kinds[0] not in ("int8", "uint8") or kinds[1] not in ("float16", "uint16"):
        raise InputError(
            f"QuantisedKV of {kinds[0]} with steps of {kinds[1]}; give int8 (int8) or uint8 (int4, two a byte), and "
            "steps of float16 or its bits as uint16"
        )
    values = _bits(kv.values)
    return QuantisedKV(values.view(kinds[0]), _bits(kv.steps)), "int8" if kinds[0] == "int8" else "int4"


def _type_name(array: Any) -> str:
    return str(getattr(array, "dtype", type(array).__name__)).removeprefix("torch.")


def _bits(array: Any) -> NDArray[Any]:
    """The array as contiguous uint16 or uint8, whatever it holds."""
    if str(array.dtype).startswith("torch."):
        import torch

        tensor = array.detach().cpu().contiguous()
        array = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8).numpy()
    return np.ascontiguousarray(array).view(np.uint16 if array.dtype.itemsize == 2 else np.uint8)


def to_scalars(kv: KV, dtype: DType) -> NDArray[np.uint16]:
    """uint16 [layers, 2, tokens, kv_heads, head_dim]. Of kivi4, `runs.to_scalars` makes them."""
    assert not isinstance(kv, KiviKV)
    if FORMATS[dtype].bits == 16:
        return cast(NDArray[np.uint16], kv)
    if isinstance(kv, np.ndarray):
        wide = kv.astype(np.uint16)
        return cast(NDArray[np.uint16], (wide & 0x80) << 8 | wide & 0x7F)
    return _turn_negative(_unpacked(kv.values) if dtype == "int4" else kv.values.astype(np.int16))


def from_scalars(scalars: NDArray[np.uint16], steps: NDArray[np.uint16] | None, dtype: DType) -> KV:
    """The inverse of `to_scalars`. steps: those of the integer dtypes, else not looked at."""
    form = FORMATS[dtype]
    if form.bits == 16:
        return scalars
    if not form.limit:
        return (scalars >> 8 & 0x80 | scalars).astype(np.uint8)
    assert steps is not None
    integers = _turn_negative(scalars.view(np.int16)).astype(np.uint8)
    if dtype == "int8":
        return QuantisedKV(integers.view(np.int8), steps)
    return QuantisedKV(integers[..., ::2] & 0xF | integers[..., 1::2] << 4, steps)


def _turn_negative(numbers: NDArray[np.int16]) -> NDArray[np.uint16]:
    """Two's complement to sign and magnitude (of -1 - q), or back."""
    return (numbers ^ (numbers >> 15 & 0x7FFF)).view(np.uint16)


def _unpacked(pairs: NDArray[Any]) -> NDArray[np.int16]:
    """The int4 of each byte's nibbles."""
    numbers = np.empty((*pairs.shape[:-1], 2 * pairs.shape[-1]), np.int16)
    numbers[..., ::2], numbers[..., 1::2] = (pairs << 4).view(np.int8) >> 4, pairs.view(np.int8) >> 4
    return numbers


def are_scalars(values: NDArray[np.uint16], dtype: DType) -> bool:
    """Whether each of `values` is a scalar that the dtype has."""
    largest = FORMATS[dtype].largest
    return largest == 0x7FFF or not (values & (0x7FFF ^ largest)).any()


def to_float(scalars: NDArray[np.uint16], dtype: DType) -> NDArray[np.float32]:
    """The values of scalars, exactly; integers in steps."""
    if dtype == "bf16":
        return (scalars.astype(np.uint32) << 16).view(np.float32)
    if dtype == "fp16":
        return scalars.view(np.float16).astype(np.float32)
    if FORMATS[dtype].limit:
        return _turn_negative(scalars.view(np.int16)).view(np.int16).astype(np.float32)
    return _float8_values(dtype)[scalars]


@cache
def _float8_values(dtype: DType) -> NDArray[np.float32]:
    """float32 [65536]: the value of every scalar of an fp8. What is none is NaN."""
    form = FORMATS[dtype]
    codes = np.arange(form.largest + 1, dtype=np.uint32)
    # As float32, they have the wrong exponent alone: a power of two puts it right, of subnormal numbers too.
    sizes = (codes << (23 - form.mantissa_bits)).view(np.float32) * np.float32(2.0**form.exponent_bias)
    if dtype == "fp8_e5m2":
        sizes[_overflow(dtype)] = np.inf
    sizes[_overflow(dtype) + 1 :] = np.nan
    values = np.full(1 << 16, np.nan, np.float32)
    values[: len(sizes)], values[0x8000 : 0x8000 + len(sizes)] = sizes, -sizes
    return values


def _overflow(dtype: DType) -> int:
    """The code of what is too large for a float: infinity, or where there is none the largest number. NaNs follow."""
    form = FORMATS[dtype]
    infinity = form.largest >> form.mantissa_bits << form.mantissa_bits
    return form.largest - 1 if dtype == "fp8_e4m3" else infinity


@cache
def moderate_values(dtype: DType) -> NDArray[np.float32]:
    """float32 [65536]: the value of every scalar as statistics should see it.

    NaN and infinities are 0, and nothing is larger than 2**99, so that sums stay finite.
    """
    values = to_float(np.arange(1 << 16, dtype=np.uint16), dtype)
    limit = np.float32(2.0**99)
    return np.clip(np.where(np.isfinite(values), values, np.float32(0)), -limit, limit)


def quantise(values: NDArray[np.uint16] | NDArray[np.float32], dtype: DType) -> KV:
    """What an engine with this cache dtype stores for `values`: bf16 bits or float32 [layers, 2, tokens, heads, dim].

    Floats are rounded to nearest even as torch does: what is too large becomes the largest fp8_e4m3, or infinity.
    Integers are value / step to nearest even, where the step is the largest magnitude of the token's head / `limit`,
    in fp16; NaN and infinities count as 0.

    Raises:
        InputError: int4 of an odd head_dim.
    """
    form = FORMATS[dtype]
    if dtype == "int4" and values.shape[-1] % 2:
        raise InputError(f"int4 packs two channels into a byte, which {values.shape[-1]} channels do not fill")
    floats = (
        to_float(v, "bf16") if v.dtype == np.uint16 else v for v in values
    )  # a layer at a time, for memory's sake
    if form.limit:
        parts = [_nearest_integers(layer, form.limit) for layer in floats]
        scalars, steps = (np.stack(arrays) for arrays in zip(*parts, strict=True))
        return from_scalars(scalars, steps, dtype)
    return from_scalars(np.stack([_nearest_floats(layer, dtype) for layer in floats]), None, dtype)


def _nearest_floats(values: NDArray[np.float32], dtype: DType) -> NDArray[np.uint16]:
    """Scalars."""
    form, bits = FORMATS[dtype], np.ascontiguousarray(values, np.float32).view(np.uint32)
    size, dropped = bits & 0x7FFFFFFF, 23 - form.mantissa_bits
    smallest = (form.exponent_bias + 1) << 23
    code = (size - np.uint32(smallest - (1 << 23)) + ((size >> dropped & 1) + ((1 << dropped - 1) - 1))) >> dropped
    # Below the smallest normal number: added to this power of two, their unit is that of float32.
    anchor = np.uint32(smallest + (dropped << 23))
    small = np.minimum(size, np.uint32(smallest)).view(np.float32)
    code = np.where(size < smallest, (small + anchor.view(np.float32)).view(np.uint32) - anchor, code)
    code = np.minimum(code, _overflow(dtype))
    return (np.where(size > 0x7F800000, form.largest, code) | bits >> 16 & 0x8000).astype(np.uint16)


def _nearest_integers(values: NDArray[np.float32], limit: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """(scalars, fp16 bits of the steps)."""
    finite = np.where(np.isfinite(values), values, np.float32(0))
    with np.errstate(over="ignore"):  # a step beyond fp16 is infinite, and the integers 0
        steps = (np.abs(finite).max(axis=-1) / np.float32(limit)).astype(np.float16)
    divisor = np.where(steps > 0, steps, np.inf).astype(np.float32)[..., None]
    integers = np.clip(np.rint(finite / divisor), -limit, limit).astype(np.int16)
    return _turn_negative(integers), steps.view(np.uint16)
