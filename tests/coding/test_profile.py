"""Profiles: measured, packed, and refused when they hold nonsense."""

import hashlib

import numpy as np
import pytest
import zstandard
from kv_samples import ROPE, realistic_kv, values

from prolepsis.coding import tables
from prolepsis.coding.floats import to_float
from prolepsis.coding.profile import Geometry, Profile, grid_spans, measure, scale_codes

KV = realistic_kv(layers=2, tokens=400, heads=2, dim=16)
UNIVERSAL = "eaa087f95951009617be2447d8d0d60c97935ae66cefcdd8fc84b8e794b55ee3"
GEOMETRY = Geometry("bf16", 2, 2, 16)


def fitted() -> Profile:
    profile = measure(KV, "bf16", ROPE, 0)
    return Profile(profile.means, profile.scales, tables.fit(np.zeros(tables.SHAPE, np.int64)))


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


def test_few_tokens_get_one_scale_for_each_head() -> None:
    profile = measure(KV[:, :, :10], "bf16", ROPE, 0)
    assert profile.means is None
    assert profile.frequencies is None
    assert (profile.scales == profile.scales[..., :1]).all()
    assert len(profile.to_bytes()) < 60


@pytest.mark.parametrize("profile", [fitted(), measure(KV, "bf16", ROPE, 0), measure(KV[:, :, :10], "bf16", ROPE, 0)])
def test_packing(profile: Profile) -> None:
    back = Profile.from_bytes(profile.to_bytes(), GEOMETRY)
    for name in ("means", "scales", "frequencies"):
        a, b = getattr(profile, name), getattr(back, name)
        assert (a is None and b is None) or np.array_equal(a, b)


def with_value(profile: Profile, **change: int) -> bytes:
    """Packed, after setting the first number of one array."""
    for name, value in change.items():
        getattr(profile, name).flat[0] = value
    return profile.to_bytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "unknown kind"),
        (b"\x04", "unknown kind"),
        (b"\x01junk", "cannot be decompressed"),
        (bytes([0]) + zstandard.compress(bytes(15)), "15 bytes where 16 were expected"),
        (bytes([0]) + zstandard.compress(bytes(1 << 24)), "profile"),
        (bytes([0]) + zstandard.compress(b"\xff" * 16), "scale that is not finite"),
        (with_value(fitted(), means=0x7F80), "mean that is not a moderate number"),
        (with_value(fitted(), frequencies=4000), "do not sum to 4096"),
    ],
)
def test_nonsense_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Profile.from_bytes(data, GEOMETRY)


def test_frequencies_keep_what_was_seen() -> None:
    counts = np.zeros(tables.SHAPE, np.int64)
    counts[0, 3], counts[0, 4] = 10_000_000, 1
    frequencies = tables.normalise(counts)
    assert tables.is_valid(frequencies)
    assert frequencies[0, [3, 4, 127]].tolist() == [4094, 1, 1]
    assert tables.is_valid(tables.fit(counts))
    assert tables.is_valid(tables.universal())


def test_the_universal_tables_never_change() -> None:
    """They are part of the format: files without tables of their own are decoded with them."""
    assert hashlib.sha256(tables.universal().tobytes()).hexdigest() == UNIVERSAL


def test_scale_codes_are_an_eighth_of_an_octave() -> None:
    codes = scale_codes(np.array([0.0, 1e-300, 1.0, 1.125, 2.0, 1e300])).tolist()
    assert codes == [0, 1, 127 * 8, 127 * 8 + 1, 128 * 8, 2025]


def test_spans_lie_on_the_grid() -> None:
    spans = [(s.start, s.count) for s in grid_spans(200, 400)]
    assert spans == [(200, 56), (256, 256), (512, 88)]
    assert list(grid_spans(7, 0)) == []
