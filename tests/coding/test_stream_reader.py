"""Session files read as they arrive."""

import os
import threading
from io import BytesIO

import numpy as np
import pytest
from kv_samples import ROPE
from test_session import IDS, KV, profile, written

from prolepsis.coding import SessionReader, SessionStream, SessionWriter
from prolepsis.errors import SegmentError


class Pipe(BytesIO):
    """Cannot seek; remembers the largest piece asked for."""

    largest = 0

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None
        self.largest = max(self.largest, size)
        return super().read(size)

    def seek(self, *_: object) -> int:
        raise OSError("a pipe")

    tell = seek  # type: ignore[assignment]


@pytest.mark.parametrize("tokens", ["ids", "hashes", "none"])
def test_a_stream_gives_what_a_reader_gives(tokens: str) -> None:
    data = written([1, 99, 300, 200], tokens=tokens).getvalue()
    reader, stream = SessionReader(data), SessionStream(Pipe(data))
    assert stream.header == reader.header
    for (entry, values), expected in zip(stream, reader.segments, strict=True):
        assert (entry.start, entry.count, entry.offset) == (expected.start, expected.count, expected.offset)
        assert np.array_equal(entry.index, expected.index)
        assert np.array_equal(values, KV[:, :, entry.start : entry.stop])
    assert (stream.metadata, stream.saves, stream.bytes_read) == (reader.metadata, reader.saves, len(data))
    assert [e.start for e in SessionStream(Pipe(data)).entries()] == [s.start for s in reader.segments]


def test_a_real_pipe() -> None:
    """One side writes while the other reads; the pipe holds less than a segment."""
    source, sink = os.pipe()

    def write() -> None:
        with open(sink, "wb") as file:
            writer = SessionWriter(file, profile(), dtype="bf16", rope=ROPE)
            for at in (0, 300):
                writer.add(KV[:, :, at : at + 300], IDS[at : at + 300])
                writer.finish(b"save")

    thread = threading.Thread(target=write)
    thread.start()
    with open(source, "rb") as file:
        stream = SessionStream(file, "a pipe")
        assert np.array_equal(np.concatenate([values for _, values in stream], axis=2), KV)
    thread.join()
    assert stream.saves == [300, 600]


def test_segments_come_before_the_end_does() -> None:
    data = written([600]).getvalue()
    stream = SessionStream(Pipe(data[:-1]), "a pipe")
    arrived = iter(stream)
    assert [next(arrived)[0].start for _ in range(3)] == [0, 256, 512]
    with pytest.raises(SegmentError, match="a pipe is truncated: it ends within the trailer"):
        next(arrived)


def test_no_more_is_asked_for_at_once_than_a_mebibyte() -> None:
    """However long a record says it is."""
    data = written([600]).getvalue()
    for length in (100, len(data) - 100):
        pipe = Pipe(data[:length] if length > 100 else data[:12] + b"\xff\xff\xff\x03" + data[16:])
        with pytest.raises(SegmentError, match="truncated"):
            list(SessionStream(pipe))
        assert pipe.largest <= 1 << 20
