"""Blocks of a kivi4 cache: exact until they are full and sure to stay, then codes alone."""

import numpy as np
import pytest

from prolepsis.errors import CapacityError, InputError, IntegrityError
from prolepsis.kv.block_table import BlockTable
from prolepsis.kv.cache import PagedKVCache
from prolepsis.kv.prefix_index import PrefixIndex
from prolepsis.kv.stored import KIVI_BLOCK, KiviKV, arrays_of

TOKENS = list(range(1000))


def new_cache(blocks: int = 6, recent: int = 3) -> PagedKVCache:
    return PagedKVCache(1, 1, 32, KIVI_BLOCK, blocks, "kivi4", recent=recent)


def grow(cache: PagedKVCache, table: BlockTable, tokens: int) -> None:
    cache.copy_blocks(table.prepare_write(tokens))
    table.append(tokens)
    cache.check([table])


def is_settled(table: BlockTable) -> list[bool]:
    return [table.pool.is_settled(block) for block in table.blocks.tolist()]


def test_a_full_block_is_settled_when_more_is_written_and_not_before() -> None:
    cache = new_cache()
    table = cache.new_table()
    grow(cache, table, 200)
    assert is_settled(table) == [False, False]  # tokens of a pass may be drafts
    table.truncate(100)
    grow(cache, table, 60)
    assert is_settled(table) == [False, False]
    grow(cache, table, 1)
    assert is_settled(table) == [True, False]
    assert cache.pool.num_writable == 2


def test_tokens_of_a_settled_block_are_taken_back_with_all_of_it() -> None:
    cache = new_cache()
    table = cache.new_table()
    grow(cache, table, 300)
    table.settle()
    table.truncate(290)
    assert table.length == 290
    table.truncate(255)
    assert table.length == 128
    cache.check([table])
    table.truncate(5)
    assert table.length == 0


def test_few_exact_blocks_bound_what_is_written_at_once_and_not_what_is_held() -> None:
    cache = new_cache(blocks=7, recent=2)
    table, other = cache.new_table(), cache.new_table()
    for _ in range(5):
        grow(cache, table, 128)
    with pytest.raises(CapacityError, match="exact room for 2 more"):
        other.prepare_write(129)
    table.settle()
    assert cache.pool.num_writable == 2 == cache.pool.num_free
    other.reserve(1)
    cache.check([table, other])


def test_a_fork_copies_both_forms_of_what_it_goes_on_to_write() -> None:
    cache = new_cache()
    table = cache.new_table()
    grow(cache, table, 130)
    exact = cache.pool.recent[table.blocks[1]]
    cache.recent_k[:, exact], cache.recent_v[:, exact] = 7, 8
    fork = table.fork()
    cache.copy_blocks(fork.prepare_write(1))
    fork.append(1)
    cache.check([table, fork])
    assert fork.blocks[0] == table.blocks[0]
    assert cache.pool.is_settled(int(fork.blocks[0]))
    own = cache.pool.recent[fork.blocks[1]]
    assert own != exact
    assert np.all(cache.recent_k[:, own] == 7)
    assert np.all(cache.recent_v[:, own] == 8)


def test_whole_blocks_are_shared_and_no_others() -> None:
    cache = new_cache()
    index, table, later = PrefixIndex(cache.pool, KIVI_BLOCK), cache.new_table(), cache.new_table()
    grow(cache, table, 200)
    index.register(table, TOKENS, tail=True)
    assert is_settled(table) == [True, False]
    assert len(index) == 1
    assert index.match(later, TOKENS[:127] + [-1] * 9) == 0
    assert index.match(later, TOKENS) == 128
    cache.check([table, later])
    table.release()
    later.release()
    cache.check([])
    index.check()


def test_what_is_no_kivi4_cache_is_refused() -> None:
    with pytest.raises(
        InputError, match="blocks of 128 tokens and runs of 32 channels, not blocks of 32 and heads of 48"
    ):
        PagedKVCache(1, 1, 48, 32, 1, "kivi4")
    cache = new_cache()
    assert cache.bytes_per_token == 2 * (16 + 4)


def filled(cache: PagedKVCache, tokens: int) -> BlockTable:
    """A table of blocks that hold anything."""
    random, table = np.random.default_rng(0), cache.new_table()
    grow(cache, table, tokens)
    for array in (cache.k, cache.v, cache.k_steps, cache.v_steps):
        array[...] = random.integers(0, np.iinfo(array.dtype).max, array.shape, endpoint=True)
    return table


def test_what_is_read_of_whole_blocks_is_written_back() -> None:
    """Where `kernels.kivi` says that a run lies; afterwards there is no exact form."""
    cache = PagedKVCache(2, 3, 64, KIVI_BLOCK, 6, "kivi4")
    table, other = filled(cache, 400), cache.new_table()
    kv = cache.read(table, 128, 384)
    assert isinstance(kv, KiviKV)
    assert (kv.codes.shape, kv.steps.shape, kv.minimums.shape) == ((2, 2, 8, 3, 64, 16), *[(2, 2, 8, 3, 64)] * 2)
    for row, channel in ((0, 5), (5, 63)):  # row 5 is the second of its block
        block, run = table.blocks[1 + row // 4], channel * 4 + row % 4
        assert np.array_equal(kv.codes[1, 0, row, 2, channel], cache.k[1, block, 2].reshape(-1, 16)[run])
        assert kv.minimums[1, 0, row, 2, channel] == cache.k_steps[1, block, 2, 2 * run + 1]
        block, run = table.blocks[1 + row // 4], (row % 4 * 32 + channel // 2) * 2 + channel % 2  # token, half
        assert np.array_equal(kv.codes[0, 1, row, 1, channel], cache.v[0, block, 1].reshape(-1, 16)[run])
        assert kv.steps[0, 1, row, 1, channel] == cache.v_steps[0, block, 1, 2 * run]
    cache.copy_blocks(other.prepare_write(256))
    other.append(256)
    cache.write(other, 0, kv)
    assert is_settled(other) == [True, True]
    assert all(map(np.array_equal, cache.read(other, 0, 256), kv))
    for array in (cache.k, cache.v, cache.k_steps, cache.v_steps):
        assert np.array_equal(array[:, other.blocks], array[:, table.blocks[1:3]])
    assert cache.readable(400) == 384
    assert all(array.shape[2] == 0 for array in arrays_of(cache.read(table, 128, 128)))


def test_less_than_a_block_is_neither_read_nor_written() -> None:
    cache = new_cache()
    table = filled(cache, 200)
    kv = cache.read(table, 0, 128)
    for first, stop in ((0, 200), (0, 127), (1, 128)):
        with pytest.raises(InputError, match="whole blocks of 128 tokens"):
            cache.read(table, first, stop)
    with pytest.raises(InputError, match="whole blocks of 128 tokens"):
        cache.write(table, 32, kv)
    with pytest.raises(ValueError, match="KV is uint16"):
        cache.write(table, 0, np.zeros((1, 2, 128, 1, 32), np.uint16))
    table.settle()
    shared = table.fork()
    with pytest.raises(IntegrityError, match="would change 2 sequences"):
        cache.write(table, 0, kv)
    shared.release()
