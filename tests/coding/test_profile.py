"""Profiles: measured, packed, and refused when they hold nonsense."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from kv_samples import ROPE, realistic_kv, values

from prolepsis.coding import SessionReader, tables
from prolepsis.coding.cache_dtypes import Geometry, to_float
from prolepsis.coding.kv_array import part
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import Profile, fingerprint, grid_spans, measure, measure_parts, scale_codes

KV = realistic_kv(layers=2, tokens=400, heads=2, dim=16)
UNIVERSAL = "eaa087f95951009617be2447d8d0d60c97935ae66cefcdd8fc84b8e794b55ee3"
GEOMETRY = Geometry("bf16", 2, 2, 16)
STEPS = np.zeros((2, 2, 2, 1), np.uint16)
GOLDEN = ["2c58888f4a2e8d76", "4b074982eb8a2d47"]  # means and scales, as version 1 read them


def fitted() -> Profile:
    profile = measure(KV, "bf16", ROPE, 0)
    return replace(profile, frequencies=tables.fit(np.zeros(tables.SHAPE, np.int64), "bf16"))


def test_means_and_scales_are_measured() -> None:
    profile = measure(KV, "bf16", ROPE, 0)
    assert profile.means is not None
    v = values(KV[:, 1], "bf16").astype(np.float64)
    assert np.allclose(to_float(profile.means, "bf16")[:, 1], v.mean(axis=1), rtol=0.01, atol=1e-4)
    assert np.array_equal(profile.scales[:, 1], scale_codes(v.std(axis=1)))


def test_means_of_k_are_taken_before_rope() -> None:
    turned, plain = (
        measure(KV, "bf16", ROPE, 0).means,
        measure(realistic_kv(tokens=400, rope=None), "bf16", None, 0).means,
    )
    assert turned is not None
    assert plain is not None
    assert np.allclose(to_float(turned, "bf16"), to_float(plain, "bf16"), rtol=0.1, atol=0.15)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "int8", "int4"])
def test_every_dtype_is_measured_by_its_values(dtype: str) -> None:
    kv = realistic_kv(tokens=400, dtype=dtype)
    profile, plain = measure(kv, dtype, ROPE, 0), measure(KV, "bf16", ROPE, 0)
    v = values(kv, dtype)[:, 1].astype(np.float64)
    assert np.allclose(to_float(profile.means, "bf16")[:, 1], v.mean(axis=1), rtol=0.01, atol=1e-4)
    assert np.array_equal(profile.scales[:, 1], scale_codes(v.std(axis=1)))
    if dtype in ("fp8_e4m3", "int8"):  # the others' own rounding is a good part of the deviation
        assert np.abs(profile.scales.astype(int) - plain.scales.astype(int)).max() <= 1


def test_steps_are_measured() -> None:
    kv = realistic_kv(tokens=400, dtype="int8")
    steps = measure(kv, "int8", ROPE, 0).steps
    assert steps is not None
    assert measure(KV, "bf16", ROPE, 0).steps is None
    x = to_float(kv.steps, "fp16").astype(np.float64)
    assert np.allclose(to_float(steps.means, "bf16")[..., 0], x.mean(axis=2), rtol=0.005)
    assert np.array_equal(steps.scales[..., 0], scale_codes(x.std(axis=2)))


def test_marginal_has_one_scale_for_each_head_and_predicts_nothing() -> None:
    profile = measure(KV, "bf16", ROPE, 0, predictor="marginal")
    assert (profile.means, profile.predictor_name) == (None, "marginal/1")
    squares = values(KV, "bf16").astype(np.float64) ** 2
    assert np.array_equal(profile.scales[..., 3], scale_codes(np.sqrt(squares.mean(axis=(2, 4)))))
    predictor = profile.predictor(ROPE)
    means = predictor.begin(Segment(100, 8)).predict(range(2)).means
    assert predictor.name == "marginal/1"
    assert not means.any()
    assert not np.signbit(means).any()


def test_a_profile_of_many_texts_is_measured_part_by_part() -> None:
    """Parts need not lie on the grid; parts of one cache measure as the whole of it."""
    kv = realistic_kv(tokens=400, dtype="int8")
    spans = [Segment(0, 100), Segment(100, 30), Segment(130, 270)]
    calls = []

    def parts() -> list:
        calls.append(1)
        return [(span, part(kv, span.start, span.start + span.count)) for span in spans]

    measured = measure_parts(parts, Geometry("int8", 2, 2, 16), ROPE, tokens=400)
    whole = measure(kv, "int8", ROPE, 0)
    assert np.array_equal(measured.means, whole.means)
    assert np.array_equal(measured.scales, whole.scales)
    assert np.array_equal(measured.steps.scales, whole.steps.scales)
    assert len(calls) == 2
    many = measure_parts(parts, Geometry("int8", 2, 2, 16), ROPE)
    assert many.frequencies is not None
    assert tables.is_valid(many.frequencies)
    assert np.array_equal(many.means, whole.means)


def test_few_tokens_get_one_scale_for_each_head() -> None:
    profile = measure(KV[:, :, :10], "bf16", ROPE, 0)
    assert profile.means is None
    assert profile.frequencies is None
    assert (profile.scales == profile.scales[..., :1]).all()
    assert len(profile.to_bytes()) < 60


INT8 = realistic_kv(layers=2, tokens=400, heads=2, dim=16, dtype="int8")


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (fitted, "bf16"),
        (lambda: measure(KV, "bf16", ROPE, 0), "bf16"),
        (lambda: measure(KV[:, :, :10], "bf16", ROPE, 0), "bf16"),
        (lambda: measure(KV, "bf16", ROPE, 0, predictor="marginal"), "bf16"),
        (lambda: measure(INT8, "int8", ROPE, 0), "int8"),
        (lambda: measure(part(INT8, 0, 10), "int8", ROPE, 0), "int8"),
        (lambda: replace(fitted(), steps=measure(INT8, "int8", ROPE, 0).steps), "int4"),
    ],
)
def test_packing(make: Callable[[], Profile], dtype: str) -> None:
    profile = make()
    packed = profile.to_bytes()
    back = Profile.from_bytes(packed, GEOMETRY._replace(dtype=dtype), profile.predictor_name)
    assert_same(profile, back)
    assert back.predictor_name == profile.predictor_name
    assert back.to_bytes() == packed
    assert back.fingerprint == profile.fingerprint == fingerprint(packed)


def assert_same(one: Profile, other: Profile) -> None:
    for name in ("means", "scales", "frequencies"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None and b is None) or np.array_equal(a, b)
    assert (one.steps is None) == (other.steps is None)
    if one.steps is not None and other.steps is not None:
        assert_same(one.steps, other.steps)


def test_bytes_that_were_read_are_kept() -> None:
    """Another release of Zstandard may pack them differently, and they give the profile its name."""
    packed = measure(KV, "bf16", ROPE, 0).to_bytes()
    planes = zstandard.decompress(packed[1:])
    otherwise = packed[:1] + zstandard.ZstdCompressor(level=1).compress(planes)
    assert otherwise != packed
    assert Profile.from_bytes(otherwise, GEOMETRY).to_bytes() == otherwise


def test_version_1_profiles_are_read_as_before() -> None:
    with open(Path(__file__).parent.parent / "data" / "golden_bf16.pkv", "rb") as file:
        header = SessionReader(file).header
    profile = Profile.from_bytes(header.profile, header.geometry)
    assert profile.to_bytes() == header.profile
    digests = [hashlib.sha256(a.tobytes()).hexdigest()[:16] for a in (profile.means, profile.scales)]
    assert (profile.frequencies, profile.steps) == (None, None)
    assert digests == GOLDEN


def with_value(profile: Profile, **change: int) -> bytes:
    """Packed, after setting the first number of one array."""
    for name, value in change.items():
        getattr(profile, name).flat[0] = value
    return profile.to_bytes()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: b"", "unknown kind"),
        (lambda: b"\x04", "unknown kind"),
        (lambda: b"\x01junk", "cannot be decompressed"),
        (lambda: bytes([0]) + zstandard.compress(bytes(15)), "15 bytes where 16 were expected"),
        (lambda: bytes([0]) + zstandard.compress(bytes(1 << 24)), "profile"),
        (lambda: bytes([0]) + zstandard.compress(b"\xff" * 16), "scale that is not finite"),
        (lambda: with_value(fitted(), means=0x7F80), "mean that is not a moderate number"),
        (lambda: with_value(fitted(), frequencies=4000), "do not sum to 4096"),
        (lambda: measure(INT8, "int8", ROPE, 0).to_bytes(), "profile"),
    ],
)
def test_nonsense_is_refused(make: Callable[[], bytes], message: str) -> None:
    data = make()
    with pytest.raises(ValueError, match=message):
        Profile.from_bytes(data, GEOMETRY)


def test_nonsense_about_steps_is_refused() -> None:
    geometry, profile = GEOMETRY._replace(dtype="int8"), measure(INT8, "int8", ROPE, 0)
    assert profile.steps is not None
    with pytest.raises(ValueError, match="scale that is not finite"):
        Profile.from_bytes(replace(profile, steps=replace(profile.steps, scales=STEPS + 2040)).to_bytes(), geometry)
    with pytest.raises(ValueError, match="mean that is not a moderate number"):
        Profile.from_bytes(replace(profile, steps=replace(profile.steps, means=STEPS + 0x7F80)).to_bytes(), geometry)
    with pytest.raises(ValueError, match="bytes where"):
        Profile.from_bytes(measure(KV, "bf16", ROPE, 0).to_bytes(), geometry)


def test_marginal_has_no_single_channels() -> None:
    with pytest.raises(ValueError, match="single channels, which marginal/1 does not have"):
        Profile.from_bytes(fitted().to_bytes(), GEOMETRY, "marginal/1")


def test_frequencies_keep_what_was_seen() -> None:
    counts = np.zeros(tables.SHAPE, np.int64)
    counts[0, 3], counts[0, 4] = 10_000_000, 1
    frequencies = tables.normalise(counts)
    assert tables.is_valid(frequencies)
    assert frequencies[0, [3, 4, 127]].tolist() == [4094, 1, 1]
    assert tables.is_valid(tables.fit(counts, "bf16"))
    assert tables.is_valid(tables.universal("bf16"))


def test_the_universal_tables_never_change() -> None:
    """They are part of the format: files without tables of their own are decoded with them."""
    assert hashlib.sha256(tables.universal("bf16").tobytes()).hexdigest() == UNIVERSAL


def test_scale_codes_are_an_eighth_of_an_octave() -> None:
    codes = scale_codes(np.array([0.0, 1e-300, 1.0, 1.125, 2.0, 1e300])).tolist()
    assert codes == [0, 1, 127 * 8, 127 * 8 + 1, 128 * 8, 2025]


def test_spans_lie_on_the_grid() -> None:
    spans = [(s.start, s.count) for s in grid_spans(200, 400)]
    assert spans == [(200, 56), (256, 256), (512, 88)]
    assert list(grid_spans(7, 0)) == []
