"""Tokens of floats: both readers agree, and the layouts cover what they must."""

import numpy as np
import pytest

from prolepsis.coding.floats import to_float
from prolepsis.kernels import kv_tokens, rans, simd

FORMS = {"bf16": (7, 0), "fp16": (10, 112)}


def classified(predictions: np.ndarray, scales: np.ndarray, form: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    contexts, centres = np.zeros(predictions.size, np.uint8), np.zeros(predictions.size, np.int32)
    bits = predictions.astype(np.float32).view(np.uint32).reshape(1, -1)
    mantissa, bias = (np.int32(x) for x in form)
    kv_tokens.classify(bits, scales.astype(np.int32), 0, 1, mantissa, bias, contexts, centres)
    return contexts, centres


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_ordinals_are_in_the_order_of_the_values(dtype: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    ordinals = np.array([kv_tokens.ordinal_of(u) for u in patterns])
    assert np.array_equal(np.sort(ordinals), np.arange(-(1 << 15), 1 << 15))
    assert kv_tokens.ordinal_of(np.uint16(0x8000)) == -1
    values = to_float(patterns, dtype)[np.argsort(ordinals)]
    numbers = values[~np.isnan(values)]
    assert numbers[0] == -np.inf
    assert numbers[-1] == np.inf
    assert (np.diff(numbers[1:-1]) >= 0).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_far_centres_are_the_rounded_predictions(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    predictions = (random.normal(size=20_000) * 2.0 ** random.integers(-28, 18, 20_000)).astype(np.float32)
    if dtype == "bf16":
        predictions = np.concatenate([predictions, np.float32([1.00390625, 1.01171875, 3e38, -2e-39, 0.0])])
    else:
        predictions = np.concatenate(
            [predictions, np.float32([65519, 65520, 1e30, 2.0**-25, 3 * 2.0**-25, -(2.0**-14)])]
        )
    _, centres = classified(predictions, np.zeros(len(predictions)), FORMS[dtype])
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16
    rounded = torch.from_numpy(predictions).to(kind).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(centres >> 2, (rounded & 0x7FFF).astype(np.int32))
    assert np.array_equal((centres >> 1) & 1, (np.signbit(predictions)).astype(np.int32))
    assert (centres & 1 == 0).all()  # a channel that is constant is never near


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_bin_is_one_range_of_ordinals(dtype: str) -> None:
    """The near layout's bins are disjoint and cover 14 octaves; the far layout's cover 0 ... 65535."""
    mantissa = FORMS[dtype][0]
    layout = kv_tokens.token_layout(mantissa)
    for part, bins, low, high in (
        (layout[:128], 64, 0, 1 << 16),
        (layout[128:], 44, -10 << mantissa, 4 << mantissa),
    ):
        reached = low
        for entry in part[: 2 * bins : 2].tolist():
            assert entry >> 6 == reached
            reached += 1 << (entry & 31)
        assert reached == high
        assert part[127] == 1 << 5 | 16


@pytest.mark.skipif(not simd.AVX512, reason="this CPU has no AVX-512")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_both_readers_agree_on_anything(dtype: str) -> None:
    random = np.random.default_rng(1)
    layout = kv_tokens.token_layout(FORMS[dtype][0])
    for n in (1, 15, 16, 17, 1000):
        tokens = random.integers(0, 128, n).astype(np.uint8)
        centres = random.integers(0, 1 << 18, n).astype(np.int32)
        bits = np.frombuffer(random.bytes(2 * n + 5 + rans.READ_AHEAD), np.uint8).copy()
        results = []
        for reader in (kv_tokens.read_scalar, kv_tokens.read_avx512):
            values = np.zeros(n, np.uint16)
            position = reader(tokens, centres, n, layout, bits, 3, 0, 16 * n, values)
            results.append((position, values.tolist()))
        assert results[0] == results[1]
        for reader in (kv_tokens.read_scalar, kv_tokens.read_avx512):
            if n > 32:
                assert reader(tokens, centres, n, layout, bits, 3, 0, 100, np.zeros(n, np.uint16)) == -1
