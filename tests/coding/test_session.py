"""Session files, written and read segment by segment."""

import mmap
from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_parts import Counting
from kv_samples import ROPE, realistic_kv

from prolepsis.coding import SessionReader, SessionStream, SessionWriter, decode, encode
from prolepsis.coding.hashes import BlockHashes
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import Profile, measure
from prolepsis.coding.segment_coder import SegmentCoder
from prolepsis.errors import InputError, SegmentError

KV = realistic_kv(tokens=600)
IDS = np.arange(600, dtype=np.uint32) * 7 % 1000
MODEL = {"weights": "sha256:11", "tokenizer": "sha256:22"}


@cache
def profile() -> Profile:
    """Of KV."""
    return measure(KV, "bf16", ROPE, 0)


def written(pieces: list[int], **options: object) -> BytesIO:
    """A file of KV and IDS, added in pieces of the given sizes."""
    file = BytesIO()
    settings: dict = {"dtype": "bf16", "rope": ROPE, "model": MODEL, "numerics": "cpu/1"} | options
    writer = SessionWriter(file, profile(), **settings)
    at = 0
    for size in pieces:
        ids = None if settings.get("tokens") == "none" else IDS[at : at + size]
        writer.add(KV[:, :, at : at + size], ids)
        at += size
    writer.finish(b"chat")
    assert writer.file_bytes == len(file.getvalue())
    return file


def test_segments_lie_on_the_grid() -> None:
    reader = SessionReader(written([600]))
    assert [(s.start, s.count) for s in reader.segments] == [(0, 256), (256, 256), (512, 88)]
    assert (reader.start, reader.stop, reader.metadata) == (0, 600, b"chat")
    assert (reader.version, reader.saves, reader.torn) == (2, [600], None)
    assert reader.raw_bytes == KV.nbytes
    assert reader.coded_bytes < KV.nbytes
    assert reader.ids is not None
    assert np.array_equal(reader.ids, IDS)
    for s, segment in enumerate(reader.segments):
        part = KV[:, :, segment.start : segment.stop]
        assert np.array_equal(reader.read(s), part)
        out = np.zeros(part.shape, np.uint16)
        assert reader.read(s, out) is out
        assert np.array_equal(out, part)
    reader.verify()
    reader.verify(values=False)


def test_pieces_may_end_anywhere() -> None:
    reader = SessionReader(written([1, 99, 300, 0, 200]))
    assert [(s.start, s.count) for s in reader.segments] == [
        (0, 1),
        (1, 99),
        (100, 156),
        (256, 144),
        (400, 112),
        (512, 88),
    ]
    assert np.array_equal(reader.read_all(), KV)
    whole = SessionReader(written([600]))
    chained = [h for s in reader.segments for h in s.hashes.tolist()]
    assert chained == [h for s in whole.segments for h in s.hashes.tolist()]
    assert len(chained) == 600 // 16


def test_a_start_within_the_grid() -> None:
    reader = SessionReader(written([600], start=240))
    assert [(s.start, s.count) for s in reader.segments] == [(240, 16), (256, 256), (512, 256), (768, 72)]
    assert np.array_equal(reader.read_all(), KV)
    assert np.array_equal(reader.read_all(250, 700), KV[:, :, 10:460])


def test_only_what_is_needed_is_read() -> None:
    file = Counting(written([600]).getvalue())
    reader = SessionReader(file)
    for start, stop, wanted in [
        (None, 256, [0]),
        (0, 300, [0, 1]),
        (256, 257, [1]),
        (511, 513, [1, 2]),
        (512, None, [2]),
        (300, 300, []),
        (600, 900, []),
    ]:
        before = file.amount
        assert np.array_equal(reader.read_all(start, stop), KV[:, :, slice(start, stop)])
        assert file.amount - before == sum(reader.segments[i].payload_bytes for i in wanted)


def test_positions_that_are_not_there_are_left_out() -> None:
    reader = SessionReader(written([600]))
    for start, stop in [(0, 0), (-5, 0), (600, None), (900, 1000), (5, 3)]:
        assert reader.read_all(start, stop).shape == (2, 2, 0, 2, 16)
    assert np.array_equal(reader.read_all(-10, 10_000), KV)


def test_opening_reads_the_index_alone() -> None:
    """Ten times as much KV behind the same number of records costs not a byte more to open."""
    amounts = set()
    for tokens in (20, 200):
        file = Counting(written([tokens], tokens="none").getvalue())
        reader = SessionReader(file)
        amounts.add(file.amount)
        assert file.amount == len(file.getvalue()) - reader.coded_bytes
    assert len(amounts) == 1


def in_memory(kind: type) -> Callable[[bytes, Path], Any]:
    return lambda data, _: kind(data)


def mapped(data: bytes, directory: Path) -> mmap.mmap:
    path = directory / "mapped.pkv"
    path.write_bytes(data)
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@pytest.mark.parametrize(
    "buffer",
    [in_memory(bytes), in_memory(bytearray), in_memory(memoryview), lambda d, _: np.frombuffer(d, np.uint8), mapped],
    ids=["bytes", "bytearray", "memoryview", "array", "mmap"],
)
def test_buffers_are_read_where_they_are(buffer: Callable[[bytes, Path], Any], tmp_path: Path) -> None:
    data = written([600]).getvalue()
    held = buffer(data, tmp_path)
    reader = SessionReader(held)
    assert np.array_equal(reader.read_all(), KV)
    start, end = reader.segments[0].offset, reader.segments[0].payload_bytes
    assert np.shares_memory(reader._source.payload_at(start, end), np.frombuffer(held, np.uint8))
    assert bytes(memoryview(held)) == data


def test_a_mapping_can_be_closed_when_all_is_read(tmp_path: Path) -> None:
    held = mapped(written([600]).getvalue(), tmp_path)
    assert np.array_equal(decode(held), KV)  # type: ignore[arg-type]
    held.close()


def test_kv_comes_as_numpy_and_torch_call_it() -> None:
    half = np.random.default_rng(0).normal(size=(1, 2, 30, 1, 16)).astype(np.float16)
    expected = encode(half)
    file = BytesIO()
    writer = SessionWriter(file, measure(half.view(np.uint16), "fp16", None, 0), dtype="fp16", tokens="none")
    writer.add(half)
    writer.finish()
    assert file.getvalue() == expected
    torch = pytest.importorskip("torch")
    file = BytesIO()
    writer = SessionWriter(file, measure(half.view(np.uint16), "fp16", None, 0), dtype="fp16", tokens="none")
    writer.add(torch.from_numpy(half))
    writer.finish()
    assert file.getvalue() == expected


def test_what_cannot_seek_is_refused_by_the_reader() -> None:
    class Unseekable(BytesIO):
        def seek(self, *_: int) -> int:
            raise OSError("no way back")

    with pytest.raises(InputError, match=r"cannot be read in any order \(no way back\); SessionStream can"):
        SessionReader(Unseekable(written([600]).getvalue()))


def test_segments_of_one_file_read_by_several_threads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROLEPSIS_THREADS", "3")
    for data in (written([600]), written([600]).getvalue()):
        reader = SessionReader(data)
        seen = []
        for segment, values in reader.decoded(100):
            seen.append(segment.start)
            assert np.array_equal(values, KV[:, :, segment.start : segment.stop])
        assert seen == [0, 256, 512]


def test_ids_can_be_left_out() -> None:
    hashed, none = SessionReader(written([600], tokens="hashes")), SessionReader(written([600], tokens="none"))
    assert hashed.ids is None
    assert none.ids is None
    assert sum(len(s.hashes) for s in hashed.segments) == 37
    assert sum(len(s.hashes) for s in none.segments) == 0
    assert np.array_equal(none.read_all(), KV)


@pytest.mark.parametrize("tokens", ["ids", "hashes", "none"])
def test_a_predictor_is_told_no_more_when_coding_than_when_decoding(
    tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[int] | None] = []
    for name in ("encode", "decode"):
        original = getattr(SegmentCoder, name)

        def noting(coder: SegmentCoder, segment: Segment, *rest: Any, original: Any = original) -> Any:
            told.append(None if segment.ids is None else segment.ids.tolist())
            return original(coder, segment, *rest)

        monkeypatch.setattr(SegmentCoder, name, noting)
    monkeypatch.setenv("PROLEPSIS_THREADS", "1")
    SessionReader(written([600], tokens=tokens)).verify()
    assert (
        told[:3]
        == told[3:]
        == [IDS[a:b].tolist() if tokens == "ids" else None for a, b in ((0, 256), (256, 512), (512, 600))]
    )


def test_a_block_hash_stands_for_everything_before_it() -> None:
    ids = np.arange(64, dtype=np.uint32)
    one, other = BlockHashes(16).add(ids), BlockHashes(16).add(np.where(ids == 17, 99, ids).astype(np.uint32))
    assert (one == other).tolist() == [True, False, False, False]


def test_what_differs_is_named() -> None:
    reader = SessionReader(written([600]), "some.pkv")
    reader.require(model=MODEL, numerics="cpu/1", dtype="bf16", layers=2)
    with pytest.raises(SegmentError, match="weights: 'sha256:11' in the file, 'sha256:33' here") as caught:
        reader.require(model={"weights": "sha256:33", "config": "x"})
    assert "config: nothing in the file, 'x' here" in str(caught.value)
    assert "tokenizer: 'sha256:22' in the file, nothing here" in str(caught.value)
    with pytest.raises(SegmentError, match=r"some\.pkv does not fit: numerics is 'cpu/1' in the file, 'cuda/1' here"):
        reader.require(model=MODEL, numerics="cuda/1")


@pytest.mark.parametrize(
    ("kv", "ids", "message"),
    [
        (KV[:1], range(600), r"KV is uint16 \(1, 2, 600, 2, 16\), expected uint16 \(2, 2, tokens, 2, 16\)"),
        (KV[..., :8], range(600), "KV is uint16"),
        (KV[0], range(600), "KV is uint16"),
        (KV.astype(np.float32), range(600), "KV of type float32 cannot be coded"),
        (KV.astype(np.uint8), range(600), "KV is uint8"),
        (KV.view(np.float16), range(600), "float16"),
        (KV, range(599), "599 token ids for 600 tokens"),
        (KV, None, "no token ids"),
    ],
)
def test_what_does_not_fit_is_refused(kv: np.ndarray, ids: range | None, message: str) -> None:
    writer = SessionWriter(BytesIO(), profile(), dtype="bf16", rope=ROPE)
    with pytest.raises(InputError, match=message):
        writer.add(kv, ids)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(InputError, match="block size 12 must divide 256"):
        SessionWriter(BytesIO(), profile(), dtype="bf16", block_size=12)
    with pytest.raises(InputError, match="block size 16"):
        SessionWriter(BytesIO(), profile(), dtype="bf16", start=8)
    writer = SessionWriter(BytesIO(), profile(), dtype="bf16")
    with pytest.raises(InputError, match="metadata"):
        writer.finish(bytes((1 << 24) + 1))
    reader = SessionReader(written([600]))
    with pytest.raises(InputError, match="KV is float32"):
        reader.read(0, np.zeros((2, 2, 256, 2, 16), np.float32))
    with pytest.raises(InputError, match="255 tokens where 256"):
        reader.read(0, np.zeros((2, 2, 255, 2, 16), np.uint16))


def test_an_unfinished_file_is_not_whole() -> None:
    file = BytesIO()
    SessionWriter(file, profile(), dtype="bf16", rope=ROPE).add(KV, IDS)
    with pytest.raises(SegmentError, match=r"truncated.*tokens 0-599.*--recompute"):
        SessionReader(file)
    assert np.array_equal(SessionReader(file, salvage=True).read_all(), KV)


class Trickle:
    """Takes and gives a few bytes at a time, as an unbuffered pipe may; cannot seek."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)

    def read(self, size: int) -> bytes:
        part = bytes(self.data[: min(size, 1000)])
        del self.data[: len(part)]
        return part

    def write(self, data: memoryview) -> int:
        self.data += data[:1000]
        return min(len(data), 1000)


def test_pipes_that_take_and_give_little_at_a_time() -> None:
    file: Any = Trickle()
    writer = SessionWriter(file, profile(), dtype="bf16", rope=ROPE, model=MODEL, numerics="cpu/1")
    writer.add(KV, IDS)
    writer.finish(b"chat")
    assert bytes(file.data) == written([600]).getvalue()
    stream = SessionStream(file)
    assert np.array_equal(np.concatenate([values for _, values in stream], axis=2), KV)
    assert (stream.metadata, stream.saves, stream.bytes_read) == (b"chat", [600], writer.file_bytes)
