"""The predictor `linear`: exact for every dtype and shape, worth its cost, and refused where it does not belong."""

from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_samples import DIM, HEADS, LAYERS, ROPE, VOCABULARY, linear_kv, linear_profile, rows, segments_of

from prolepsis.coding import RopeSpec, SessionReader, SessionWriter, kv_array
from prolepsis.coding.cache_dtypes import DType, Geometry, QuantisedKV, arrays_of
from prolepsis.coding.linear_matrices import chain_order, chain_size, from_tensors, to_tensors
from prolepsis.coding.linear_profile import LinearProfile
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import measure
from prolepsis.coding.rates import rate
from prolepsis.coding.segment_coder import SegmentCoder
from prolepsis.errors import InputError, SegmentError

DTYPES: tuple[DType, ...] = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4")
INTERLEAVED = RopeSpec(theta=500.0, dim=32, style="interleaved")


def equal(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(arrays_of(a), arrays_of(b), strict=True))


def through_file(kv, ids, profile: LinearProfile) -> bytes:
    """The session file of `kv`, which must read back as it was."""
    file = BytesIO()
    tokens = "none" if ids is None else "ids"
    writer = SessionWriter(file, profile, dtype=profile.geometry.dtype, rope=profile.rope, tokens=tokens)
    writer.add(kv, ids)
    writer.finish()
    assert equal(SessionReader(file.getvalue(), profile=profile).read_all(), kv)
    return file.getvalue()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7, 256, 301])
def test_every_dtype_comes_back(dtype: DType, tokens: int) -> None:
    through_file(*linear_kv(tokens, dtype), linear_profile(dtype))


@pytest.mark.parametrize("rope", [None, INTERLEAVED], ids=["no RoPE", "interleaved"])
def test_every_rope_comes_back_and_helps(rope: RopeSpec | None) -> None:
    kv, ids = linear_kv(280, "bf16", rope)
    profile = linear_profile("bf16", rope)
    coded = len(through_file(kv, ids, profile))
    other = INTERLEAVED if rope is None else replace_theta(rope)
    wrong = len(through_file(kv, ids, replace(profile, rope=other)))
    assert coded < 0.9 * wrong


def replace_theta(rope: RopeSpec) -> RopeSpec:
    return RopeSpec(theta=100.0 * rope.theta, dim=rope.dim, style=rope.style)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_smaller_than_static(dtype: DType) -> None:
    kv, ids = linear_kv(512, dtype)
    geometry = Geometry(dtype, LAYERS, HEADS, DIM)
    parts = [
        (segment, kv_array.part(kv, segment.start, segment.start + segment.count))
        for segment in segments_of(kv, ids, 512)
    ]
    profiles = linear_profile(dtype), measure(kv, dtype, ROPE, 0)
    linear, static = (rate(SegmentCoder(geometry, profile, ROPE), parts) for profile in profiles)
    assert linear.coded_bytes < 0.8 * static.coded_bytes


def test_the_lowest_layer_follows_from_the_token() -> None:
    """All but the rounding of K and V is known: a few bits a value are left of sixteen."""
    kv, ids = linear_kv(256)
    coder = SegmentCoder(Geometry("bf16", LAYERS, HEADS, DIM), linear_profile(), ROPE)
    sizes = [len(stream.data) for stream in coder.encode(Segment(0, 256, ids), kv)]
    assert sum(sizes[:2]) * 8 < 5 * kv[0].size


def test_without_tokens() -> None:
    kv, _ = linear_kv(300)
    through_file(kv, None, linear_profile(with_tokens=False))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_bits_come_back(data: st.DataObject) -> None:
    """NaNs, infinities, the largest and smallest numbers: predictions go wild, and still nothing is lost."""
    dtype = data.draw(st.sampled_from(DTYPES))
    tokens = data.draw(st.integers(1, 40))
    kv, ids = linear_kv(tokens, dtype)
    seed = data.draw(st.integers(0, 1 << 30))
    random = np.random.default_rng(seed)
    for array in arrays_of(kv):
        flat = array.reshape(-1)
        where = random.integers(0, len(flat), data.draw(st.integers(0, len(flat))))
        flat[where] = random.integers(0, 256, (len(where), flat.itemsize), np.uint8).view(flat.dtype)[:, 0]
    through_file(kv, ids, linear_profile(dtype))


def test_segments_do_not_depend_on_each_other() -> None:
    kv, ids = linear_kv(600)
    profile = linear_profile()
    reader = SessionReader(through_file(kv, ids, profile), profile=profile)
    assert np.array_equal(reader.read(2), kv[:, :, 512:])
    assert np.array_equal(reader.read(0), kv[:, :, :256])


def test_another_profile_is_refused() -> None:
    kv, ids = linear_kv(20)
    data = through_file(kv, ids, linear_profile())
    other = linear_profile(with_tokens=False)
    with pytest.raises(SegmentError, match="--profile"):
        SessionReader(data, profile=other).read_all()
    with pytest.raises(SegmentError, match="--profile"):
        SessionReader(data).read_all()


def test_what_it_needs_is_asked_for() -> None:
    profile = linear_profile()
    with pytest.raises(InputError, match="bound_to"):
        replace(profile, embedding=None).predictor(ROPE)
    with pytest.raises(InputError, match="calibrated for"):
        profile.predictor(None)
    with pytest.raises(InputError, match="token ids"):
        profile.predictor(ROPE).begin(Segment(0, 4))
    with pytest.raises(InputError, match="beyond the 50 tokens"):
        profile.predictor(ROPE).begin(Segment(0, 1, np.array([VOCABULARY], np.uint32)))
    with pytest.raises(InputError, match="another model"):
        replace(profile, embedding=None).bound_to(lambda ids: rows(ids) + 1, VOCABULARY)
    assert replace(profile, embedding=None).bound_to(rows, VOCABULARY).fingerprint == profile.fingerprint


def test_heads_that_it_cannot_take() -> None:
    for dim, turned in ((24, 16), (32, 24)):
        with pytest.raises(InputError, match="multiple of 16"):
            chain_order(Geometry("bf16", 1, 1, dim), RopeSpec(1e4, turned, "half"))


def test_chain_order_keeps_pairs_together() -> None:
    half = chain_order(Geometry("bf16", 1, 2, 48), RopeSpec(1e4, 32, "half"))
    assert half.channels[:16].tolist() == [*range(8), *range(16, 24)]
    assert half.channels[32:48].tolist() == list(range(32, 48))
    assert half.pairs.tolist() == [0, 8, -1, 0, 8, -1, -1, -1, -1, -1, -1, -1]
    interleaved = chain_order(Geometry("bf16", 1, 1, 16), RopeSpec(1e4, 16, "interleaved"))
    assert interleaved.channels[:16].tolist() == [*range(0, 16, 2), *range(1, 16, 2)]
    for order in (half, interleaved):
        row = len(order.channels) // 2
        assert sorted(order.channels[:row]) == list(range(row)) == order.channels[row:].tolist()


def test_tensors_are_checked() -> None:
    geometry, hidden = Geometry("bf16", LAYERS, HEADS, DIM), 24
    tensors = to_tensors(linear_profile().matrices)
    assert tensors["chain"].shape == (LAYERS, chain_size(2 * HEADS * DIM))
    again = to_tensors(from_tensors(tensors, geometry, hidden))
    assert all(np.array_equal(again[name], tensors[name]) for name in tensors)
    infinite = tensors["base"].copy()
    infinite[0, 0] = np.inf
    wild = tensors["codes"].copy()
    wild[0, 0] = 2040
    short = tensors["chain"][:1]
    for change in ({"base": infinite}, {"codes": wild}, {"more": wild}, {"base": wild}, {"chain": short}):
        with pytest.raises(ValueError, match=next(iter(change))):
            from_tensors(tensors | change, geometry, hidden)
    with pytest.raises(ValueError, match="differ"):
        from_tensors({k: v for k, v in tensors.items() if k != "base"}, geometry, hidden)


def test_integer_caches_with_useless_steps() -> None:
    kv, ids = linear_kv(30, "int8")
    assert isinstance(kv, QuantisedKV)
    kv.steps[0, 0, :6] = np.array([0, 0x8000, 0x7C00, 0xFC00, 0x7E00, 1], np.uint16)[:, None]
    through_file(kv, ids, linear_profile("int8"))
