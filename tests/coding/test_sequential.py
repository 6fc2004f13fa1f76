"""Predictors that look at all earlier tokens: segments in order, with one past."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from file_parts import Counting, put_together, taken_apart
from kv_samples import realistic_kv
from sequential_samples import EchoProfile

from prolepsis.coding import SessionReader, SessionStream, SessionWriter, decode, encode, kv_array
from prolepsis.coding.cache_dtypes import KV as AnyKV
from prolepsis.coding.cache_dtypes import DType, Geometry, arrays_of, quantise
from prolepsis.coding.past import OwnPast
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import grid_spans, measure
from prolepsis.coding.rates import Rate, rate
from prolepsis.coding.segment_coder import SegmentCoder
from prolepsis.errors import InputError, SegmentError

KV = realistic_kv(layers=3, tokens=600, rope=None)
IDS = np.arange(600, dtype=np.uint32)
PROFILE: Any = EchoProfile(Geometry.of(KV, "bf16"))


def written(pieces: list[int], profile: Any = PROFILE, past: OwnPast | None = None) -> bytes:
    file = BytesIO()
    writer = SessionWriter(file, profile, dtype="bf16", past=past)
    at = 0
    for size in pieces:
        writer.add(KV[:, :, at : at + size], IDS[at : at + size])
        at += size
    writer.finish()
    return file.getvalue()


def past_of(tokens: int, profile: Any = PROFILE) -> OwnPast:
    """One that knows so many."""
    past = OwnPast(profile.geometry, profile.positions)
    past.append(kv_array.part(KV, 0, tokens))
    return past


def with_damage(data: bytes, segment: int, profile: Any = PROFILE) -> bytes:
    """A bit of the last stream of a segment flipped."""
    entry = SessionReader(data, profile=profile).segments[segment]
    damaged = bytearray(data)
    damaged[entry.offset + entry.payload_bytes - 1] ^= 1
    return bytes(damaged)


def same(one: AnyKV, other: AnyKV) -> bool:
    return all(map(np.array_equal, arrays_of(one), arrays_of(other)))


def test_every_way_of_reading_gives_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROLEPSIS_THREADS", "3")
    data = written([1, 99, 300, 200])
    reader = SessionReader(data, profile=PROFILE)
    for number in (3, 5, 0, 1, 4, 4, -1, 2):
        entry = reader.segments[number]
        assert np.array_equal(reader.read(number), KV[:, :, entry.start : entry.stop])
    for start, stop in ((None, None), (300, 520), (0, 40), (599, 600), (5, 5)):
        assert np.array_equal(reader.read_all(start, stop), KV[:, :, slice(start, stop)])
    for given in (reader.decoded(300), SessionStream(BytesIO(data), profile=PROFILE)):
        for entry, values in given:
            assert np.array_equal(values, KV[:, :, entry.start : entry.stop])
    assert reader.faults() == []
    assert np.array_equal(decode(encode(KV, dtype="bf16", profile=PROFILE), profile=PROFILE), KV)


@pytest.mark.parametrize("dtype", ["fp16", "fp8_e4m3", "int4"])
def test_caches_of_other_dtypes(dtype: DType) -> None:
    kv = quantise(KV[:, :, :300], dtype)
    profile: Any = EchoProfile(Geometry.of(kv, dtype))
    assert same(decode(encode(kv, dtype=dtype, profile=profile), profile=profile), kv)


def test_a_past_that_knows_the_tokens_codes_them_alike_and_stays_as_it_is() -> None:
    past = past_of(600)
    before = past.pool.k.copy(), past.pool.v.copy()
    past.pool.k.flags.writeable = past.pool.v.flags.writeable = False
    data = written([600], past=past)
    assert data == written([600])
    assert past.known == 600
    assert all(map(np.array_equal, before, past.pool))
    own = OwnPast(PROFILE.geometry, PROFILE.positions)
    for entry, _ in SessionReader(data, profile=PROFILE).decoded(past=own):
        assert own.known == entry.stop
    assert all(map(np.array_equal, before, own.pool))


@pytest.mark.parametrize("given", [True, False])
def test_files_grow(given: bool) -> None:
    file = BytesIO(written([300]))
    past = past_of(300) if given else None
    writer = SessionWriter.append_to(SessionReader(file, profile=PROFILE), past)
    for first in (300, 400):
        writer.add(KV[:, :, first : first + 100], IDS[first : first + 100])
    writer.finish()
    assert np.array_equal(SessionReader(file, profile=PROFILE).read_all(), KV[:, :, :500])


def test_no_segment_is_decoded_without_need() -> None:
    file = Counting(written([600]))
    reader = SessionReader(file, profile=PROFILE)
    for number, decoded in ((1, [0, 1]), (2, [2]), (2, [2]), (0, [0]), (2, [1, 2])):
        before = file.amount
        reader.read(number)
        assert file.amount - before == sum(reader.segments[i].payload_bytes for i in decoded)
    before = file.amount
    reader.read_all(0, 256)
    assert file.amount - before == reader.segments[0].payload_bytes


def test_behind_a_bad_segment_nothing_is_given() -> None:
    reader = SessionReader(with_damage(written([600]), 1), "some.pkv", profile=PROFILE)
    bad, where = reader.faults()
    assert (bad.segment, where.segment) == (1, 2)
    assert "some.pkv: segment 1 (tokens 256-511), layer 2, V" in bad.why
    assert "builds upon segment 1" in where.why
    past = past_of(0)
    given = reader.decoded(past=past)
    assert np.array_equal(next(given)[1], KV[:, :, :256])
    with pytest.raises(SegmentError, match="segment 1 "):
        next(given)
    assert past.known == 256
    for _ in range(2):
        with pytest.raises(SegmentError, match=r"segment 1 .*checksum differs; segment 2 builds upon it"):
            reader.read(2)
        assert np.array_equal(reader.read(0), KV[:, :, :256])
    with pytest.raises(SegmentError, match="segment 1 "):
        SessionWriter.append_to(SessionReader(BytesIO(with_damage(written([600]), 1)), profile=PROFILE))


def test_where_segments_stand_alone_only_the_bad_one_is_lost() -> None:
    profile = measure(KV, "bf16", None, 0)
    told: list[tuple[int, int]] = []
    reader = SessionReader(with_damage(written([600], profile), 1, profile))
    assert [fault.segment for fault in reader.faults(lambda *step: told.append(step))] == [1]
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_tokens_that_do_not_begin_at_0_are_refused() -> None:
    with pytest.raises(InputError, match="echo/1 builds upon all tokens from position 0 on"):
        encode(KV, dtype="bf16", profile=PROFILE, start=256)
    header, records = taken_apart(written([40]))
    header["start"] = records[0].fields[2] = 256
    records[1].fields[2] += 256
    reader = SessionReader(put_together(header, records), profile=PROFILE)
    with pytest.raises(SegmentError, match="the first one here has position 256"):
        reader.read_all()


def test_positions_beyond_those_of_the_predictor_are_refused() -> None:
    short: Any = EchoProfile(PROFILE.geometry, positions=300)
    with pytest.raises(InputError, match="position 511 is beyond the 300 positions"):
        written([600], short)
    reader = SessionReader(written([600]), "some.pkv", profile=short)
    with pytest.raises(SegmentError, match=r"some\.pkv: segment 1: position 511 is beyond"):
        reader.read_all()


def test_what_is_not_counted_is_known_all_the_same() -> None:
    """Two texts, each from position 0 on, and only their second segments counted."""
    coder = SegmentCoder(PROFILE.geometry, PROFILE, None)
    spans = [*grid_spans(0, 600), *grid_spans(0, 400)]
    parts = [(s, kv_array.copy(kv_array.part(KV, s.start, s.start + s.count))) for s in spans]
    whole = rate(coder, parts)
    second = rate(coder, parts, (segment.start == 256 for segment, _ in parts))
    others = rate(coder, parts, (segment.start != 256 for segment, _ in parts))
    assert whole == Rate(*map(sum, zip(second, others, strict=True)))
    assert second.tokens == 256 + 144
    alone = SegmentCoder(PROFILE.geometry, PROFILE, None).encode(Segment(256, 256), parts[1][1], past_of(256))
    assert sum(len(stream.data) + 20 for stream in alone) < second.coded_bytes
