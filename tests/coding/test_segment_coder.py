"""Segments to streams and back: whatever the values, the steps, the predictions and the shapes."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import ROPE, realistic_kv

from prolepsis.coding import RopeSpec
from prolepsis.coding.cache_dtypes import (
    FORMATS,
    KV,
    TOKEN_DTYPES,
    Geometry,
    QuantisedKV,
    arrays_of,
    from_scalars,
    quantise,
    to_float,
    to_scalars,
    values_of,
)
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import Profile, measure
from prolepsis.coding.segment_coder import CodedStream, SegmentCoder
from prolepsis.errors import InputError
from prolepsis.kernels.rans import READ_AHEAD

DTYPES = TOKEN_DTYPES
INTEGERS = [d for d in DTYPES if FORMATS[d].limit]


def decoded(coder: SegmentCoder, segment: Segment, streams: list[CodedStream]) -> KV:
    """What is decoded of `streams`, once their checks have passed."""
    data = np.concatenate([*(s.data for s in streams), np.full(READ_AHEAD, 0xA5, np.uint8)])
    told = []

    def check(stream: int, scalars: np.ndarray, sound: bool) -> None:
        assert sound
        assert xxhash.xxh3_64_intdigest(scalars.data) == streams[stream].checksum
        told.append(stream)

    kv = coder.decode(segment, data, np.cumsum([len(s.data) for s in streams]), check)
    assert sorted(told) == list(range(len(streams)))
    return kv


def assert_survives(coder: SegmentCoder, kv: KV, start: int = 0) -> list[CodedStream]:
    segment = Segment(start, values_of(kv).shape[2])
    streams = coder.encode(segment, kv)
    back = decoded(coder, segment, streams)
    for array, expected in zip(arrays_of(back), arrays_of(kv), strict=True):
        assert array.dtype == expected.dtype
        assert np.array_equal(array, expected)
    return streams


def random_kv(geometry: Geometry, tokens: int, random: np.random.Generator) -> KV:
    """Every pattern a value can have, as far as there is room, and any patterns as steps."""
    form = FORMATS[geometry.dtype]
    shape = (geometry.layers, 2, tokens, geometry.kv_heads, geometry.head_dim)
    codes = random.permutation(np.resize(np.arange(1 << form.bits), int(np.prod(shape)))).astype(np.uint16)
    scalars = (codes & form.largest) | (codes >> (form.bits - 1)) << 15
    return from_scalars(
        scalars.reshape(shape), random.integers(0, 1 << 16, shape[:4]).astype(np.uint16), geometry.dtype
    )


def wild_profile(geometry: Geometry, random: np.random.Generator) -> Profile:
    """Means from 0 to 2**100, of which some are small; scales of every size, or of a channel that never changes."""
    shape = (geometry.layers, 2, geometry.kv_heads, geometry.head_dim)
    means = random.integers(0, 227 << 7, shape)
    means = np.where(random.random(shape) < 0.5, random.integers(120 << 7, 135 << 7, shape), means)
    scales = np.where(random.random(shape) < 0.2, 0, random.integers(0, 2040, shape))
    scales = np.where(random.random(shape) < 0.4, random.integers(960, 1060, shape), scales)
    steps = None if geometry.steps is None else wild_profile(geometry.steps, random)
    signed = means | random.integers(0, 2, shape) << 15
    return Profile(signed.astype(np.uint16), scales.astype(np.uint16), None, steps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pattern_survives_any_prediction(dtype: str) -> None:
    random = np.random.default_rng(7)
    geometry = Geometry(dtype, 1, 2, 64)
    kv = random_kv(geometry, 256, random)
    assert len(np.unique(to_scalars(kv, dtype))) == 1 << FORMATS[dtype].bits
    if isinstance(kv, QuantisedKV):
        kv = kv._replace(steps=np.resize(SPECIAL_STEPS, kv.steps.shape))
    for _ in range(4):
        assert_survives(SegmentCoder(geometry, wild_profile(geometry, random), ROPE), kv)


SPECIAL_STEPS = np.array(
    [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x7BFF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF], np.uint16
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Geometry, int, int, RopeSpec | None, int]:
    dtype = draw(st.sampled_from(DTYPES))
    dim = draw(st.sampled_from([2, 6, 16] if dtype == "int4" else [1, 2, 3, 7, 16]))
    geometry = Geometry(dtype, draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3])), dim)
    rope = None
    if dim > 1 and draw(st.booleans()):
        rope = RopeSpec(10_000.0, dim // 2 * 2, draw(st.sampled_from(["half", "interleaved"])))
    return geometry, draw(st.sampled_from([1, 2, 7, 33])), draw(st.integers(0, 2**32)), rope, draw(st.integers(0, 1000))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_any_shape_survives_any_prediction(case: tuple[Geometry, int, int, RopeSpec | None, int]) -> None:
    geometry, tokens, seed, rope, start = case
    random = np.random.default_rng(seed)
    coder = SegmentCoder(geometry, wild_profile(geometry, random), rope)
    assert_survives(coder, random_kv(geometry, tokens, random), start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("predictor", ["static", "marginal"])
def test_what_caches_hold_survives_and_gets_smaller(dtype: str, predictor: str) -> None:
    kv = realistic_kv(tokens=256, dtype=dtype, heads=3)
    profile = measure(kv, dtype, ROPE, 0, predictor)
    streams = assert_survives(SegmentCoder(Geometry.of(kv, dtype), profile, ROPE), kv)
    assert sum(len(s.data) for s in streams) < 0.98 * sum(a.nbytes for a in arrays_of(kv))


def test_steps_tell_how_wide_integers_spread() -> None:
    """One channel decides every token's step, over five octaves; N(0, 1) in such steps has the entropy of theory."""
    random = np.random.default_rng(0)
    x = random.normal(size=(1, 2, 256, 2, 64)).astype(np.float32)
    x[..., 0] = 127 * 2.0 ** random.uniform(-5, 0, x.shape[:-1])
    kv = quantise(x, "int8")
    assert isinstance(kv, QuantisedKV)
    entropies = np.log2(np.sqrt(2 * np.pi * np.e) / to_float(kv.steps, "fp16"))
    streams = assert_survives(SegmentCoder(Geometry.of(kv, "int8"), measure(kv, "int8", None, 0), None), kv)
    bits = 8 * sum(len(s.data) for s in streams[1::2]) / (63 / 64 * x.size)
    assert entropies.mean() < bits < 1.06 * entropies.mean()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_steps_come_first_in_each_layer(dtype: str) -> None:
    kv = realistic_kv(layers=2, tokens=20, heads=3, dim=512, dtype=dtype)
    geometry = Geometry.of(kv, dtype)
    streams = SegmentCoder(geometry, measure(kv, dtype, ROPE, 0), ROPE).encode(Segment(0, 20), kv)
    assert len(streams) == 2 * 2 * (1 + 3)
    scalars = to_scalars(kv, dtype)
    expected = [
        part
        for layer in range(2)
        for kind in range(2)
        for part in (kv.steps[layer, kind], *(scalars[layer, kind, :, head] for head in range(3)))
    ]
    digests = [xxhash.xxh3_64_intdigest(np.ascontiguousarray(part).data) for part in expected]
    assert [s.checksum for s in streams] == digests


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_heads_share_streams_as_the_file_says(dtype: str) -> None:
    kv = realistic_kv(tokens=40, heads=4, dtype=dtype)
    geometry, profile = Geometry.of(kv, dtype), measure(kv, dtype, ROPE, 0)
    for group in (1, 2, 4):
        coder = SegmentCoder(geometry, profile, ROPE, group=group)
        streams = assert_survives(coder, kv)
        assert len(streams) == 2 * 2 * (4 // group + (dtype == "int8"))


def test_a_value_that_the_dtype_does_not_have_is_not_sound() -> None:
    kv = realistic_kv(layers=1, tokens=5, heads=1, dtype="fp8_e4m3")
    profile = measure(kv, "fp8_e4m3", ROPE, 0)
    raw = np.full(5 * 16, 0x123, "<u2").view(np.uint8)
    stream = np.concatenate([np.full(4, 0xFF, np.uint8), raw])
    data = np.concatenate([stream, stream, np.zeros(READ_AHEAD, np.uint8)])
    told = []
    coder = SegmentCoder(Geometry.of(kv, "fp8_e4m3"), profile, ROPE)
    coder.decode(Segment(0, 5), data, np.array([164, 328]), lambda i, scalars, sound: told.append((i, sound)))
    assert told == [(0, False), (1, False)]


def test_threads_may_share_a_coder() -> None:
    kvs = [realistic_kv(tokens=64, dtype="int8", seed=i) for i in range(8)]
    coder = SegmentCoder(Geometry.of(kvs[0], "int8"), measure(kvs[0], "int8", ROPE, 0), ROPE)
    with ThreadPoolExecutor(8) as pool:
        several = list(pool.map(lambda kv: coder.encode(Segment(0, 64), kv), kvs))
    for kv, streams in zip(kvs, several, strict=True):
        alone = coder.encode(Segment(0, 64), kv)
        assert [s.data.tobytes() for s in streams] == [s.data.tobytes() for s in alone]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_counted(dtype: str) -> None:
    kv = realistic_kv(tokens=30, dtype=dtype)
    coder = SegmentCoder(Geometry.of(kv, dtype), measure(kv, dtype, ROPE, 0), ROPE)
    assert coder.count(Segment(0, 30), kv).sum() == to_scalars(kv, dtype).size


@pytest.mark.parametrize(("of", "dtype"), [("bf16", "int8"), ("int8", "fp8_e4m3")])
def test_a_profile_of_another_kind_of_dtype_is_refused(of: str, dtype: str) -> None:
    kv = realistic_kv(tokens=30, dtype=of)
    geometry = Geometry.of(kv, of)._replace(dtype=dtype)
    with pytest.raises(InputError, match=f"is not one for {dtype}"):
        SegmentCoder(geometry, measure(kv, of, ROPE, 0), ROPE)
