"""Reading session files."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding import kv_array
from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.cache_dtypes import KV
from prolepsis.coding.checked_decoder import CheckedDecoder
from prolepsis.coding.container import SegmentEntry, Trailer, read_records
from prolepsis.coding.header import Front, read_front
from prolepsis.coding.predictors import Past
from prolepsis.coding.segment_coder import SegmentCoder
from prolepsis.coding.side_by_side import in_order, segments_at_once
from prolepsis.coding.source import FileSource, random_source
from prolepsis.errors import SegmentError

T = TypeVar("T")
Progress = Callable[[int, int], None]


class SegmentFault(NamedTuple):
    """Why a segment, by its number, cannot be decoded: it is bad itself, or builds upon one that is."""

    segment: int
    why: str


class SessionReader:
    """A session file, opened: its header and index are read and checked, segments when asked for.

    Where its coder is sequential, decoding a segment takes decoding those before it, as far as it was not done last,
    and the KV is kept; such a reader is not for two threads at once.

    `header`, `version`, `segments` (SegmentEntry each), `metadata`, `start` and `stop` (positions) are what it holds.
    `saves`: the position behind the last token of each save. `end`: the byte behind the last of these records.
    `torn`: why what lies behind `end` was left out, in a file that was salvaged; else None. `file`: what was opened, if
    it is a file.
    """

    def __init__(
        self, file: BinaryIO | Any, name: str = "", *, profile: AnyProfile | None = None, salvage: bool = False
    ) -> None:
        """Read everything but the payloads.

        file: a seekable binary file, or a buffer (bytes, memoryview, mmap ...), which is decoded from without copying
        and must stay as it is: whoever maps a file that another process cuts short risks SIGBUS, and a mapping can be
        closed when the reader is gone. name: how errors call it. profile: for a file whose profile is kept outside;
        without it, only decoding fails. salvage: where the last save was broken off, take the saves before it; where
        there is none, all whole segments.

        Raises:
            SegmentError: what is wrong, and where, and what is whole nevertheless.
        """
        self._source = random_source(file, name)
        self.file = file if isinstance(self._source, FileSource) else None
        self.name = self._source.name
        front = read_front(self._source)
        self.header, self.version = front.header, front.version
        self._decoder = CheckedDecoder(self.header, self.name, profile)
        self.metadata = b""
        self.saves: list[int] = []
        self.end, self.link = self._source.position, front.link
        self.segments, self.torn = self._read_records(front)
        self.start = self.header.start
        self.stop = self.segments[-1].stop if self.segments else self.start
        if self.torn is not None and not salvage:
            raise SegmentError(self.torn + self._what_is_whole())

    def _read_records(self, front: Front) -> tuple[list[SegmentEntry], str | None]:
        """(the segments that are whole, what is wrong behind them)."""
        segments: list[SegmentEntry] = []
        saved = 0
        try:
            for record in read_records(self._source, front):
                if isinstance(record, Trailer):
                    saved, self.metadata = len(segments), record.metadata
                    self.end, self.link = record.offset, record.link
                    self.saves.append(record.stop)
                else:
                    self._pass_over(len(segments), record)
                    segments.append(record)
        except SegmentError as error:
            if self.saves or not segments:
                return segments[:saved], str(error)
            self.end, self.link = segments[-1].offset + segments[-1].payload_bytes, segments[-1].link
            return segments, str(error)
        return segments, None

    def _pass_over(self, number: int, entry: SegmentEntry) -> None:
        self._decoder.check_hashes(number, entry)
        if not self._source.skip(entry.payload_bytes):
            self._decoder.check_payload(number, entry, None)  # says that it is truncated

    def _what_is_whole(self) -> str:
        if not self.segments:
            return ""
        tokens = f"tokens {self.start}-{self.stop - 1}, up to byte {self.end}"
        where = "it lies behind the trailer of a whole save" if self.saves else "the segments before it are whole"
        return f"; {where} ({tokens}): `kv load --recompute`, in Python SessionReader with salvage=True, goes on there"

    @property
    def ids(self) -> NDArray[np.uint32] | None:
        """Token ids from `start` to `stop`, or None where the file keeps none."""
        if self.header.tokens != "ids":
            return None
        return np.concatenate([np.empty(0, np.uint32), *(s.ids for s in self.segments)])

    def use(self, profile: AnyProfile) -> None:
        """Decode with `profile`, of a file that keeps its own outside, once its header has said which."""
        self._decoder.use(profile)

    @property
    def coder(self) -> SegmentCoder:
        """What codes its segments. Raises SegmentError where the profile is kept outside and was not given."""
        return self._decoder.coder

    @property
    def raw_bytes(self) -> int:
        """Size of the KV when it is not coded."""
        return self.header.raw_bits * (self.stop - self.start) // 8

    @property
    def coded_bytes(self) -> int:
        """Size of the coded streams, without header, index, token ids and metadata."""
        return sum(s.payload_bytes for s in self.segments)

    def require(self, *, model: Mapping[str, str] | None = None, **fields: object) -> None:
        """Check that the file belongs to this model and arithmetic.

        `model` is compared part by part with the header's; `fields` are other fields of the header (numerics, dtype,
        layers, kv_heads, head_dim, rope ...).

        Raises:
            SegmentError: names everything that differs, with both values.
        """
        stored = self.header.model
        pairs = {} if model is None else {k: (stored.get(k), model.get(k)) for k in sorted({*stored, *model})}
        differing = [f"{k}: {_shown(a)} in the file, {_shown(b)} here" for k, (a, b) in pairs.items() if a != b]
        if differing:
            raise SegmentError(f"{self.name} was saved with another model: {'; '.join(differing)}; it needs that one")
        for field, here in fields.items():
            there = getattr(self.header, field)
            if there != here:
                raise SegmentError(f"{self.name} does not fit: {field} is {there!r} in the file, {here!r} here")

    def read(self, segment: int, out: KV | None = None) -> KV:
        """Values of one segment: uint16 [layers, 2, tokens, kv_heads, head_dim], into `out` if given.

        Nothing is written to `out` before every value of the segment has been checked.

        Raises:
            SegmentError: names the segment, and the stream where the fault lies in one; or the profile is missing.
            InputError: `out` has another shape or type.
        """
        segment = range(len(self.segments))[segment]
        if out is not None:
            kv_array.require_fit(out, self.header.geometry, self.segments[segment].count)
        values = self._decode(segment)
        if out is None:
            return values
        kv_array.put(out, 0, values)
        return out

    def _decode(self, segment: int, out: NDArray[np.uint16] | None = None, past: Past | None = None) -> KV:
        """One segment, and before it those that it builds upon and `past`, by default the reader's own, lacks."""
        past = self._decoder.past if past is None else past
        if self.coder.sequential and past is not None:
            self._catch_up(segment, past)
        return self._decode_next(segment, out, past)

    def _catch_up(self, segment: int, past: Past) -> None:
        """Have `past` know just what lies before the segment."""
        first = bisect_right(self.segments, past.known, hi=segment + 1, key=lambda entry: entry.start) - 1
        past.known = self.segments[first].start
        for before in range(first, segment):
            try:
                self._decode_next(before, None, past)
            except SegmentError as error:
                raise SegmentError(f"{error}; segment {segment} builds upon it") from error

    def _decode_next(self, segment: int, out: NDArray[np.uint16] | None, past: Past | None) -> KV:
        entry = self.segments[segment]
        payload = self._source.payload_at(entry.offset, entry.payload_bytes)
        return self._decoder.decode(segment, entry, payload, out, past)

    def decoded(
        self, start: int | None = None, stop: int | None = None, *, past: Past | None = None
    ) -> Iterator[tuple[SegmentEntry, KV]]:
        """The segments that hold positions from `start` up to `stop` (all by default), each with its values, in order.

        Several are decoded side by side, but never more than there are threads, or than 256 MiB of values. Raises as
        `read` does, when the turn of the segment has come.

        past: where the coder is sequential, it knows each segment when that is given, and after a fault all segments
        before the bad one. What it knows at first must be this file's tokens. By default the reader keeps one.
        """
        first, last = self._range(start, stop)
        wanted = self._wanted(first, last)
        values = self._in_order(wanted, lambda segment: self._decode(segment, None, past))
        return zip((self.segments[i] for i in wanted), values, strict=True)

    def _in_order(self, segments: Sequence[int], work: Callable[[int], T]) -> Iterator[T]:
        at_once = segments_at_once(self.header, bool(segments) and self.coder.sequential)
        return in_order(len(segments), at_once, lambda i: work(segments[i]))

    def read_all(self, start: int | None = None, stop: int | None = None) -> KV:
        """Values from position `start` up to `stop` (all by default), in the shape of `read`.

        Reads only the segments it needs. Positions that the file does not hold are left out. Raises as `read` does.
        """
        first, last = self._range(start, stop)
        out = kv_array.empty(self.header.geometry, last - first)
        wanted = self._wanted(first, last)

        def fill(number: int) -> None:
            segment = self.segments[number]
            begin, end = max(first, segment.start), min(last, segment.stop)
            target = kv_array.part(out, begin - first, end - first)
            place = kv_array.as_scalars(target) if end - begin == segment.count else None
            values = self._decode(number, place)
            if place is None:
                kv_array.put(target, 0, kv_array.part(values, begin - segment.start, end - segment.start))

        for _ in self._in_order(wanted, fill):
            pass
        return out

    def _wanted(self, first: int, last: int) -> list[int]:
        """Numbers of the segments that hold positions from `first` up to `last`."""
        return [i for i, segment in enumerate(self.segments) if max(first, segment.start) < min(last, segment.stop)]

    def _range(self, start: int | None, stop: int | None) -> tuple[int, int]:
        first = self.start if start is None else min(max(start, self.start), self.stop)
        return first, self.stop if stop is None else max(first, min(stop, self.stop))

    def faults(self, on_progress: Progress | None = None) -> list[SegmentFault]:
        """Decode and check every segment: those that cannot be had. on_progress(segments done, segments).

        Where the coder is sequential, the segments behind the first bad one are lost with it. Raises SegmentError where
        there is nothing to decode with.
        """
        count, found = len(self.segments), list[SegmentFault]()
        for segment, why in enumerate(self._in_order(range(count), self._fault_of)):
            if why is not None:
                found.append(SegmentFault(segment, why))
            if on_progress is not None:
                on_progress(segment + 1, count)
            if found and self.coder.sequential:
                lost = f"{self.name}: it builds upon segment {segment}, which is bad"
                return found + [SegmentFault(later, lost) for later in range(segment + 1, count)]
        return found

    def _fault_of(self, segment: int) -> str | None:
        try:
            self._decode(segment)
        except SegmentError as error:
            return str(error)
        return None

    def verify(self, *, values: bool = True) -> None:
        """Decode and check every segment; without `values`, check only its bytes, which needs no profile.

        Raises SegmentError at the first fault.
        """
        if values:
            for _ in self.decoded():
                pass
            return
        for i, entry in enumerate(self.segments):
            self._decoder.check_payload(i, entry, self._source.payload_at(entry.offset, entry.payload_bytes))


def _shown(value: str | None) -> str:
    return "nothing" if value is None else repr(value)
