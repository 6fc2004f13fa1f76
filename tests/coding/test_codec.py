"""What goes in comes out, bit for bit, and smaller."""

from math import e, log2, pi
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import ROPE, realistic_kv, to_bits
from spec_decoder import decode_file

from prolepsis.coding import RopeSpec, decode, encode
from prolepsis.coding.cache_dtypes import FORMATS, TOKEN_DTYPES, DType, QuantisedKV, arrays_of, to_scalars
from prolepsis.coding.peers import ratios
from prolepsis.errors import InputError

PATTERNS = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("rope", [None, ROPE])
def test_all_patterns_survive(dtype: str, rope: RopeSpec | None) -> None:
    """NaNs with their payloads, infinities, -0.0 and subnormals, as K and as V."""
    shuffled = np.random.default_rng(1).permutation(PATTERNS)
    kv = np.stack([PATTERNS, shuffled]).reshape(1, 2, 1024, 2, 32)
    assert np.array_equal(decode(encode(kv, dtype=dtype, rope=rope)), kv)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_special_values_do_not_spoil_the_rest(dtype: str) -> None:
    kv = realistic_kv(dtype=dtype)
    usual = len(encode(kv, dtype=dtype, rope=ROPE))
    kv[0, 0, 5] = 0x7FFF  # NaN
    kv[1, 1, 7] = {"bf16": 0x7F80, "fp16": 0x7C00}[dtype]  # infinity
    data = encode(kv, dtype=dtype, rope=ROPE)
    assert np.array_equal(decode(data), kv)
    assert len(data) < usual + 400


@st.composite
def caches(draw: st.DrawFn) -> tuple[np.ndarray, str, RopeSpec | None, int]:
    dim = draw(st.sampled_from([1, 2, 5, 16, 80]))
    shape = (draw(st.integers(1, 3)), 2, draw(st.integers(0, 300)), draw(st.sampled_from([1, 2, 3, 7])), dim)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(["bf16", "fp16"]))
    kind = draw(st.sampled_from(["noise", "bell", "zeros", "tails", "constant"]))
    kv = {
        "noise": lambda: random.integers(0, 1 << 16, shape).astype(np.uint16),
        "bell": lambda: to_bits(random.normal(size=shape) * 2.0 ** random.integers(-20, 14), dtype),
        "zeros": lambda: np.zeros(shape, np.uint16),
        "tails": lambda: to_bits(np.clip(random.standard_t(1, size=shape), -6e4, 6e4), dtype),
        "constant": lambda: np.full(shape, random.integers(0, 1 << 16), np.uint16),
    }[kind]()
    rope = None
    if dim > 1 and draw(st.booleans()):
        turned = draw(st.sampled_from([2, dim // 2 * 2]))
        factors = draw(st.sampled_from([None, (2.0,) * (turned // 2)]))
        style = draw(st.sampled_from(["half", "interleaved"]))
        rope = RopeSpec(10_000.0, turned, style, frequency_factors=factors)
    return kv, dtype, rope, draw(st.sampled_from([0, 1, 16, 250, 1_000_000]))


@settings(max_examples=60, deadline=None)
@given(caches())
def test_any_cache_survives(cache: tuple[np.ndarray, str, RopeSpec | None, int]) -> None:
    kv, dtype, rope, start = cache
    assert np.array_equal(decode(encode(kv, dtype=dtype, rope=rope, start=start)), kv)


def test_smaller_than_general_coders_make_it() -> None:
    kv = realistic_kv(layers=2, tokens=1024, heads=2, dim=64, rope=RopeSpec(10_000.0, 64, "half"))
    coded = kv.nbytes / len(encode(kv, dtype="bf16", rope=RopeSpec(10_000.0, 64, "half")))
    others = ratios(kv.tobytes())
    assert coded > 1.02 * max(others.values())
    assert coded > 1.5


def test_knowing_rope_helps() -> None:
    kv = realistic_kv(tokens=512)
    assert len(encode(kv, dtype="bf16", rope=ROPE)) < 0.97 * len(encode(kv, dtype="bf16"))


@pytest.mark.parametrize(("dtype", "mantissa"), [("bf16", 7), ("fp16", 10)])
def test_within_one_percent_of_the_entropy(dtype: str, mantissa: int) -> None:
    """Values N(24, 1) lie where floats are 2**(4 - mantissa) apart: entropy log2(sqrt(2 pi e)) + mantissa - 4."""
    x = np.random.default_rng(3).normal(24, 1, size=(1, 2, 4096, 8, 64))
    bits = 8 * len(encode(to_bits(x, dtype), dtype=dtype)) / x.size
    entropy = log2(2 * pi * e) / 2 + mantissa - 4
    assert entropy < bits < 1.01 * entropy


def test_a_cache_that_never_changes_costs_nearly_nothing() -> None:
    kv = np.broadcast_to(realistic_kv(tokens=1, rope=None), (2, 2, 2048, 2, 16)).copy()
    assert kv.nbytes / len(encode(kv, dtype="bf16")) > 30


def test_noise_hardly_grows() -> None:
    kv = np.random.default_rng(0).integers(0, 1 << 16, (2, 2, 512, 4, 64)).astype(np.uint16)
    assert len(encode(kv, dtype="bf16")) < 1.01 * kv.nbytes


def test_same_bytes_for_any_number_of_threads() -> None:
    kv = realistic_kv(layers=3)
    several = encode(kv, dtype="bf16", rope=ROPE)
    threads = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        assert encode(kv, dtype="bf16", rope=ROPE) == several
        assert np.array_equal(decode(several), kv)
    finally:
        numba.set_num_threads(threads)


@pytest.mark.parametrize("shape", [(2, 3), (1, 3, 4, 1, 8), (0, 2, 4, 1, 8), (1, 2, 4, 1, 0)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="expected \\(layers, 2, tokens, kv_heads, head_dim\\)"):
        encode(np.zeros(shape, np.uint16), dtype="bf16")


def test_rope_wider_than_a_head_is_refused() -> None:
    with pytest.raises(InputError, match="RoPE of 16 channels does not fit heads of 8"):
        encode(np.zeros((1, 2, 4, 1, 8), np.uint16), dtype="bf16", rope=ROPE)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    kv = torch.randn(2, 2, 20, 1, 32).bfloat16()
    assert np.array_equal(decode(encode(kv)), kv.view(torch.int16).numpy().view(np.uint16))


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "int8", "int4"])
def test_every_dtype_comes_back_in_its_own_form(dtype: str) -> None:
    kv = realistic_kv(tokens=300, dtype=dtype)
    data = encode(kv, dtype=dtype, rope=ROPE, start=40)
    back = decode(data)
    for array, expected in zip(arrays_of(back), arrays_of(kv), strict=True):
        assert array.dtype == expected.dtype
        assert np.array_equal(array, expected)
    assert len(data) < 0.95 * sum(array.nbytes for array in arrays_of(kv))
    if isinstance(kv, QuantisedKV):
        assert encode(QuantisedKV(kv.values, kv.steps.view(np.float16)), rope=ROPE, start=40) == data


@pytest.mark.parametrize("ids", [[-1] * 8, [1 << 32] * 8, [1.7] * 8, ["a"] * 8, [[1]] * 8, [1 << 70] * 8])
def test_token_ids_that_are_none(ids: list[Any]) -> None:
    with pytest.raises(InputError, match="token ids"):
        encode(np.zeros((1, 2, 8, 1, 4), np.float16), token_ids=ids)


def test_metadata_are_bytes() -> None:
    with pytest.raises(InputError, match="metadata are bytes, not str"):
        encode(np.zeros((1, 2, 8, 1, 4), np.float16), metadata="text")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
def test_what_cannot_be_coded_grows_by_little(dtype: DType) -> None:
    """Noise is kept in as many bits as the cache has, whatever the steps say."""
    random = np.random.default_rng(0)
    shape, bits = (2, 2, 300, 2, 32), FORMATS[dtype].bits
    if dtype in ("int8", "int4"):
        steps = random.choice(np.array([0, 0x7C00, 0x3C00, 0x0001], np.uint16), shape[:4])
        width = shape[4] * bits // 8
        noise = random.integers(0, 256, (*shape[:4], width), np.uint8)
        kv: Any = QuantisedKV(noise.view(np.int8) if dtype == "int8" else noise, steps)
    else:
        kv = random.integers(0, 1 << bits, shape).astype(np.uint16 if bits == 16 else np.uint8)
    data = encode(kv, dtype=dtype)
    assert all(np.array_equal(a, b) for a, b in zip(arrays_of(decode(data)), arrays_of(kv), strict=True))
    assert len(data) < 1.05 * sum(array.nbytes for array in arrays_of(kv)) + 3000
    assert decode_file(data).scalars.tobytes() == to_scalars(kv, dtype).tobytes()
