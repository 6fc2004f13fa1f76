"""Session files, written and read segment by segment."""

from io import BytesIO

import numpy as np
import pytest
from kv_samples import ROPE, realistic_kv

from prolepsis.coding import SessionReader, SessionWriter
from prolepsis.coding.hashes import BlockHashes
from prolepsis.coding.profile import measure
from prolepsis.errors import InputError, SegmentError

KV = realistic_kv(tokens=600)
IDS = np.arange(600, dtype=np.uint32) * 7 % 1000
MODEL = {"weights": "sha256:11", "tokenizer": "sha256:22"}


def written(pieces: list[int], **options: object) -> BytesIO:
    """A file of KV and IDS, added in pieces of the given sizes."""
    file = BytesIO()
    settings: dict = {"dtype": "bf16", "rope": ROPE, "model": MODEL, "numerics": "cpu/1"} | options
    start = settings.get("start", 0)
    writer = SessionWriter(file, measure(KV, "bf16", ROPE, start), **settings)
    at = 0
    for size in pieces:
        ids = None if settings.get("tokens") == "none" else IDS[at : at + size]
        writer.add(KV[:, :, at : at + size], ids)
        at += size
    writer.finish(b"chat")
    assert writer.coded_bytes == len(file.getvalue())
    return file


def test_segments_lie_on_the_grid() -> None:
    reader = SessionReader(written([600]))
    assert [(s.start, s.count) for s in reader.segments] == [(0, 256), (256, 256), (512, 88)]
    assert (reader.start, reader.stop, reader.metadata) == (0, 600, b"chat")
    assert reader.raw_bytes == KV.nbytes
    assert reader.coded_bytes < KV.nbytes
    assert reader.ids is not None
    assert np.array_equal(reader.ids, IDS)
    for s, segment in enumerate(reader.segments):
        part = KV[:, :, segment.start : segment.start + segment.count]
        assert np.array_equal(reader.read(s), part)
        out = np.zeros(part.shape, np.uint16)
        assert reader.read(s, out) is out
        assert np.array_equal(out, part)
    reader.verify()


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


class Counting(BytesIO):
    """Counts what is read."""

    amount = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.amount += len(data)
        return data


def test_only_what_is_needed_is_read() -> None:
    file = Counting(written([600]).getvalue())
    reader = SessionReader(file)
    assert file.amount < len(file.getvalue()) / 4
    before = file.amount
    assert np.array_equal(reader.read_all(256), KV[:, :, :256])
    assert file.amount - before == int(reader.segments[0].index["length"].sum())
    assert np.array_equal(reader.read_all(300), KV[:, :, :300])
    assert reader.read_all(0).shape == (2, 2, 0, 2, 16)


def test_ids_can_be_left_out() -> None:
    hashed, none = SessionReader(written([600], tokens="hashes")), SessionReader(written([600], tokens="none"))
    assert hashed.ids is None
    assert none.ids is None
    assert sum(len(s.hashes) for s in hashed.segments) == 37
    assert sum(len(s.hashes) for s in none.segments) == 0
    assert np.array_equal(none.read_all(), KV)


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
        (KV[:1], range(600), "KV of shape"),
        (KV[..., :8], range(600), "KV of shape"),
        (KV[0], range(600), "KV of shape"),
        (KV, range(599), "599 token ids for 600 tokens"),
        (KV, None, "no token ids"),
    ],
)
def test_what_does_not_fit_is_refused(kv: np.ndarray, ids: range | None, message: str) -> None:
    writer = SessionWriter(BytesIO(), measure(KV, "bf16", ROPE, 0), dtype="bf16", rope=ROPE)
    with pytest.raises(InputError, match=message):
        writer.add(kv, ids)


def test_bad_settings_are_refused() -> None:
    profile = measure(KV, "bf16", ROPE, 0)
    with pytest.raises(InputError, match="block size 12 must divide 256"):
        SessionWriter(BytesIO(), profile, dtype="bf16", block_size=12)
    with pytest.raises(InputError, match="block size 16"):
        SessionWriter(BytesIO(), profile, dtype="bf16", start=8)
    writer = SessionWriter(BytesIO(), profile, dtype="bf16")
    with pytest.raises(InputError, match="metadata"):
        writer.finish(bytes((1 << 24) + 1))
    with pytest.raises(InputError, match="out is float32"):
        SessionReader(written([600])).read(0, np.zeros((2, 2, 256, 2, 16), np.float32))


def test_an_unfinished_file_is_not_whole() -> None:
    file = BytesIO()
    SessionWriter(file, measure(KV, "bf16", ROPE, 0), dtype="bf16", rope=ROPE).add(KV, IDS)
    with pytest.raises(SegmentError, match="truncated"):
        SessionReader(file)
