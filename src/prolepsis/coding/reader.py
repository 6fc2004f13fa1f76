"""Reading session files."""

from collections.abc import Mapping
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding import container
from prolepsis.coding.container import SegmentEntry
from prolepsis.coding.hashes import BlockHashes
from prolepsis.coding.predictors import Segment
from prolepsis.coding.predictors.static import StaticPredictor
from prolepsis.coding.profile import Profile, fingerprint
from prolepsis.coding.segment_coder import SegmentCoder
from prolepsis.errors import InputError, SegmentError
from prolepsis.kernels.rans import READ_AHEAD


class SessionReader:
    """A session file, opened: its header and index are read and checked, segments when asked for.

    `header`, `segments` (SegmentEntry each), `metadata`, `start` and `stop` (positions) are what it holds.
    """

    def __init__(self, file: BinaryIO, name: str = "") -> None:
        """Read everything but the payloads from a seekable binary file. `name` is how errors call it.

        Raises:
            SegmentError: what is wrong, and where.
        """
        self._file = file
        self.name = name or str(getattr(file, "name", "the session data"))
        self.header = container.read_header(file, self.name)
        self._profile = self._read_profile()
        self._coder = SegmentCoder(self.header.geometry, self._profile, self.header.rope)
        self.segments, self.metadata = container.read_records(file, self.name, self.header)
        self.start = self.header.start
        self.stop = self.start + sum(s.count for s in self.segments)
        self._check_hashes()

    def _read_profile(self) -> Profile:
        header = self.header
        if header.predictor != StaticPredictor.name:
            raise SegmentError(
                f"{self.name} was coded with the predictor {header.predictor!r}, which this Prolepsis does not have; "
                f"it has {StaticPredictor.name!r}"
            )
        if fingerprint(header.profile) != header.profile_fingerprint:
            raise SegmentError(f"{self.name}: the header is not valid: the profile has another fingerprint")
        try:
            return Profile.from_bytes(header.profile, header.geometry)
        except ValueError as error:
            raise SegmentError(f"{self.name}: the header is not valid: {error}") from error

    def _check_hashes(self) -> None:
        if self.header.tokens != "ids":
            return
        hashes = BlockHashes(self.header.block_size)
        for i, segment in enumerate(self.segments):
            if not np.array_equal(hashes.add(segment.ids), segment.hashes):
                raise SegmentError(f"{self.name}: segment {i}: its token ids do not give its block hashes")

    @property
    def ids(self) -> NDArray[np.uint32] | None:
        """Token ids from `start` to `stop`, or None where the file keeps none."""
        if self.header.tokens != "ids":
            return None
        return np.concatenate([np.empty(0, np.uint32), *(s.ids for s in self.segments)])

    @property
    def raw_bytes(self) -> int:
        """Size of the KV when it is not coded."""
        header = self.header
        return 2 * header.layers * 2 * header.kv_heads * header.head_dim * (self.stop - self.start)

    @property
    def coded_bytes(self) -> int:
        """Size of the coded streams, without header, index, token ids and metadata."""
        return sum(int(s.index["length"].astype(np.int64).sum()) for s in self.segments)

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
            raise SegmentError(f"{self.name} was saved with another model: {'; '.join(differing)}")
        for field, here in fields.items():
            there = getattr(self.header, field)
            if there != here:
                raise SegmentError(f"{self.name} does not fit: {field} is {there!r} in the file, {here!r} here")

    def read(self, segment: int, out: NDArray[np.uint16] | None = None) -> NDArray[np.uint16]:
        """Values of one segment: uint16 [layers, 2, tokens, kv_heads, head_dim], into `out` if given.

        Nothing is written to `out` before every value of the segment has been checked.

        Raises:
            SegmentError: names the segment, and the stream where the fault lies in one.
            InputError: `out` has another shape or type.
        """
        entry, header = self.segments[segment], self.header
        shape = (header.layers, 2, entry.count, header.kv_heads, header.head_dim)
        if out is not None and (out.shape != shape or out.dtype != np.uint16):
            raise InputError(f"out is {out.dtype} {out.shape}, segment {segment} needs uint16 {shape}")
        data, ends = self._payload(segment)
        ids = entry.ids if header.tokens == "ids" else None

        def check(stream: int, part: NDArray[np.uint16], sound: bool) -> None:
            self._check_values(segment, stream, part, sound)

        values = self._coder.decode(Segment(entry.start, entry.count, ids), data, ends, check)
        if out is None:
            return values
        out[...] = values
        return out

    def read_all(self, stop: int | None = None) -> NDArray[np.uint16]:
        """Values from `start` up to position `stop` (all by default), in the shape of `read`.

        Reads only the segments it needs. Raises as `read` does.
        """
        header, stop = self.header, self.stop if stop is None else min(stop, self.stop)
        count = max(0, stop - self.start)
        parts = [self.read(i) for i, segment in enumerate(self.segments) if segment.start < stop]
        nothing = np.empty((header.layers, 2, 0, header.kv_heads, header.head_dim), np.uint16)
        return np.concatenate([nothing, *parts], axis=2)[:, :, :count]

    def verify(self) -> None:
        """Decode and check every segment. Raises SegmentError at the first fault."""
        for i in range(len(self.segments)):
            self.read(i)

    def _payload(self, segment: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The checked bytes of a segment's streams, with room behind, and where each stream ends."""
        entry = self.segments[segment]
        ends = np.cumsum(entry.index["length"].astype(np.int64))
        data = np.zeros(int(ends[-1]) + READ_AHEAD, np.uint8)
        self._file.seek(entry.offset)
        payload = self._file.read(int(ends[-1]))
        if len(payload) < ends[-1]:
            raise SegmentError(f"{self.name} is truncated: it ends within segment {segment}")
        data[: len(payload)] = np.frombuffer(payload, np.uint8)
        begin = 0
        for i, end in enumerate(ends):
            if container.checksum(data[begin:end].data) != entry.index["payload"][i]:
                raise self._fault(segment, i, "its bytes are damaged: their checksum differs")
            begin = int(end)
        return data, ends

    def _check_values(self, segment: int, stream: int, values: NDArray[np.uint16], sound: bool) -> None:
        if not sound:
            raise self._fault(segment, stream, "its bytes are no valid stream")
        if container.checksum(values.data) != self.segments[segment].index["values"][stream]:
            raise self._fault(segment, stream, "the decoded values are not those that were saved: checksum differs")

    def _fault(self, segment: int, stream: int, what: str) -> SegmentError:
        entry: SegmentEntry = self.segments[segment]
        tokens = f"tokens {entry.start}-{entry.start + entry.count - 1}"
        return SegmentError(f"{self.name}: segment {segment} ({tokens}), {self.header.stream_name(stream)}: {what}")


def _shown(value: str | None) -> str:
    return "nothing" if value is None else repr(value)
