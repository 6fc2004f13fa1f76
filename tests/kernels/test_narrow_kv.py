"""K and V of fewer than 16 bits: stored as `quantise` says, read as `as_attended` says, for every pattern there is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numba import njit

from prolepsis.coding.cache_dtypes import (
    FORMATS,
    TOKEN_DTYPES,
    QuantisedKV,
    arrays_of,
    from_scalars,
    quantise,
    to_float,
)
from prolepsis.coding.past import as_attended
from prolepsis.kernels.narrow_kv import attended, store_narrow_head, widen_keys, widen_values
from prolepsis.kernels.rows import DTYPES

NARROW = [dtype for dtype in TOKEN_DTYPES if FORMATS[dtype].bits < 16]


@njit
def _store(dtype, x, width, out, row, steps):
    for head in range(x.size // width):
        store_narrow_head(dtype, x, head * width, width, out, head * row, steps, head)


@njit
def _widen_values(dtype, v, count, dim, steps, out):
    widen_values(dtype, v, 0, count, dim, steps, 0, out)


@njit
def _widen_keys(dtype, k, tokens, dim, steps, out):
    for first in range(0, tokens, 32):
        widen_keys(
            dtype, k, first, first + 16, tokens, dim, steps, first, first + 16, out[first * dim : (first + 32) * dim]
        )  # fmt: skip


def stored(x, dtype):
    """(bytes, steps) that the kernel makes of float32 [heads, width]."""
    row = x.shape[1] * FORMATS[dtype].bits // 8
    out, steps = np.zeros((len(x), row), np.uint8), np.zeros(len(x), np.uint16)
    _store(DTYPES[dtype], x.reshape(-1), x.shape[1], out.reshape(-1).view(np.uint16), row, steps)
    return out, steps


def assert_stored_as_quantised(x, dtype):
    x = np.ascontiguousarray(x, np.float32).reshape(-1, x.shape[-1])
    values, steps = stored(x, dtype)
    kv = arrays_of(quantise(np.stack([x, x])[None, :, None], dtype))
    assert np.array_equal(values, kv[0][0, 0, 0].view(np.uint8))
    if FORMATS[dtype].limit:
        assert np.array_equal(steps, kv[1][0, 0, 0])


@pytest.mark.parametrize("dtype", NARROW)
def test_every_kind_of_head_is_stored_as_quantised(dtype):
    rng = np.random.default_rng(0)
    heads = [rng.standard_normal((200, 64)) * 10.0 ** rng.integers(-12, 12, (200, 1))]
    heads += [np.zeros((1, 64)), -np.zeros((1, 64)), np.full((1, 64), 3e38), np.full((1, 64), 1e-42)]
    special = rng.standard_normal((50, 64))
    special[rng.random(special.shape) < 0.2] = np.nan
    special[rng.random(special.shape) < 0.2] = np.inf
    special[rng.random(special.shape) < 0.2] = -np.inf
    assert_stored_as_quantised(np.concatenate([*heads, special]).astype(np.float32), dtype)


@pytest.mark.parametrize("dtype", NARROW)
def test_values_half_way_between_two_are_rounded_to_even(dtype):
    sizes = to_float(np.arange(FORMATS[dtype].largest + 1, dtype=np.uint16), dtype)
    sizes = sizes[np.isfinite(sizes)]
    middle = (sizes[1:] + sizes[:-1]) / 2
    x = np.concatenate([sizes, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))])
    x = np.concatenate([x, -x, np.zeros(-2 * len(x) % 31, np.float32)]).reshape(-1, 31)
    largest = np.full((len(x), 1), FORMATS[dtype].limit or 1, np.float32)  # so that the step of integers is 1
    assert_stored_as_quantised(np.concatenate([x, largest], axis=1), dtype)


@settings(deadline=None)
@given(hnp.arrays(np.float32, (3, 32), elements=st.floats(width=32)), st.sampled_from(NARROW))
def test_any_head_is_stored_as_quantised(x, dtype):
    assert_stored_as_quantised(x, dtype)


def same_values(one, other):
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("dtype", NARROW)
def test_every_pattern_is_read_as_attention_should(dtype):
    """With steps of every exponent and sign, subnormal ones, infinities and NaN."""
    dim = 32
    steps = np.concatenate([[0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0, 0x8000], np.arange(0, 1 << 16, 97)]).astype(np.uint16)
    steps = steps[: len(steps) // 32 * 32]
    tokens = len(steps)
    scalars = np.arange(tokens * dim).astype(np.uint16).reshape(tokens, dim)
    scalars = (scalars & FORMATS[dtype].largest) | (scalars >> (FORMATS[dtype].bits - 1) & 1) << 15
    kv = from_scalars(scalars, steps, dtype)
    own = kv.steps if isinstance(kv, QuantisedKV) else None
    expected = to_float(as_attended(scalars, own, dtype), "bf16")
    kind = "fp16" if attended(DTYPES[dtype]) == DTYPES["fp16"] else "bf16"
    bytes_ = arrays_of(kv)[0].view(np.uint8)
    wide = np.zeros((tokens, dim), np.uint16)
    _widen_values(DTYPES[dtype], bytes_.reshape(-1).view(np.uint16), tokens, dim, steps, wide.reshape(-1))
    assert same_values(to_float(wide, kind), expected)
    keys = np.zeros((tokens // 32, dim, 32), np.uint16)
    turned = np.ascontiguousarray(bytes_.T).reshape(-1).view(np.uint16)
    _widen_keys(DTYPES[dtype], turned, tokens, dim, steps, keys.reshape(-1))
    assert same_values(to_float(keys.transpose(0, 2, 1).reshape(tokens, dim), kind), expected)
