"""Comparison coders: true ratios under honest names."""

import zlib

import numpy as np
import pytest

from prolepsis.coding.peers import ratios


def test_ratios_are_sizes_divided() -> None:
    raw = np.random.default_rng(0).integers(0, 40, 100_000).astype(np.uint16).tobytes()
    found = ratios(memoryview(raw))
    assert found["zlib-1"] == pytest.approx(len(raw) / len(zlib.compress(raw, 1)))
    assert {"zstd-3", "zstd-3 byte planes", "zstd-19 sample", "zstd-19 byte planes sample"} <= set(found)
    assert min(found.values()) > 1


def test_samples_represent_the_whole() -> None:
    """Half noise, half zeros: a sample from the beginning alone would tell another story."""
    random = np.random.default_rng(0)
    raw = random.bytes(3 << 20) + bytes(3 << 20)
    assert ratios(raw)["zstd-19 sample"] == pytest.approx(2, rel=0.05)


def test_nothing_has_no_ratio() -> None:
    assert ratios(b"") == {}
