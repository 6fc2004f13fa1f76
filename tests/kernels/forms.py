"""The dtypes as the codec's kernels know them, and their contexts written down a second time, one scalar at a time."""

import numpy as np

from prolepsis.coding.cache_dtypes import FORMATS, TOKEN_DTYPES, DType
from prolepsis.kernels import kv_contexts

DTYPES = list(TOKEN_DTYPES)
# M, E, C, N, H, K: the table in docs/format.md.
LETTERS = {
    "bf16": (7, 0, 0x7F80, -16384, 0, 22),
    "fp16": (10, 112, 0x7C00, -16384, 0, 28),
    "fp8_e4m3": (3, 120, 0x7E, 984, 121, 14),
    "fp8_e5m2": (2, 112, 0x7C, 920, 113, 12),
    "int8": (7, 0, 127, 0, 0, 0),
    "int4": (3, 0, 7, 0, 0, 0),
}


def form_of(dtype: DType) -> np.ndarray:
    """What the kernels are told."""
    form = FORMATS[dtype]
    return kv_contexts.form_of(form.mantissa_bits, form.exponent_bias, form.limit)


def rounded(size: float, dtype: DType) -> int:
    """A non-negative float32 rounded to nearest even among all the dtype's magnitudes, by exact arithmetic."""
    m, e, largest, _, _, _ = LETTERS[dtype]
    if size == 0:
        return 0
    exponent = max(int(np.frexp(size)[1]) + 126, e + 1)  # float32's exponent code, that of subnormals at least
    steps = round(size * 2.0 ** (127 + m - exponent))  # exact, and Python rounds to even
    return min(((exponent - e - 1) << m) + steps, largest)


def expected(prediction: float, scale: int, dtype: DType) -> tuple[int, int]:
    """(context, centre) of one scalar."""
    m, e, largest, first_near, lowest, offset = LETTERS[dtype]
    bits = int(np.float32(prediction).view(np.uint32))
    size, neg = bits & 0x7FFFFFFF, bits >> 31
    if dtype.startswith("int"):
        return expected_of_integer(abs(float(np.float32(prediction))), scale, largest, neg)
    h = size >> 20
    if h - scale < 12 and scale >= first_near:
        centre = min(max(0, (scale >> 3) - e), largest >> m) << m
        return 4 * max(0, (h - scale + 28) >> 2) + ((scale >> 1) & 3), neg << 15 | centre
    context = 40 + min(max((scale >> 2) - 2 * max(h >> 3, lowest) + offset, 0), 31)
    return context, neg << 15 | rounded(abs(float(np.float32(prediction))), dtype)


def expected_of_integer(size: float, scale: int, largest: int, neg: int) -> tuple[int, int]:
    """(context, centre): below a scale of 1, which quarter about the centre the prediction lies in counts."""
    quarters = int(4 * min(size, 1024)) + 2
    centre, quarter = min(quarters // 4, largest), quarters % 4
    if neg and not centre:
        neg, quarter = 0, 3 - quarter
    width = (scale >> 2) - 254
    context = 60 + min(width, 11) if width >= 0 else 40 + 4 * max(width + 5, 0) + quarter
    return context, neg << 15 | centre - neg
