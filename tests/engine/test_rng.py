import numpy as np
import pytest

from prolepsis.engine import rng


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, expected):
    """The vectors published with Random123 for philox4x32-10."""
    assert rng.philox(counter, key) == expected


def test_uniforms_are_the_same_forever():
    assert [rng.uniform(7, n) for n in (0, 1, 1 << 40)] == [0.9545971261687, 0.4069604044303493, 0.9082031010921249]
    assert rng.uniform(0, 0) == ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) / 2**53


def test_uniforms_fill_the_unit_interval_evenly_and_seeds_are_unrelated():
    for seed in (0, 1, 2**64 - 1):
        numbers = np.array([rng.uniform(seed, n) for n in range(4096)])
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
        assert np.sum((counts - 64) ** 2 / 64) < 120  # chi-squared, 63 degrees of freedom: p = 2e-5
    pair = np.array([[rng.uniform(seed, n) for n in range(1024)] for seed in (5, 6)])
    assert abs(np.corrcoef(pair)[0, 1]) < 0.15
    assert abs(np.corrcoef(pair[0, 1:], pair[0, :-1])[0, 1]) < 0.15


def test_fresh_seeds_differ_and_survive_json():
    seeds = {rng.fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert max(seeds) < 2**53
