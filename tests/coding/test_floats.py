"""16-bit floats: exact values, and KV taken in every form."""

import numpy as np
import pytest

from prolepsis.coding.floats import as_bits, moderate_values, to_float
from prolepsis.errors import InputError

PATTERNS = np.arange(1 << 16, dtype=np.uint16)


def test_values_are_exact() -> None:
    torch = pytest.importorskip("torch")
    for dtype, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        expected = torch.from_numpy(PATTERNS.view(np.int16).copy()).view(kind).float().numpy()
        assert np.array_equal(to_float(PATTERNS, dtype), expected, equal_nan=True)
        assert np.isfinite(moderate_values(dtype)).all()


def test_arrays_of_every_kind_are_taken() -> None:
    torch = pytest.importorskip("torch")
    x = np.linspace(-2, 2, 24, dtype=np.float32).reshape(1, 2, 3, 1, 4)
    for tensor, dtype in ((torch.from_numpy(x).bfloat16(), "bf16"), (torch.from_numpy(x).half(), "fp16")):
        bits, name = as_bits(tensor, None)
        assert (bits.dtype, bits.shape, name) == (np.uint16, x.shape, dtype)
        assert np.array_equal(to_float(bits, dtype), tensor.float().numpy())
    assert np.array_equal(as_bits(x.astype(np.float16), "fp16")[0].view(np.float16), x.astype(np.float16))
    turned = as_bits(x.astype(np.float16).swapaxes(2, 4), None)[0]
    assert np.array_equal(turned.view(np.float16), x.astype(np.float16).swapaxes(2, 4))


@pytest.mark.parametrize(
    ("array", "dtype", "message"),
    [
        (np.zeros(4, np.float32), None, "float32 cannot be coded"),
        (np.zeros(4, np.uint16), None, "need dtype="),
        (np.zeros(4, np.uint16), "fp8", "'fp8' is not supported"),
        (np.zeros(4, np.float16), "bf16", "float16, but dtype='bf16'"),
        ([1, 2], "bf16", "type list"),
    ],
)
def test_other_arrays_are_refused(array: object, dtype: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_bits(array, dtype)
