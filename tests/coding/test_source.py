"""Bytes from pipes, files and memory: all there are, and room behind them."""

from collections.abc import Callable
from io import BytesIO

import numpy as np
import pytest

from prolepsis.coding.source import RandomSource, Source, random_source
from prolepsis.kernels.rans import READ_AHEAD

DATA = np.random.default_rng(0).bytes(5000)


def in_file(data: bytes) -> RandomSource:
    return random_source(BytesIO(data), "name")


def in_memory(data: bytes) -> RandomSource:
    return random_source(data, "name")


@pytest.mark.parametrize("source", [lambda d: Source(BytesIO(d), "name"), in_file, in_memory])
def test_one_after_the_other(source: Callable[[bytes], Source]) -> None:
    bytes_ = source(DATA)
    assert bytes(bytes_.read(10)) == DATA[:10]
    assert bytes_.position == 10
    assert bytes(bytes_.read(10_000)) == DATA[10:]
    assert bytes_.position == 5000
    assert bytes(bytes_.read(1)) == b""


@pytest.mark.parametrize("source", [in_file, in_memory])
def test_in_any_order(source: Callable[[bytes], RandomSource]) -> None:
    bytes_ = source(DATA)
    bytes_.read(100)
    for offset, length in ((4000, 1000), (0, 5000), (100, 3), (4000, 1000), (5000, 0)):
        payload = bytes_.payload_at(offset, length)
        assert payload is not None
        assert payload.dtype == np.uint8
        assert len(payload) == length + READ_AHEAD
        assert payload[:length].tobytes() == DATA[offset : offset + length]
        assert payload.flags.writeable  # the kernels are compiled for that
    assert bytes_.payload_at(4001, 1000) is None
    assert bytes_.position == 100
    assert not bytes_.skip(4901)
    assert bytes_.skip(100)
    assert bytes(bytes_.read(4)) == DATA[200:204]
    assert bytes_.skip(4796)
    assert bytes(bytes_.read(4)) == b""


def test_a_pipe_gives_payloads_one_after_the_other() -> None:
    source = Source(BytesIO(DATA), "name")
    for begin in (0, 4000):
        payload = source.payload(1000 if begin else 4000)
        assert payload is not None
        assert len(payload) == (1000 if begin else 4000) + READ_AHEAD
        assert payload[:-READ_AHEAD].tobytes() == DATA[begin : begin + (1000 if begin else 4000)]
    assert source.payload(1) is None


def test_memory_is_not_copied_but_at_its_end() -> None:
    source = in_memory(DATA)
    held = np.frombuffer(DATA, np.uint8)
    assert np.shares_memory(source.payload_at(0, 5000 - READ_AHEAD), held)
    assert not np.shares_memory(source.payload_at(0, 5001 - READ_AHEAD), held)


@pytest.mark.parametrize("empty", [b"", bytearray(), memoryview(b""), np.empty(0, np.uint8)])
def test_nothing(empty: object) -> None:
    source = random_source(empty, "name")
    assert (source.size, bytes(source.read(5))) == (0, b"")


def test_a_name_is_found() -> None:
    assert random_source(b"", "").name == "the session data"
    with open(__file__, "rb") as file:
        assert random_source(file, "").name == __file__
