"""Sequences that leave the cache and come back: the same bits or an error, within the budgets, whatever happens."""

import errno
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prolepsis.engine.swap as swap_module
from prolepsis.coding import QuantisedKV, RopeSpec
from prolepsis.coding.cache_dtypes import TOKEN_DTYPES, arrays_of, quantise
from prolepsis.engine.swap import Swapped, SwapSpace
from prolepsis.errors import CapacityError, IntegrityError, SegmentError
from prolepsis.kv.block_table import BlockTable
from prolepsis.kv.cache import PagedKVCache
from prolepsis.kv.prefix_index import PrefixIndex
from prolepsis.kv.stored import KIVI_BLOCK

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 2, 2, 32, 16, 120
ROPE = RopeSpec(theta=10_000.0, dim=DIM, style="half")
AMPLE = 1 << 24
IDS = random.Random(0).choices(range(1 << 17), k=2000)


def new_cache(dtype: str = "bf16") -> PagedKVCache:
    return PagedKVCache(LAYERS, HEADS, DIM, BLOCK, BLOCKS, dtype)


def fill(cache: PagedKVCache, table: BlockTable, tokens: int, seed: int = 0) -> None:
    """Append tokens, every channel with a mean and a width of its own."""
    draw = np.random.default_rng(seed)
    shape = (LAYERS, 2, tokens, HEADS, DIM)
    means, widths = draw.normal(size=(2, LAYERS, 2, 1, HEADS, DIM)) * 3
    values = quantise((means + widths * draw.normal(size=shape)).astype(np.float32), cache.dtype)
    if isinstance(values, QuantisedKV):
        values = QuantisedKV(values.values, values.steps.view(np.uint16))
    first = table.length
    cache.copy_blocks(table.prepare_write(tokens))
    table.append(tokens)
    cache.write(table, first, values)


def contents(cache: PagedKVCache, table: BlockTable) -> list[bytes]:
    return [array.tobytes() for array in arrays_of(cache.read(table, 0, table.length))]


@pytest.fixture
def cache() -> Iterator[PagedKVCache]:
    """Empty, and empty again afterwards."""
    cache = new_cache()
    yield cache
    cache.check([])
    assert cache.pool.num_used == 0


def put(space: SwapSpace, table: BlockTable) -> Swapped:
    swapped = space.put(IDS, table)
    assert swapped is not None
    return swapped


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
@pytest.mark.parametrize("tokens", [1, 23, 256, 700])
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_what_comes_back_is_what_left(dtype: str, tokens: int, tier: str) -> None:
    cache = new_cache(dtype)
    table = cache.new_table()
    fill(cache, table, tokens)
    before = contents(cache, table)
    with closing(SwapSpace(cache, ROPE, *((AMPLE, 0) if tier == "memory" else (0, AMPLE)))) as space:
        swapped = put(space, table)
        assert contents(cache, table) == before
        assert swapped.raw_bytes == sum(map(len, before))
        table.release()
        cache.k.fill(0)
        cache.v.fill(0)
        space.restore(swapped, table)
        assert table.length == swapped.tokens == tokens
        assert contents(cache, table) == before
        assert swapped.on_disk == (tier == "disk")
    table.release()
    cache.check([])


@pytest.mark.parametrize(("tokens", "kept"), [(127, 0), (128, 128), (700, 640)])
def test_whole_blocks_of_kivi4_come_back(tokens: int, kept: int) -> None:
    """With room for the exact form of two blocks; what is left over is computed again."""
    cache = PagedKVCache(LAYERS, HEADS, DIM, KIVI_BLOCK, 8, "kivi4", recent=6)
    table, random = cache.new_table(), np.random.default_rng(0)
    table.prepare_write(tokens)
    table.append(tokens)
    for array in (cache.k, cache.v, cache.k_steps, cache.v_steps):
        array[...] = random.integers(0, np.iinfo(array.dtype).max, array.shape, endpoint=True)
    before = [array.tobytes() for array in arrays_of(cache.read(table, 0, kept))]
    with closing(SwapSpace(cache, ROPE, AMPLE, 0)) as space:
        swapped = space.put(IDS, table)
        table.release()
        if kept == 0:
            assert swapped is None
            return
        assert swapped is not None
        assert (swapped.tokens, swapped.raw_bytes) == (kept, sum(map(len, before)))
        cache.k.fill(0)
        cache.v_steps.fill(0)
        busy = [cache.pool.allocate() for _ in range(3)]  # of six places, three are left
        cache.pool.settle(busy[0])
        space.restore(swapped, table)
        assert table.length == kept
        assert contents(cache, table) == before
        for block in busy:
            cache.pool.release(block)
    cache.check([table])
    table.release()


@pytest.mark.parametrize("held", [0, 1, 255, 256, 300, 512, 599, 600])
def test_only_what_is_missing_is_decoded_and_written(
    cache: PagedKVCache, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = cache.new_table()
    fill(cache, table, 600)
    before = contents(cache, table)
    with closing(SwapSpace(cache, ROPE, AMPLE, 0)) as space:
        swapped = put(space, table)
        other = table.fork()  # holds what the table must not write to
        table.truncate(held)
        written, decoded = [], []
        write, decode = cache.write, swap_module.SessionReader.decoded
        monkeypatch.setattr(cache, "write", lambda t, first, kv: (written.append(first), write(t, first, kv)))

        def noted(*given: Any) -> Iterator[Any]:
            for segment, values in decode(*given):
                decoded.append(segment.start)
                yield segment, values

        monkeypatch.setattr(swap_module.SessionReader, "decoded", noted)
        space.restore(swapped, table)
        assert decoded == [first for first in (0, 256, 512) if held < min(first + 256, 600)]
        assert written == [max(first, held) for first in decoded]
        assert contents(cache, table) == contents(cache, other) == before
        cache.check([table, other])
    other.release()
    table.release()


def test_blocks_that_the_prefix_index_knows_are_not_written_to(cache: PagedKVCache) -> None:
    table, index = cache.new_table(), PrefixIndex(cache.pool, BLOCK)
    fill(cache, table, 600)
    before = contents(cache, table)
    with closing(SwapSpace(cache, ROPE, AMPLE, 0)) as space:
        swapped = put(space, table)
        table.truncate(300)
        index.register(table, IDS[:300], tail=True)
        table.release()
        other = cache.new_table()
        assert index.match(table, IDS[:600]) == index.match(other, IDS[:600]) == 300
        known = contents(cache, other)
        space.restore(swapped, table)
        assert (contents(cache, table), contents(cache, other)) == (before, known)
    for held in (table, other):
        held.release()


def test_memory_is_filled_first_then_the_disk_and_neither_is_exceeded(cache: PagedKVCache) -> None:
    tables = [cache.new_table() for _ in range(4)]
    for seed, table in enumerate(tables):
        fill(cache, table, 300, seed)
    with closing(SwapSpace(cache, ROPE, AMPLE, 0)) as measuring:
        sizes = [put(measuring, table).coded_bytes for table in tables]
    memory, disk = sizes[0], sizes[1] + sizes[3]  # to the last byte
    with closing(SwapSpace(cache, ROPE, memory, disk)) as space:
        now = space.statistics
        first, second = put(space, tables[0]), put(space, tables[1])
        assert (first.on_disk, second.on_disk) == (False, True)
        assert (now.memory_bytes, now.disk_bytes) == (sizes[0], sizes[1])
        third = put(space, tables[3])
        assert (third.on_disk, now.disk_bytes) == (True, disk)
        assert space.put(IDS, tables[2]) is None
        assert (now.no_room, now.puts, now.disk_failures) == (1, 3, 0)
        assert (now.memory_bytes, now.disk_bytes) == (sizes[0], disk)
        space.discard(first)
        assert put(space, tables[0]).on_disk is False
        assert (now.raw_bytes, now.coded_bytes) == (4 * first.raw_bytes, 2 * sizes[0] + sizes[1] + sizes[3])
    assert (now.memory_bytes, now.disk_bytes) == (0, 0)
    with closing(SwapSpace(cache, ROPE, sizes[0] - 1, sizes[0])) as space:  # moves to the disk with its last bytes
        before, swapped = contents(cache, tables[0]), put(space, tables[0])
        assert (swapped.on_disk, space.statistics.memory_bytes, space.statistics.disk_bytes) == (True, 0, sizes[0])
        tables[0].release()
        space.restore(swapped, tables[0])
        assert contents(cache, tables[0]) == before
    with closing(SwapSpace(cache, ROPE, sizes[0] - 1, sizes[0] - 1)) as space:
        assert space.put(IDS, tables[0]) is None
        assert (space.statistics.memory_bytes, space.statistics.disk_bytes) == (0, 0)
    for table in tables:
        table.release()


def test_an_empty_table_has_nothing_to_keep(cache: PagedKVCache) -> None:
    with closing(SwapSpace(cache, ROPE, AMPLE, AMPLE)) as space:
        assert space.put(IDS, cache.new_table()) is None
        assert space.statistics.no_room == 0


def test_what_was_discarded_is_not_there(cache: PagedKVCache) -> None:
    table = cache.new_table()
    fill(cache, table, 10)
    with closing(SwapSpace(cache, ROPE, AMPLE, 0)) as space:
        swapped = put(space, table)
        space.discard(swapped)
        with pytest.raises(IntegrityError, match="discarded"):
            space.discard(swapped)
        with pytest.raises(IntegrityError, match="discarded"):
            space.restore(swapped, table)
    table.release()


def test_without_room_in_the_cache_nothing_changes(cache: PagedKVCache) -> None:
    table, other = cache.new_table(), cache.new_table()
    fill(cache, table, 600)
    before = contents(cache, table)
    with closing(SwapSpace(cache, ROPE, AMPLE, 0)) as space:
        swapped = put(space, table)
        table.truncate(40)
        other.reserve((cache.pool.num_free - 30) * BLOCK)
        blocks = table.blocks.tolist()
        with pytest.raises(CapacityError):
            space.restore(swapped, table)
        assert (table.length, table.blocks.tolist()) == (40, blocks)
        assert space.statistics.damaged == 0
        other.release()
        space.restore(swapped, table)
        assert contents(cache, table) == before
    table.release()


class BadDisk:
    """A file that fails with `error` once `left` bytes were written, or whenever it is read."""

    def __init__(self, error: int, left: int | None = None) -> None:
        self.error, self.left, self.closed = error, left, False
        self.data = bytearray()

    def write(self, data: memoryview) -> int:
        taken = len(data) if self.left is None else min(len(data), self.left)
        if len(data) and not taken:
            raise OSError(self.error, "the disk failed")
        if self.left is not None:
            self.left -= taken
        self.data += data[:taken]
        return taken

    def seek(self, *_: int) -> int:
        return len(self.data)

    def read(self, *_: int) -> bytes:
        raise OSError(self.error, "the disk failed")

    def close(self) -> None:
        self.closed = True
        raise OSError(self.error, "the disk failed")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("left", [0, 5000, 40_000])
def test_a_disk_that_takes_no_more_is_a_refusal(
    cache: PagedKVCache, error: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, disk = cache.new_table(), BadDisk(error, left)
    fill(cache, table, 600)
    monkeypatch.setattr(swap_module, "TemporaryFile", lambda **_: disk)
    with closing(SwapSpace(cache, ROPE, 20_000, AMPLE)) as space:
        assert space.put(IDS, table) is None
        now = space.statistics
        assert (now.disk_failures, now.no_room, now.puts) == (1, 0, 0)
        assert (now.memory_bytes, now.disk_bytes) == (0, 0)
    assert disk.closed
    table.release()


def test_a_directory_that_is_not_there_is_a_refusal(cache: PagedKVCache, tmp_path: Path) -> None:
    table = cache.new_table()
    fill(cache, table, 10)
    with closing(SwapSpace(cache, ROPE, 0, AMPLE, tmp_path / "missing")) as space:
        assert space.put(IDS, table) is None
        assert space.statistics.disk_failures == 1
    table.release()


def test_a_disk_that_cannot_be_read_loses_the_sequence_only(
    cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = cache.new_table()
    fill(cache, table, 600)
    monkeypatch.setattr(swap_module, "TemporaryFile", lambda **_: BadDisk(errno.EIO))
    with closing(SwapSpace(cache, ROPE, 0, AMPLE)) as space:
        swapped = put(space, table)
        table.truncate(300)
        before = contents(cache, table)
        with pytest.raises(SegmentError, match="the disk failed"):
            space.restore(swapped, table)
        assert contents(cache, table) == before
        assert (space.statistics.disk_failures, space.statistics.damaged) == (1, 0)
    table.release()


def test_damage_is_found_before_it_is_believed(cache: PagedKVCache, tmp_path: Path) -> None:
    """A bit that flips, anywhere: the table holds what it held."""
    table = cache.new_table()
    fill(cache, table, 600)
    with closing(SwapSpace(cache, ROPE, 0, AMPLE, tmp_path)) as space:
        swapped = put(space, table)
        table.truncate(70)
        before, file = contents(cache, table), swapped.source
        assert not isinstance(file, bytes)
        draw = random.Random(1)
        for bit in [*draw.sample(range(8 * swapped.coded_bytes), 40), 8 * swapped.coded_bytes - 1]:
            flip(file, bit)
            with pytest.raises(SegmentError):
                space.restore(swapped, table)
            assert contents(cache, table) == before
            flip(file, bit)
        assert space.statistics.damaged == 41
        file.truncate(swapped.coded_bytes - 1)
        with pytest.raises(SegmentError, match="truncated"):
            space.restore(swapped, table)
        assert (table.length, list(tmp_path.iterdir())) == (70, [])
    table.release()


def flip(file: Any, bit: int) -> None:
    file.seek(bit // 8)
    byte = file.read(1)[0] ^ 1 << bit % 8
    file.seek(bit // 8)
    file.write(bytes([byte]))
