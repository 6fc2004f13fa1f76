"""KV as a cache stores it, whatever its dtype."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError

TokenDType = Literal["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"]
"""Those in which every token stands by itself, which is what calibration and `kv bench` take."""
DType = TokenDType | Literal["kivi4"]
TOKEN_DTYPES: tuple[TokenDType, ...] = get_args(TokenDType)
DTYPES: tuple[DType, ...] = (*TOKEN_DTYPES, "kivi4")
_SHORT = {"fp8": "fp8_e4m3"}


@dataclass(frozen=True)
class CacheFormat:
    """A dtype's values, `bits` each.

    Floats have sign, exponent and `mantissa_bits`; `exponent_bias` is float32's exponent code minus their own. Integers
    lie on a uniform grid, where quantisers use -limit to limit; `limit` is 0 for floats.
    """

    bits: int
    mantissa_bits: int = 0
    exponent_bias: int = 0
    limit: int = 0

    @property
    def largest(self) -> int:
        """The largest magnitude a scalar has."""
        return (1 << (self.bits - 1)) - 1


FORMATS: dict[DType, CacheFormat] = {
    "bf16": CacheFormat(16, 7, 0),
    "fp16": CacheFormat(16, 10, 112),
    "fp8_e4m3": CacheFormat(8, 3, 120),
    "fp8_e5m2": CacheFormat(8, 2, 112),
    "int8": CacheFormat(8, limit=127),
    "int4": CacheFormat(4, limit=7),
    "kivi4": CacheFormat(4, limit=7),  # of a code less 8
}
STEP_BITS = 16  # of the step of a token's head, or of a step or minimum of kivi4

KIVI_BLOCK = 128
"""Tokens of a block of kivi4, which is a part of attention (`kernels.attention_parts.PART`)."""
KIVI_RUN = 32
"""Values of kivi4 that share a step and a minimum, `STEP_BITS` each (`kernels.kivi.RUN`)."""


class QuantisedKV(NamedTuple):
    """Integers and their steps: value = integer * step.

    values: int8 [layers, 2 (K, V), tokens, kv_heads, head_dim]; or uint8 [..., head_dim / 2], two int4 a byte in two's
    complement, the even channel in the low nibble. steps: uint16 (fp16 bits) or float16 [layers, 2, tokens, kv_heads].
    """

    values: NDArray[np.int8] | NDArray[np.uint8]
    steps: NDArray[Any]


class KiviKV(NamedTuple):
    """Codes of kivi4 and what they are multiples of: value = code * step + minimum (`kernels.kivi`).

    A row is KIVI_RUN tokens, in which a head has head_dim runs of KIVI_RUN values: of K one for each channel, over the
    tokens; of V those of a token, over the channels, token after token. codes: uint8 [layers, 2 (K, V), rows, kv_heads,
    head_dim, KIVI_RUN / 2], the first half of a run in the low nibbles. steps, minimums: uint16 (fp16 bits)
    [layers, 2, rows, kv_heads, head_dim].
    """

    codes: NDArray[np.uint8]
    steps: NDArray[np.uint16]
    minimums: NDArray[np.uint16]


KV = NDArray[np.uint16] | NDArray[np.uint8] | QuantisedKV | KiviKV
"""KV as it is stored: bit patterns [layers, 2 (K, V), tokens, kv_heads, head_dim], uint16, or uint8 for fp8; or
QuantisedKV with uint16 steps; or KiviKV."""


def values_of(kv: KV) -> NDArray[Any]:
    """The values of `kv`, without steps and minimums."""
    return arrays_of(kv)[0]


def arrays_of(kv: KV) -> tuple[NDArray[Any], ...]:
    """The values, the steps where there are any, and the minimums where there are any."""
    return kv if isinstance(kv, QuantisedKV | KiviKV) else (kv,)


def token_count(kv: KV) -> int:
    """How many tokens it holds."""
    return int(values_of(kv).shape[2]) * (KIVI_RUN if isinstance(kv, KiviKV) else 1)


def dtype_named(name: str) -> DType:
    """The dtype of a cache that a user calls `name`. Raises InputError for one that there is not."""
    return cast(DType, _named(name, DTYPES))


def token_dtype_named(name: str) -> TokenDType:
    """As `dtype_named`, of those in which every token stands by itself."""
    return cast(TokenDType, _named(name, TOKEN_DTYPES))


def _named(name: str, known: tuple[str, ...]) -> str:
    dtype = _SHORT.get(name, name)
    if dtype not in known:
        raise InputError(
            f"KV cache dtype {name!r} is not supported{' here' if dtype in DTYPES else ''}; choose one of "
            f"{', '.join(known)} ({', '.join(f'{short} is {whole}' for short, whole in _SHORT.items())})"
        )
    return dtype
