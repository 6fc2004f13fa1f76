"""docs/format.md is complete: a decoder written from it alone reads what the product writes."""

from pathlib import Path

import numpy as np
import pytest
from kv_samples import realistic_kv
from spec_decoder import decode_file

from prolepsis.coding import RopeSpec, decode, encode

DATA = Path(__file__).parent.parent / "data"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_golden_files(dtype: str) -> None:
    data = (DATA / f"golden_{dtype}.pkv").read_bytes()
    assert np.array_equal(decode_file(data), decode(data))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("tokens", [3, 40])
def test_other_files(dtype: str, tokens: int) -> None:
    """Per-head statistics, several streams in a layer, partly turned heads, scaled RoPE, subnormals, constants."""
    rope = RopeSpec(500_000.0, 96, "half", scaling_factor=2.5, frequency_factors=tuple(np.linspace(1, 8, 48).tolist()))
    kv = realistic_kv(layers=1, tokens=tokens, heads=6, dim=128, dtype=dtype, rope=rope, start=240)
    kv[0, 1, :, 0] >>= 4
    kv[0, 1, :, 1, :32] = 0
    kv[0, 1, :, 1, 32:64] = 0xC123
    kv[0, 1, :, 2] = np.random.default_rng(0).integers(0, 1 << 16, kv[0, 1, :, 2].shape)
    data = encode(kv, dtype=dtype, rope=rope, start=240)
    assert np.array_equal(decode_file(data), kv)
