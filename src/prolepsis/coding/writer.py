"""Writing session files."""

import errno
import os
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from prolepsis.coding import container, kv_array
from prolepsis.coding.any_profile import AnyProfile, geometry_of
from prolepsis.coding.cache_dtypes import KIVI_BLOCK, DType, as_stored
from prolepsis.coding.container import SegmentEntry
from prolepsis.coding.hashes import BlockHashes
from prolepsis.coding.header import VERSION, Header, TokenStorage, header_link, pack_header
from prolepsis.coding.predictors import Past, Segment
from prolepsis.coding.profile import GRID, Profile, grid_spans
from prolepsis.coding.reader import SessionReader
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.segment_coder import CodedStream, SegmentCoder
from prolepsis.coding.side_by_side import in_order, segments_at_once
from prolepsis.errors import InputError


class SessionWriter:
    """Writes a session file to a binary file, segment by segment.

    What was added is whole only after `finish`, which ends a *save*; more may be added and finished behind it. What
    the file holds is never changed, so `file` need not be seekable.

    Where the profile's coder is sequential, a file begins at position 0, and the KV is kept, unless the writer is given
    a `past` which holds it.

    `header`: what was written. `position`: behind the last token. `file_bytes`: size of the file so far.
    """

    def __init__(
        self,
        file: BinaryIO,
        profile: AnyProfile,
        *,
        dtype: DType,
        rope: RopeSpec | None = None,
        start: int = 0,
        model: Mapping[str, str] | None = None,
        numerics: str = "",
        block_size: int = 16,
        tokens: TokenStorage = "ids",
        past: Past | None = None,
    ) -> None:
        """Write the header.

        `tokens`: whether `add` gets token ids to store ("ids"), to store only their block hashes ("hashes"), or none.
        `past`: where the coder is sequential, that of the sequence, which may know what will be added already.

        Raises:
            InputError: block_size does not divide 256 or start is no multiple of it, RoPE is wider than a head, the
                profile is for another dtype or RoPE, or sequential and start is not 0, or something exceeds the bounds
                in docs/format.md.
        """
        geometry = geometry_of(profile, dtype)
        coder = SegmentCoder(geometry, profile, rope)
        if coder.sequential and start:
            raise InputError(
                f"{coder.predictor.name} builds upon all tokens from position 0 on, and these begin at position {start}"
            )
        written = Header(
            model=dict(model or {}),
            numerics=numerics,
            predictor=coder.predictor.name,
            profile_fingerprint=profile.fingerprint,
            **geometry._asdict(),
            heads_per_stream=coder.group,
            block_size=block_size,
            segment_tokens=GRID,
            start=start,
            tokens=tokens,
            rope=rope,
            profile=profile.to_bytes() if isinstance(profile, Profile) and profile.embedded else None,
        )
        front = pack_header(written)
        past = coder.new_past() if past is None else past
        self._begin(file, written, coder, past, BlockHashes(block_size), header_link(front))
        self._write(front)

    def _begin(
        self,
        file: BinaryIO,
        header: Header,
        coder: SegmentCoder,
        past: Past | None,
        hashes: BlockHashes,
        link: bytes,
    ) -> None:
        self.header = header
        self.position = header.start
        self.file_bytes = 0
        self._file, self._coder, self._past, self._hashes, self._link = file, coder, past, hashes, link
        self._segments = self._saves = 0
        self._whole = 0  # bytes of the file up to the end of its last save
        self._begun = True  # whether anything was written by this writer

    @classmethod
    def append_to(cls, reader: SessionReader, past: Past | None = None) -> "SessionWriter":
        """Go on behind what `reader` holds, which stays as it is until `finish`, and whatever happens before it.

        The reader's file must be open for reading and writing ("r+b"). The rest of a save that was broken off (read
        with salvage=True) is cut off with the first write. `past`: where the coder is sequential, that of the sequence,
        which knows all tokens that the file holds; without it they are decoded.

        Raises:
            InputError: no file; a file of version 1; one that keeps only block hashes and ends within a block.
            SegmentError: its profile is kept outside and was not given to the reader; or what must be decoded is bad.
        """
        kept = reader.header
        if reader.file is None:
            raise InputError(f"{reader.name} is in memory; only a file can be appended to")
        if reader.version != VERSION:
            raise InputError(f"{reader.name} has format version {reader.version}, which cannot be appended to")
        writer = cls.__new__(cls)
        hashes, past = _hashes_behind(reader), _past_behind(reader) if past is None else past
        writer._begin(reader.file, kept, reader.coder, past, hashes, reader.link)
        writer.position, writer.file_bytes = reader.stop, reader.end
        writer._segments, writer._saves = len(reader.segments), len(reader.saves)
        writer._whole, writer._begun = reader.end, False
        return writer

    def add(self, kv: Any, ids: Sequence[int] | NDArray | None = None) -> None:
        """Append tokens: KV as `encode` takes it, [layers, 2, tokens, kv_heads, head_dim], and their ids.

        Becomes one segment for each 256 positions it touches, so few large calls make a smaller file.

        Raises:
            InputError: a type, shape or number of ids that does not fit; or ids or positions that the predictor does
                not know; or of kivi4, tokens that are no whole blocks of 128.
        """
        kept = self.header
        if not isinstance(kv, np.ndarray) or kv.dtype.kind != "u":
            kv, _ = as_stored(kv, kept.dtype)
        kv_array.require_fit(kv, kept.geometry)
        count = kv_array.token_count(kv)
        if (ids is None) != (kept.tokens == "none") or (ids is not None and len(ids) != count):
            given = "no" if ids is None else str(len(ids))
            raise InputError(f"{given} token ids for {count} tokens in a file that stores {kept.tokens!r}")
        if kept.dtype == "kivi4" and count % KIVI_BLOCK:
            raise InputError(f"{count} tokens are no whole blocks of {KIVI_BLOCK}, which is what is kept of kivi4")
        numbers = _token_ids([] if ids is None else ids)
        first = self.position
        spans = list(grid_spans(first, count))

        def encode(i: int) -> list[CodedStream]:
            span = spans[i]
            begin, stop = span.start - first, span.start - first + span.count
            known = numbers[begin:stop] if kept.tokens == "ids" else None  # a reader will know no more
            part = kv_array.codable(kv_array.part(kv, begin, stop))
            return self._coder.encode(Segment(span.start, span.count, known), part, self._past)

        at_once = segments_at_once(kept, self._coder.sequential)
        for span, coded in zip(spans, in_order(len(spans), at_once, encode), strict=True):
            self._add_segment(span, coded, numbers[span.start - first : span.start - first + span.count])

    def _add_segment(self, span: Segment, coded: list[CodedStream], ids: NDArray[np.uint32]) -> None:
        index = np.zeros(len(coded), container.INDEX_ENTRY)
        for i, stream in enumerate(coded):
            index[i] = (len(stream.data), xxhash.xxh3_64_intdigest(stream.data.data), stream.checksum)
        stored = ids if self.header.tokens == "ids" else ids[:0]
        entry = SegmentEntry(span.start, span.count, stored, self._hashes.add(ids), index)
        self._write_record(container.pack_segment(entry, self._link))
        self._write(b"".join(stream.data.data for stream in coded))
        self.position += span.count
        self._segments += 1

    def finish(self, metadata: bytes = b"") -> None:
        """End a save, which makes the file whole. `metadata`: anything of the caller's, up to 16 MiB.

        It takes the place of the metadata of earlier saves. Behind an earlier save, all that was added is on the disk
        before the trailer that speaks for it is written, and the trailer before this returns.

        Raises:
            InputError: the metadata is larger.
        """
        if not isinstance(metadata, bytes):
            raise InputError(f"metadata are bytes, not {type(metadata).__name__}")
        if len(metadata) > container.MAX_METADATA:
            raise InputError(f"{len(metadata)} bytes of metadata, at most {container.MAX_METADATA} fit")
        if self._saves:
            _sync(self._file)
        self._write_record(container.pack_trailer(metadata, self.position, self._segments, self._link))
        if self._saves:
            _sync(self._file)
        self._saves += 1
        self._whole = self.file_bytes

    def abandon(self) -> None:
        """Cut off what was added to an earlier file and not finished. `file` must be unbuffered or sound."""
        if self._begun and self._whole:
            self._file.seek(self._whole)
            self._file.truncate()

    def _write_record(self, record: bytes) -> None:
        self._write(record)
        self._link = container.link_of(record)

    def _write(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            self._file.seek(self._whole)
            self._file.truncate()
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]  # an unbuffered file may take less than all
        self.file_bytes += len(data)


def _hashes_behind(reader: SessionReader) -> BlockHashes:
    """What the hashes of further tokens depend on."""
    size, ids = reader.header.block_size, reader.ids
    if ids is not None:
        hashes = BlockHashes(size)
        hashes.add(ids)
        return hashes
    if reader.header.tokens == "hashes" and (reader.stop - reader.start) % size:
        raise InputError(f"{reader.name} ends within a block and keeps no token ids, so it cannot be appended to")
    known = [hash_ for segment in reader.segments for hash_ in segment.hashes.tolist()]
    return BlockHashes(size, known[-1] if known else 0)


def _past_behind(reader: SessionReader) -> Past | None:
    """What further segments are coded with, where the coder is sequential."""
    past = reader.coder.new_past()
    if past is not None:
        for _ in reader.decoded(past=past):
            pass
    return past


def _sync(file: BinaryIO) -> None:
    """Have everything on the disk, where the file lies on one."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except OSError as error:  # io.UnsupportedOperation, for memory, has no number
        if error.errno not in (None, errno.EINVAL, errno.ENOTSUP):
            raise


def _token_ids(ids: Sequence[int] | NDArray) -> NDArray[np.uint32]:
    """Raises InputError for what is not a row of integers from 0 to 2**32 - 1."""
    try:
        numbers = np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise InputError(f"token ids cannot be stored: {error}") from error
    if numbers.size == 0:
        return np.empty(0, np.uint32)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() >= 1 << 32:
        raise InputError("token ids must be a row of integers from 0 to 2**32 - 1")
    return numbers.astype(np.uint32)
