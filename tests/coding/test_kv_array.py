"""KV as it is stored, in pieces of tokens."""

import numpy as np
import pytest
from kv_samples import realistic_kv

from prolepsis.coding import kv_array
from prolepsis.coding.cache_dtypes import TOKEN_DTYPES, Geometry, QuantisedKV, arrays_of
from prolepsis.errors import InputError


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
def test_a_cache_is_put_together_from_its_parts(dtype: str) -> None:
    kv = realistic_kv(tokens=30, dtype=dtype)
    geometry = Geometry.of(kv, dtype)
    out = kv_array.empty(geometry, 30)
    kv_array.require_fit(out, geometry, 30)
    parts = [kv_array.part(kv, first, stop) for first, stop in ((0, 7), (7, 8), (8, 30))]
    for array, expected in zip(arrays_of(kv_array.joined(parts)), arrays_of(kv), strict=True):
        assert np.array_equal(array, expected)
    for first, stop in ((0, 7), (7, 8), (8, 30)):
        part = kv_array.part(kv, first, stop)
        assert kv_array.token_count(part) == stop - first
        copied = kv_array.copy(part)
        for array, source in zip(arrays_of(copied), arrays_of(kv), strict=True):
            assert array.flags.c_contiguous
            assert not np.shares_memory(array, source)
        kv_array.put(out, first, copied)
    for array, expected in zip(arrays_of(out), arrays_of(kv), strict=True):
        assert np.array_equal(array, expected)


INT8, BF16 = realistic_kv(tokens=5, dtype="int8"), realistic_kv(tokens=5)


@pytest.mark.parametrize(
    ("kv", "dtype", "message"),
    [
        (BF16, "fp8_e4m3", r"KV is uint16 \(2, 2, 5, 2, 16\), expected uint8 \(2, 2, tokens, 2, 16\)"),
        (BF16[..., :8], "bf16", "expected uint16"),
        (BF16[0], "bf16", "expected uint16"),
        (BF16.astype(np.int8), "int8", "QuantisedKV is what holds int8 and int4"),
        (QuantisedKV(BF16, INT8.steps), "bf16", "only these"),
        (INT8, "int4", r"KV is int8 .*expected uint8 \(2, 2, tokens, 2, 8\)"),
        (INT8._replace(steps=INT8.steps[:, :, :3]), "int8", r"steps are uint16 \(2, 2, 3, 2\)"),
        (INT8._replace(steps=INT8.steps.view(np.float16)), "int8", "steps are float16"),
        (kv_array.part(INT8, 0, 3), "int8", "KV of 3 tokens where 5 are needed"),
    ],
)
def test_other_arrays_do_not_fit(kv: object, dtype: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        kv_array.require_fit(kv, Geometry(dtype, 2, 2, 16), 5)
