"""Session files that grow: whatever happens to a save, the ones before it stay, and are found again."""

import hashlib
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import realistic_kv
from spec_decoder import decode_file

from prolepsis.coding import RopeSpec, SessionReader, SessionStream, SessionWriter, decode, kv_array
from prolepsis.coding.cache_dtypes import DType, arrays_of, quantise
from prolepsis.coding.profile import Profile, measure
from prolepsis.errors import InputError, SegmentError

ROPE = RopeSpec(theta=10_000.0, dim=4, style="interleaved")
KV = realistic_kv(layers=1, tokens=700, heads=1, dim=4, rope=ROPE)
IDS = np.random.default_rng(0).integers(0, 50_000, 700).astype(np.uint32)


@cache
def profile() -> Profile:
    """Of the first of KV."""
    return measure(KV[:, :, :40], "bf16", ROPE, 0)


@pytest.fixture(autouse=True)
def _without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are so small here that starting threads would take most of the time."""
    monkeypatch.setenv("PROLEPSIS_THREADS", "1")


def begin(file: BytesIO, **settings: object) -> SessionWriter:
    return SessionWriter(file, profile(), dtype="bf16", rope=ROPE, **settings)  # type: ignore[arg-type]


def add(writer: SessionWriter, count: int) -> None:
    """The next tokens of KV and IDS."""
    span = slice(writer.position, writer.position + count)
    writer.add(KV[:, :, span], IDS[span] if writer.header.tokens != "none" else None)


def appended(file: BytesIO, count: int, metadata: bytes) -> None:
    """Open anew, add, and finish."""
    writer = SessionWriter.append_to(SessionReader(file, salvage=True))
    add(writer, count)
    writer.finish(metadata)
    assert writer.file_bytes == len(file.getvalue())


class State(NamedTuple):
    """What a file holds up to a byte. saved: whether a trailer ends there."""

    end: int
    stop: int
    metadata: bytes
    saved: bool


def assert_holds(data: bytes, stop: int, metadata: bytes) -> None:
    """A sound file of the first `stop` tokens, for every way of reading."""
    reader, stream = SessionReader(data), SessionStream(BytesIO(data))
    assert (reader.stop, reader.metadata, reader.torn) == (stop, metadata, None)
    assert reader.ids is not None
    assert np.array_equal(reader.ids, IDS[:stop])
    assert np.array_equal(reader.read_all(), KV[:, :, :stop])
    assert sum(entry.count for entry, _ in stream) == stop
    assert stream.metadata == metadata


SAVES = [(20, b"first"), (0, b"only metadata changed"), (250, b""), (1, b"x" * 100)]


def grown() -> tuple[BytesIO, list[State]]:
    """A file of several saves, and its state after each."""
    file = BytesIO()
    writer = begin(file)
    states = []
    for i, (count, metadata) in enumerate(SAVES):
        if i == 0:
            add(writer, count)
            writer.finish(metadata)
        else:
            appended(file, count, metadata)
        states.append(State(len(file.getvalue()), sum(n for n, _ in SAVES[: i + 1]), metadata, True))
    return file, states


def test_appending_changes_no_byte_that_was_there() -> None:
    file, states = grown()
    data = file.getvalue()
    for state in states:
        assert_holds(data[: state.end], state.stop, state.metadata)
    reader = SessionReader(data)
    assert reader.saves == [state.stop for state in states]
    assert [(s.start, s.count) for s in reader.segments] == [(0, 20), (20, 236), (256, 14), (270, 1)]


def test_block_hashes_do_not_tell_how_a_file_grew() -> None:
    whole = BytesIO()
    writer = begin(whole)
    add(writer, 271)
    file, _ = grown()
    hashes = [[h for s in SessionReader(f, salvage=True).segments for h in s.hashes.tolist()] for f in (whole, file)]
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 271 // 16


def test_the_page_tells_how_to_read_a_file_that_grew() -> None:
    file, states = grown()
    assert np.array_equal(decode_file(file.getvalue()).scalars, KV[:, :, : states[-1].stop])


def test_a_golden_file_that_grew() -> None:
    """Written by version 2, with three saves; must decode for ever."""
    data = (Path(__file__).parent.parent / "data" / "golden_2.pkv").read_bytes()
    reader = SessionReader(data)
    kv = reader.read_all()
    assert (reader.version, reader.saves, reader.metadata) == (2, [100, 100, 280], b'{"golden":3}')
    assert hashlib.sha256(np.asarray(kv).tobytes()).hexdigest() == (
        "7065d00842c982641c04b5469c765a16ebdb7b2214b1100ef3ec3317b4643e9c"
    )
    assert reader.segments[-1].hashes[-1] == 0x223895D6E302BCED
    assert np.array_equal(decode_file(data).scalars, kv)


def test_one_writer_may_end_several_saves() -> None:
    file, again = grown()[0], BytesIO()
    writer = begin(again)
    for count, metadata in SAVES:
        add(writer, count)
        writer.finish(metadata)
    assert again.getvalue() == file.getvalue()


def expected_state(cut: int, states: list[State], first_segments: list[State]) -> State | None:
    """What must be saved of a file that was cut: the last whole save, or what is whole of the first."""
    saved = [state for state in states if state.end <= cut]
    return saved[-1] if saved else max((s for s in first_segments if s.end <= cut), default=None)


def test_cut_at_any_byte_a_file_is_an_earlier_one() -> None:
    """What a process that is killed while it saves leaves behind."""
    file, states = grown()
    data = file.getvalue()
    segment = SessionReader(data).segments[0]
    first = [State(segment.offset + segment.payload_bytes, segment.stop, b"", False)]
    header = segment.offset - 40 - segment.ids.nbytes - segment.hashes.nbytes - segment.index.nbytes
    for cut in range(header, len(data)):
        torn = data[:cut]
        expected = expected_state(cut, states, first) or State(header, 0, b"", False)
        reader = SessionReader(torn, salvage=True)
        assert (reader.end, reader.stop, reader.metadata) == expected[:3]
        assert bool(reader.saves) == expected.saved
        if expected.saved and expected.end == cut:
            assert reader.torn is None
            continue
        assert reader.torn is not None
        for read in (SessionReader, lambda t: list(SessionStream(BytesIO(t)).entries())):
            with pytest.raises(SegmentError):
                read(torn)
        if cut % 37 == 0:
            assert np.array_equal(reader.read_all(), KV[:, :, : expected.stop])
            mended = BytesIO(torn)
            appended(mended, 30, b"mended")
            assert_holds(mended.getvalue(), expected.stop + 30, b"mended")
            assert mended.getvalue()[: expected.end] == data[: expected.end]


def test_what_is_whole_is_said() -> None:
    file, states = grown()
    with pytest.raises(SegmentError, match=r"it lies behind the trailer of a whole save \(tokens 0-269") as caught:
        SessionReader(file.getvalue()[:-1])
    assert f"up to byte {states[2].end}" in str(caught.value)
    assert "--recompute" in str(caught.value)
    with pytest.raises(SegmentError, match=r"the segments before it are whole \(tokens 0-19"):
        SessionReader(file.getvalue()[: states[0].end - 1])
    empty = BytesIO()
    begin(empty).finish(b"nothing")
    with pytest.raises(SegmentError, match=r"ends within the trailer$"):
        SessionReader(empty.getvalue()[:-1])


def test_every_flipped_byte_of_a_file_that_grew_is_found() -> None:
    data = grown()[0].getvalue()
    random = np.random.default_rng(0)
    for i in range(len(data)):
        damaged = bytearray(data)
        damaged[i] ^= int(random.integers(1, 256))
        with pytest.raises(SegmentError):
            SessionReader(damaged).verify(values=False)
        with pytest.raises(SegmentError):
            list(SessionStream(BytesIO(damaged)).entries())
        if i % 50 == 0:
            with pytest.raises(SegmentError):
                decode(damaged)


def test_records_of_another_save_or_file_do_not_fit() -> None:
    """Sound records that stand where others were: each is bound to all that come before it."""
    file, states = grown()
    other, data = BytesIO(), file.getvalue()
    writer = begin(other, numerics="another")
    add(writer, 20)
    writer.finish(b"first")
    swapped = other.getvalue() + data[states[0].end :]
    assert SessionReader(swapped, salvage=True).stop == 20
    left_out = data[: states[0].end] + data[states[1].end :]
    assert SessionReader(left_out, salvage=True).metadata == b"first"
    for broken in (swapped, left_out):
        with pytest.raises(SegmentError, match="checksum"):
            decode(broken)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    kinds = st.sampled_from(["save", "save", "save", "unfinished", "cut", "overwritten", "noise"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 1 << 20)), min_size=1, max_size=7))


@settings(max_examples=60, deadline=None)
@given(histories(), st.integers(0, 40), st.sampled_from(["ids", "none"]))
def test_any_history(history: list[tuple[str, int]], first: int, tokens: str) -> None:
    """Saves, saves that are broken off, files that are cut or end in rubbish: against a list of what was saved."""
    file = BytesIO()
    writer = begin(file, tokens=tokens)
    add(writer, first)
    writer.finish(b"0")
    states = [State(len(file.getvalue()), first, b"0", True)]
    for i, (kind, number) in enumerate(history):
        data = file.getvalue()
        if kind == "cut":
            file = BytesIO(data[: states[0].end + number % (len(data) - states[0].end + 1)])
        elif kind == "overwritten":
            kept = states[number % len(states)].end
            file = BytesIO(data[:kept] + bytes(len(data) - kept))
        elif kind == "noise":
            file = BytesIO(data + np.random.default_rng(number).bytes(1 + number % 100))
        else:
            writer = SessionWriter.append_to(SessionReader(file, salvage=True))
            add(writer, number % 120)
            if kind == "save":
                writer.finish(str(i + 1).encode())
        data = file.getvalue()
        intact = kept if kind == "overwritten" else len(data)
        states = [state for state in states if state.end <= intact]
        if kind == "save":
            states.append(State(len(data), writer.position, str(i + 1).encode(), True))
        reader = SessionReader(data, salvage=True)
        assert (reader.end, reader.stop, reader.metadata) == states[-1][:3]
        assert np.array_equal(reader.read_all(), KV[:, :, : reader.stop])
        assert (reader.torn is None) == (len(data) == reader.end)
        if tokens == "ids":
            assert np.array_equal(reader.ids, IDS[: reader.stop])  # type: ignore[arg-type]
        stream = SessionStream(BytesIO(data))
        with nullcontext() if reader.torn is None else pytest.raises(SegmentError):
            assert sum(entry.count for entry in stream.entries()) == reader.stop
            assert (stream.saves, stream.metadata) == (reader.saves, reader.metadata)


@pytest.mark.parametrize("tokens", ["hashes", "none"])
def test_files_without_ids_grow_too(tokens: str) -> None:
    file = BytesIO()
    writer = begin(file, tokens=tokens)
    add(writer, 32)
    writer.finish()
    appended(file, 300, b"")
    whole = BytesIO()
    writer = begin(whole, tokens=tokens)
    add(writer, 332)
    assert np.array_equal(decode(file.getvalue()), KV[:, :, :332])
    hashes = [[h for s in SessionReader(f, salvage=True).segments for h in s.hashes.tolist()] for f in (file, whole)]
    assert hashes[0] == hashes[1]
    if tokens == "hashes":
        with pytest.raises(InputError, match="ends within a block and keeps no token ids"):
            SessionWriter.append_to(SessionReader(file))


def test_as_long_as_nothing_is_added_the_file_stays() -> None:
    data = grown()[0].getvalue() + b"rubbish"
    file = BytesIO(data)
    writer = SessionWriter.append_to(SessionReader(file, salvage=True))
    assert file.getvalue() == data
    writer.abandon()
    assert file.getvalue() == data
    add(writer, 5)
    assert file.getvalue() != data
    writer.abandon()
    assert file.getvalue() == data.removesuffix(b"rubbish")


@pytest.mark.parametrize("dtype", ["fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"])
def test_caches_of_every_dtype_grow(dtype: DType) -> None:
    """Integers have a stream of steps before those of their heads; each stream is found and named if damaged."""
    kv = quantise(KV, dtype)
    file = BytesIO()
    writer = SessionWriter(file, measure(kv, dtype, ROPE, 0), dtype=dtype, rope=ROPE)
    for first, stop in ((0, 30), (30, 300)):
        writer = writer if first == 0 else SessionWriter.append_to(SessionReader(file))
        writer.add(kv_array.part(kv, first, stop), IDS[first:stop])
        writer.finish()
    data = file.getvalue()
    reader = SessionReader(data)
    assert reader.raw_bytes == sum(a[:, :, :300].nbytes for a in arrays_of(kv))
    for read in (reader.read_all(20, 290), SessionReader(file).read_all(20, 290)):
        for array, expected in zip(arrays_of(read), arrays_of(kv_array.part(kv, 20, 290)), strict=True):
            assert np.array_equal(array, expected)
    steps = ["layer 0, K, steps"] if dtype.startswith("int") else []
    assert [reader.header.stream_name(i) for i in range(len(steps) + 1)] == [*steps, "layer 0, K, heads 0-0"]
    at = reader.segments[0].offset
    for stream, length in enumerate(reader.segments[0].index["length"].tolist()):
        damaged = bytearray(data)
        damaged[at + length - 1] ^= 1
        with pytest.raises(SegmentError, match=reader.header.stream_name(stream)):
            decode(damaged)
        at += length


@cache
def outside() -> Profile:
    """The same, kept elsewhere."""
    return replace(profile(), embedded=False)


def test_a_profile_may_be_kept_outside() -> None:
    file = BytesIO()
    writer = SessionWriter(file, outside(), dtype="bf16", rope=ROPE)
    add(writer, 40)
    writer.finish(b"outside")
    data = file.getvalue()
    assert len(data) < len(encoded_with_profile_inside())
    assert np.array_equal(SessionReader(data, profile=outside()).read_all(), KV[:, :, :40])
    for _, values in SessionStream(BytesIO(data), profile=outside()):
        assert np.array_equal(values, KV[:, :, :40])
    writer = SessionWriter.append_to(SessionReader(file, profile=outside()))
    add(writer, 10)
    writer.finish(b"more")
    assert np.array_equal(SessionReader(file, profile=outside()).read_all(), KV[:, :, :50])


def encoded_with_profile_inside() -> bytes:
    file = BytesIO()
    writer = begin(file)
    add(writer, 40)
    writer.finish(b"outside")
    return file.getvalue()


def test_without_its_profile_a_file_can_be_looked_into_but_not_decoded() -> None:
    file = BytesIO()
    writer = SessionWriter(file, outside(), dtype="bf16", rope=ROPE)
    add(writer, 40)
    writer.finish(b"outside")
    reader = SessionReader(file, "some.pkv")
    fingerprint = reader.header.profile_fingerprint
    assert (reader.stop, reader.metadata) == (40, b"outside")
    reader.verify(values=False)
    assert len(list(SessionStream(BytesIO(file.getvalue())).entries())) == 1
    other = measure(KV, "bf16", ROPE, 0)
    for given_, told in ((None, "none was given"), (other, "the one given is")):
        for read in (
            lambda p=given_: SessionReader(file, "some.pkv", profile=p).read_all(),
            lambda p=given_: list(SessionStream(BytesIO(file.getvalue()), "some.pkv", profile=p)),
            lambda p=given_: SessionWriter.append_to(SessionReader(file, "some.pkv", profile=p)),
        ):
            with pytest.raises(SegmentError, match=rf"some\.pkv needs the profile {fingerprint}.*static/1") as caught:
                read()
            assert told in str(caught.value)
            assert "--profile" in str(caught.value)


def test_a_profile_in_the_file_needs_no_other() -> None:
    file, states = grown()
    reader = SessionReader(file, profile=measure(KV, "bf16", ROPE, 0))
    assert np.array_equal(reader.read_all(), KV[:, :, : states[-1].stop])
