"""Comparison coders: true ratios under honest names, and what goes in comes out."""

import zlib

import numpy as np
import pytest
from kv_samples import realistic_kv

from prolepsis.coding import peers
from prolepsis.coding.cache_dtypes import FORMATS, TOKEN_DTYPES, DType, arrays_of
from prolepsis.coding.peers import Peer, installed, measure, ratios
from prolepsis.errors import ProlepsisError


def raw_bytes(dtype: DType, tokens: int = 300) -> bytes:
    """Values, then steps."""
    return b"".join(array.tobytes() for array in arrays_of(realistic_kv(dtype=dtype, tokens=tokens)))


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


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
def test_every_coder_gives_back_what_it_was_given(dtype: DType) -> None:
    coders = installed(dtype)
    assert len({peer.name for peer in coders}) == len(coders)
    for raw in (raw_bytes(dtype), raw_bytes(dtype, tokens=1), bytes(4096), np.random.default_rng(0).bytes(1 << 17)):
        for peer in coders:
            speed = measure(peer, raw, runs=2)
            assert speed.coder == peer.name
            assert min(speed[1:]) > 0


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
def test_byte_planes_are_for_values_of_two_bytes(dtype: DType) -> None:
    """They are what makes a general coder of floats better."""
    raw, by_name = raw_bytes(dtype), {peer.name: peer for peer in installed(dtype)}
    assert ("zstd-3 byte planes" in by_name) == (FORMATS[dtype].bits == 16)
    if "zstd-3 byte planes" in by_name:
        plain, planes = (measure(by_name[name], raw, 1).ratio for name in ("zstd-3", "zstd-3 byte planes"))
        assert planes > plain


def test_ratio_and_speed_of_a_sample_are_those_of_what_was_seen() -> None:
    seen: list[int] = []

    def compress(data: bytes) -> bytes:
        seen.append(len(data))
        return data + data[: len(data) // 4]

    peer = Peer("longer", compress, lambda coded: coded[: len(coded) * 4 // 5], sampled=True)
    assert peer.name == "longer sample"
    assert measure(peer, bytes(5 << 20), runs=3).ratio == 0.8
    assert seen == [4 << 20]


def test_a_coder_that_loses_something_is_no_coder() -> None:
    for lossy in (lambda data: data[:-1], lambda data: b"\1" + data[1:]):
        with pytest.raises(ProlepsisError, match="lossy failed: it does not give back what it was given"):
            measure(Peer("lossy", lossy, bytes), bytes(100), runs=1)


def test_a_coder_that_breaks_is_named() -> None:
    def broken(data: bytes) -> bytes:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ProlepsisError, match="broken failed: a bug"):
        measure(Peer("broken", broken, bytes), bytes(100), runs=1)


def test_what_is_not_installed_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(peers, "import_module", missing)
    names = [peer.name for peer in installed("bf16")]
    assert names == [
        "zstd-3", "zstd-3 byte planes", "zstd-19 sample", "zstd-19 byte planes sample", "zlib-1", "lzma-1 sample",
    ]  # fmt: skip
