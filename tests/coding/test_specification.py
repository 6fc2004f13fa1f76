"""docs/format.md is complete: a decoder written from it alone reads what the product writes."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from kv_samples import ROPE, realistic_kv
from linear_samples import DIM, EMBEDDING, HEADS, LAYERS, linear_kv, linear_profile
from linear_samples import ROPE as HALF_ROPE
from make_golden import GOLDEN, NAMES, outside_profile
from spec_decoder import decode_file, header_of
from spec_linear import Linear

from prolepsis.coding import RopeSpec, SessionReader, SessionWriter, decode, encode
from prolepsis.coding.cache_dtypes import KV, TOKEN_DTYPES, DType, Geometry, QuantisedKV
from prolepsis.coding.profile import measure
from prolepsis.coding.profile_file import CalibratedProfile, to_bytes

DATA = Path(__file__).parent.parent / "data"


@pytest.mark.parametrize("name", ["golden_bf16", "golden_fp16", "golden_2"])
def test_golden_files(name: str) -> None:
    data = (DATA / f"{name}.pkv").read_bytes()
    assert np.array_equal(decode_file(data).scalars, decode(data))


@pytest.mark.parametrize("name", NAMES)
def test_golden_files_of_every_dtype_and_predictor(name: str) -> None:
    data = (GOLDEN / f"{name}.pkv").read_bytes()
    predictor = None
    if name.startswith("linear"):
        predictor = Linear(
            header_of(data), (GOLDEN / f"{name}.profile").read_bytes(), np.load(GOLDEN / "embedding.npy")
        )
    reader = SessionReader(data, profile=outside_profile(name))
    assert_specified(data, reader.read_all(), reader.header.dtype, predictor)


def stored(kv: KV, dtype: str) -> np.ndarray:
    """Scalars of what the cache stores, by the table in "Scalars"."""
    if isinstance(kv, np.ndarray):
        return kv if kv.dtype == np.uint16 else (kv.astype(np.uint16) >> 7 << 15) + kv % 128
    numbers = kv.values.astype(int)
    if dtype == "int4":
        pairs = np.stack([numbers % 16, numbers // 16], axis=-1).reshape(*numbers.shape[:-1], -1)
        numbers = np.where(pairs < 8, pairs, pairs - 16)
    return np.where(numbers >= 0, numbers, 0x8000 + (-1 - numbers)).astype(np.uint16)


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
@pytest.mark.parametrize("tokens", [3, 40])
def test_other_files(dtype: str, tokens: int) -> None:
    """Per-head statistics, several streams in a layer, partly turned heads, scaled RoPE, subnormals, constants."""
    rope = RopeSpec(500_000.0, 96, "half", scaling_factor=2.5, frequency_factors=tuple(np.linspace(1, 8, 48).tolist()))
    kv = realistic_kv(layers=1, tokens=tokens, heads=6, dim=128, dtype=dtype, rope=rope, start=240)
    values = kv.values if isinstance(kv, QuantisedKV) else kv
    random = np.random.default_rng(0).integers(0, 256, values[0, 1, :, 2].nbytes).astype(np.uint8).view(values.dtype)
    values[0, 1, :, 0] >>= 4
    values[0, 1, :, 1, :32] = 0
    values[0, 1, :, 1, 32:64] = values[0, 1, 0, 3, 0]
    values[0, 1, :, 2] = random.reshape(values[0, 1, :, 2].shape)
    if isinstance(kv, QuantisedKV):
        kv.steps[0, :, -3:, 4] = 0x8000, 0x7C00, 0xFE00
        kv.steps[0, :, -3:, 5] = 0, 0xBC00, 0x0001
    assert_specified(encode(kv, dtype=dtype, rope=rope, start=240), kv, dtype)


@pytest.mark.parametrize("dtype", ["fp16", "int4"])
def test_files_without_prediction(dtype: str) -> None:
    kv = realistic_kv(layers=1, tokens=30, dtype=dtype)
    file = BytesIO()
    writer = SessionWriter(file, measure(kv, dtype, ROPE, 0, "marginal"), dtype=dtype, rope=ROPE, tokens="none")
    writer.add(kv)
    writer.finish()
    assert_specified(file.getvalue(), kv, dtype)


@pytest.mark.parametrize(
    ("dtype", "tokens", "rope", "with_tokens"),
    [
        ("bf16", 256, HALF_ROPE, True),  # 32 lanes
        ("bf16", 31, RopeSpec(10_000.0, 32, "interleaved"), False),
        ("int8", 40, HALF_ROPE, True),
        ("fp8_e4m3", 9, None, False),
    ],
)
def test_linear_files(dtype: DType, tokens: int, rope: RopeSpec | None, with_tokens: bool) -> None:
    profile, (kv, ids) = linear_profile(dtype, rope, with_tokens, 600), linear_kv(tokens, dtype, rope)
    if isinstance(kv, QuantisedKV):
        kv.steps[1, :, -3:, 0] = 0x8000, 0x7C00, 0xFE00
        kv.steps[2, :, -3:, 1] = 0, 0xBC00, 0x0001
    else:
        kv[:, :, tokens // 2, 0] = (
            np.random.default_rng(0)
            .integers(0, 256, kv[:, :, 0, 0].nbytes, np.uint8)
            .view(kv.dtype)
            .reshape(kv[:, :, 0, 0].shape)
        )  # NaNs and all
    file = BytesIO()
    writer = SessionWriter(file, profile, dtype=dtype, rope=rope, tokens="ids")
    writer.add(kv, ids)
    writer.finish()
    data = file.getvalue()
    outside = to_bytes(CalibratedProfile(profile, Geometry(dtype, LAYERS, HEADS, DIM), rope, {}, 600))
    assert_specified(data, kv, dtype, Linear(header_of(data), outside, EMBEDDING))


def assert_specified(data: bytes, kv: KV, dtype: str, predictor: Linear | None = None) -> None:
    decoded = decode_file(data, predictor)
    assert np.array_equal(decoded.scalars, stored(kv, dtype))
    if isinstance(kv, QuantisedKV):
        assert np.array_equal(decoded.steps, kv.steps)
