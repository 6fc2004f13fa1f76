"""K and V of sequences that had to leave the cache: losslessly coded, in memory first and then on the disk."""

import os
import time
from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from tempfile import TemporaryFile
from typing import BinaryIO, cast

from prolepsis.coding import RopeSpec, SessionReader, SessionWriter, kv_array
from prolepsis.coding.cache_dtypes import KIVI_BLOCK, KV, Geometry
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import grid_spans, measure_parts
from prolepsis.errors import IntegrityError, SegmentError
from prolepsis.kv.block_table import BlockTable
from prolepsis.kv.cache import PagedKVCache

_SAMPLED_SEGMENTS = 8  # that the profile is measured on; they are in memory at the same time


@dataclass(frozen=True, eq=False)
class Swapped:
    """A sequence's first `tokens` tokens in a `SwapSpace`: all it had, or of kivi4, those in whole blocks."""

    tokens: int
    raw_bytes: int
    coded_bytes: int
    on_disk: bool
    source: bytes | BinaryIO = field(repr=False)
    """A whole session file."""


@dataclass
class SwapStatistics:
    """What a `SwapSpace` has done so far."""

    puts: int = 0
    restores: int = 0
    raw_bytes: int = 0
    """Of all that was put, before coding."""
    coded_bytes: int = 0
    """Of all that was put."""
    memory_bytes: int = 0
    """Coded bytes that are in memory now."""
    disk_bytes: int = 0
    """Coded bytes that are on the disk now."""
    put_seconds: float = 0.0
    restore_seconds: float = 0.0
    no_room: int = 0
    """Sequences that were not taken because neither tier had room."""
    disk_failures: int = 0
    """Sequences that were not taken, or are lost, because the disk failed."""
    damaged: int = 0
    """Sequences that are lost because their bytes were not those that were stored."""


class SwapSpace:
    """Keeps K and V of sequences that left `cache`, as session files with a profile of their own.

    A sequence goes to memory if its coded bytes fit in what is left of that budget, else to the disk if they fit
    there. Files on the disk have no name, so nothing of them is left however the process ends. `statistics` is kept up
    to date. Not for use by two threads at once.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        rope: RopeSpec,
        memory: int,
        disk: int,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        """
        rope: how the cache's K is turned. memory, disk: budgets in coded bytes; neither is ever exceeded.
        directory: where files go; by default where the system keeps temporary ones, which may be memory (tmpfs).
        """
        self.statistics = SwapStatistics()
        self._cache, self._rope, self._directory = cache, rope, directory
        self._memory, self._disk = memory, disk
        self._kept: set[Swapped] = set()

    def put(self, tokens: Many[int], table: BlockTable) -> Swapped | None:
        """Keep K and V of all tokens that `table` holds and that can be read; the table stays as it is.

        tokens: their ids, perhaps with more behind them. Returns None, with nothing kept, where there is no such token,
        no tier has room (`no_room`) or the disk fails (`disk_failures`).
        """
        if self._cache.readable(table.length) == 0:
            return None
        begin, now = time.perf_counter(), self.statistics
        try:
            swapped = self._store(tokens, table)
        except _NoRoomError:
            now.no_room += 1
            return None
        except OSError:
            now.disk_failures += 1
            return None
        finally:
            now.put_seconds += time.perf_counter() - begin
        self._kept.add(swapped)
        self._count(swapped, swapped.coded_bytes)
        now.puts += 1
        now.raw_bytes += swapped.raw_bytes
        now.coded_bytes += swapped.coded_bytes
        return swapped

    def restore(self, swapped: Swapped, table: BlockTable) -> None:
        """Write behind the tokens that `table` holds, which must be the first of `swapped`, the rest of them.

        Only segments with missing tokens are decoded, and nothing of a segment is written before all its values are
        known to be those that were stored. `swapped` is still kept afterwards.

        Raises:
            SegmentError: the bytes are damaged (`damaged`), or the disk does not give them back (`disk_failures`).
            CapacityError: the cache has no room.
            IntegrityError: `swapped` is not kept here.
            In all cases the table holds the tokens that it held.
        """
        self._require_kept(swapped)
        begin, now, held = time.perf_counter(), self.statistics, table.length
        try:
            self._decode(swapped, table)
        except BaseException as error:
            table.truncate(held)
            if isinstance(error, OSError):
                now.disk_failures += 1
                raise SegmentError(f"a swapped sequence cannot be read from the disk: {error.strerror}") from error
            now.damaged += isinstance(error, SegmentError)
            raise
        finally:
            now.restore_seconds += time.perf_counter() - begin
        now.restores += 1

    def discard(self, swapped: Swapped) -> None:
        """Keep `swapped` no longer. Raises IntegrityError if it is not kept here."""
        self._require_kept(swapped)
        self._kept.remove(swapped)
        self._count(swapped, -swapped.coded_bytes)
        if not isinstance(swapped.source, bytes):
            _close(swapped.source)

    def close(self) -> None:
        """Discard all that is kept."""
        for swapped in list(self._kept):
            self.discard(swapped)

    def _store(self, tokens: Many[int], table: BlockTable) -> Swapped:
        """Raises _NoRoomError, and OSError where the disk fails."""
        now, count = self.statistics, self._cache.readable(table.length)
        spool = _Spool(self._memory - now.memory_bytes, self._disk - now.disk_bytes, self._directory)
        try:
            raw_bytes = self._encode(cast(BinaryIO, spool), tokens[:count], table)
            return Swapped(count, raw_bytes, spool.size, spool.on_disk, spool.finish())
        except BaseException:
            spool.close()
            raise

    def _encode(self, file: BinaryIO, tokens: Many[int], table: BlockTable) -> int:
        """Write these tokens of the table to `file`, of which only `write` is used; returns their size in the cache."""
        cache = self._cache
        geometry = Geometry(cache.dtype, cache.num_layers, cache.num_kv_heads, cache.head_dim)
        spans = list(grid_spans(0, len(tokens)))
        sample = {span: self._read(table, span) for span in spans[:: -(-len(spans) // _SAMPLED_SEGMENTS)]}
        profile = measure_parts(lambda: list(sample.items()), geometry, self._rope, tokens=len(tokens))
        block_size = KIVI_BLOCK if cache.dtype == "kivi4" else 16
        writer = SessionWriter(file, profile, dtype=cache.dtype, rope=self._rope, block_size=block_size)
        for span in spans:
            kv = sample.pop(span) if span in sample else self._read(table, span)
            writer.add(kv, tokens[span.start : span.start + span.count])
        writer.finish()
        return writer.header.raw_bits * len(tokens) // 8

    def _read(self, table: BlockTable, span: Segment) -> KV:
        return self._cache.read(table, span.start, span.start + span.count)

    def _decode(self, swapped: Swapped, table: BlockTable) -> None:
        if table.length >= swapped.tokens:
            return
        if self._cache.dtype != "kivi4":  # whose blocks need a place more each until they are written
            self._cache.copy_blocks(table.prepare_write(swapped.tokens - table.length))
        reader = SessionReader(swapped.source, "a swapped sequence")
        for segment, values in reader.decoded(table.length):
            first = table.length
            self._cache.copy_blocks(table.prepare_write(segment.stop - first))
            table.append(segment.stop - first)
            self._cache.write(table, first, kv_array.part(values, first - segment.start, segment.count))

    def _count(self, swapped: Swapped, size: int) -> None:
        if swapped.on_disk:
            self.statistics.disk_bytes += size
        else:
            self.statistics.memory_bytes += size

    def _require_kept(self, swapped: Swapped) -> None:
        if swapped not in self._kept:
            raise IntegrityError(f"{swapped} is not in this swap space, or was discarded")


class _NoRoomError(Exception):
    """Neither tier has room for the bytes."""


class _Spool:
    """Takes bytes to memory, and moves to the disk with all of them once they exceed the room there."""

    def __init__(self, memory: int, disk: int, directory: str | os.PathLike[str] | None) -> None:
        """memory, disk: bytes that there is room for."""
        self.size = 0
        self._memory, self._disk, self._directory = memory, disk, directory
        self._bytes = BytesIO()
        self._file: BinaryIO | None = None

    @property
    def on_disk(self) -> bool:
        """Where the bytes are."""
        return self._file is not None

    def write(self, data: bytes | memoryview) -> int:
        """As a file's; may take less than all. Raises _NoRoomError, and OSError where the disk fails."""
        size = self.size + len(data)
        if size > max(self._memory, self._disk):
            raise _NoRoomError
        if size > self._memory and not self.on_disk:
            self._move()
        written = (self._file or self._bytes).write(data)
        self.size += written
        return written

    def finish(self) -> bytes | BinaryIO:
        """All bytes, or the file that has them."""
        return self._file or self._bytes.getvalue()

    def close(self) -> None:
        """Drop everything."""
        if self._file is not None:
            _close(self._file)

    def _move(self) -> None:
        self._file = TemporaryFile(buffering=0, dir=self._directory)  # noqa: SIM115 - the entry keeps it open
        left = self._bytes.getbuffer()
        while left:
            left = left[self._file.write(left) :]
        self._bytes = BytesIO()


def _close(file: BinaryIO) -> None:
    """The bytes are of no use any more, so neither is what the disk says."""
    with suppress(OSError):
        file.close()
