import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prolepsis.errors import InputError, IntegrityError
from prolepsis.kv.cache import PagedKVCache

LAYERS, HEADS, DIM = 2, 3, 5


def make_cache(block_size: int = 4, num_blocks: int = 16) -> PagedKVCache:
    return PagedKVCache(LAYERS, HEADS, DIM, block_size, num_blocks)


def random_values(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 65536, (LAYERS, 2, tokens, HEADS, DIM), dtype=np.uint16)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_reads_return_what_was_written_at_any_offset(data):
    block_size = data.draw(st.integers(1, 7))
    length = data.draw(st.integers(1, 40))
    cache = make_cache(block_size, num_blocks=64)
    hole = cache.new_table()
    hole.append(data.draw(st.integers(0, 9)))
    table = cache.new_table()
    table.append(length)
    hole.release()
    expected = random_values(length)
    cache.write(table, 0, expected)
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    patch = random_values(stop - start, seed=1)
    cache.write(table, start, patch)
    expected[:, :, start:stop] = patch
    assert np.array_equal(cache.read(table, 0, length), expected)
    first = data.draw(st.integers(0, length))
    last = data.draw(st.integers(first, length))
    piece = cache.read(table, first, last)
    assert np.array_equal(piece, expected[:, :, first:last])
    assert piece.flags.c_contiguous
    assert piece.dtype == np.uint16


def test_the_layout_is_what_the_kernels_expect():
    cache = make_cache()
    table = cache.new_table()
    slots = table.append(6)
    values = random_values(6)
    cache.write(table, 0, values)
    assert cache.k[1].shape == (16, HEADS, DIM, 4)
    assert cache.v[1].shape == (16, HEADS, 4, DIM)
    for position, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, 4)
        for layer in range(LAYERS):
            assert np.array_equal(cache.k[layer][block, :, :, offset], values[layer, 0, position])
            assert np.array_equal(cache.v[layer][block, :, offset], values[layer, 1, position])


def test_writes_need_held_tokens_of_the_right_shape_and_dtype():
    cache = make_cache()
    table = cache.new_table()
    table.append(5)
    with pytest.raises(IndexError, match="holds 5"):
        cache.write(table, 3, random_values(3))
    with pytest.raises(IndexError, match="holds 5"):
        cache.read(table, 0, 6)
    for wrong in (
        random_values(2)[:1],
        random_values(2)[..., :3],
        random_values(2).astype(np.float32),
        random_values(2)[0],
    ):
        with pytest.raises(ValueError, match="expected uint16"):
            cache.write(table, 0, wrong)
    assert not cache.k.any()


def test_a_write_never_changes_another_sequence():
    cache = make_cache()
    table = cache.new_table()
    table.append(6)
    values = random_values(6)
    cache.write(table, 0, values)
    twin = table.fork()
    with pytest.raises(IntegrityError, match="would change 2 sequences"):
        cache.write(twin, 5, random_values(1, seed=1))
    cache.copy_blocks(twin.prepare_write(1))
    twin.append(1)
    cache.write(twin, 6, random_values(1, seed=1))
    table.append(1)
    cache.write(table, 6, random_values(1, seed=2))
    assert np.array_equal(cache.read(table, 0, 6), values)
    assert np.array_equal(cache.read(twin, 0, 6), values)
    assert np.array_equal(cache.read(twin, 6, 7), random_values(1, seed=1))
    assert np.array_equal(cache.read(table, 6, 7), random_values(1, seed=2))


def test_sizes_follow_the_formula():
    cache = PagedKVCache(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, num_blocks=2)
    assert cache.bytes_per_token == 2 * 30 * 3 * 64 * 2
    num_bytes = cache.k.nbytes + cache.v.nbytes
    assert num_bytes == 32 * cache.bytes_per_token
    assert PagedKVCache.num_blocks_for(num_bytes, 30, 3, 64, 16) == 2
    assert PagedKVCache.num_blocks_for(num_bytes - 1, 30, 3, 64, 16) == 1
    with pytest.raises(InputError, match="one block of 16 tokens takes 368640 bytes"):
        PagedKVCache.num_blocks_for(1000, 30, 3, 64, 16)


def test_impossible_caches_are_refused():
    with pytest.raises(InputError, match="choose one of bf16, fp16"):
        PagedKVCache(1, 1, 1, 1, 1, dtype="fp8")
    with pytest.raises(InputError, match="at least 1"):
        PagedKVCache(1, 1, 1, 0, 1)
    with pytest.raises(InputError, match="smaller budget"):
        PagedKVCache(1 << 10, 1 << 10, 1 << 10, 1 << 10, 1 << 10)


def test_check_finds_a_leak():
    cache = make_cache()
    tables = [cache.new_table(), cache.new_table()]
    for table in tables:
        table.append(5)
    cache.check(tables)
    with pytest.raises(IntegrityError, match=r"held by 0 table\(s\) but counts 1"):
        cache.check(tables[:1])
