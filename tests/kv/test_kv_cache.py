import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prolepsis.errors import InputError, IntegrityError
from prolepsis.kv.cache import PagedKVCache
from prolepsis.kv.stored import FORMATS, KV, TOKEN_DTYPES, DType, QuantisedKV, arrays_of

LAYERS, HEADS, DIM = 2, 3, 6


def make_cache(block_size: int = 4, num_blocks: int = 16, dtype: DType = "bf16") -> PagedKVCache:
    return PagedKVCache(LAYERS, HEADS, DIM, block_size, num_blocks, dtype)


def random_values(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 65536, (LAYERS, 2, tokens, HEADS, DIM), dtype=np.uint16)


def random_kv(dtype: DType, tokens: int, seed: int = 0) -> KV:
    """Any bits, in the form that KV of this dtype has."""
    if FORMATS[dtype].bits == 16:
        return random_values(tokens, seed)
    bytes_ = random_values(tokens, seed).astype(np.uint8)
    if not FORMATS[dtype].limit:
        return bytes_
    steps = random_values(tokens, seed + 100)[..., 0].copy()
    return QuantisedKV(bytes_.view(np.int8) if dtype == "int8" else bytes_[..., : DIM // 2].copy(), steps)


def same(one: KV, other: KV) -> bool:
    ours, theirs = arrays_of(one), arrays_of(other)
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )


def tokens_of(kv: KV, start: int, stop: int) -> KV:
    parts = [array[:, :, start:stop] for array in arrays_of(kv)]
    return QuantisedKV(*parts) if isinstance(kv, QuantisedKV) else parts[0]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_reads_return_what_was_written_at_any_offset(data):
    block_size, dtype = data.draw(st.integers(1, 7)), data.draw(st.sampled_from(TOKEN_DTYPES))
    length = data.draw(st.integers(1, 40))
    cache = make_cache(block_size, num_blocks=64, dtype=dtype)
    hole = cache.new_table()
    hole.append(data.draw(st.integers(0, 9)))
    table = cache.new_table()
    table.append(length)
    hole.release()
    expected = random_kv(dtype, length)
    cache.write(table, 0, expected)
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    patch = random_kv(dtype, stop - start, seed=1)
    if data.draw(st.booleans()):
        cache.write(table, start, patch)
    else:
        for layer in range(LAYERS):
            one = [array[layer : layer + 1] for array in arrays_of(patch)]
            cache.write_layer(layer, table, start, QuantisedKV(*one) if isinstance(patch, QuantisedKV) else one[0])
    for whole, part in zip(arrays_of(expected), arrays_of(patch), strict=True):
        whole[:, :, start:stop] = part
    assert same(cache.read(table, 0, length), expected)
    first = data.draw(st.integers(0, length))
    last = data.draw(st.integers(first, length))
    piece = cache.read(table, first, last)
    assert same(piece, tokens_of(expected, first, last))
    assert all(array.flags.c_contiguous for array in arrays_of(piece))
    table.append(1)
    copy = table.fork()
    cache.copy_blocks(copy.prepare_write(1))
    assert same(cache.read(copy, 0, length), expected)


def test_the_layout_is_what_the_kernels_expect():
    cache = make_cache()
    table = cache.new_table()
    table.append(6)
    slots = table.slots(0, 6)
    values = random_values(6)
    cache.write(table, 0, values)
    assert cache.k[1].shape == (16, HEADS, DIM, 4)
    assert cache.v[1].shape == (16, HEADS, 4, DIM)
    for position, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, 4)
        for layer in range(LAYERS):
            assert np.array_equal(cache.k[layer][block, :, :, offset], values[layer, 0, position])
            assert np.array_equal(cache.v[layer][block, :, offset], values[layer, 1, position])


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "int8", "int4"])
def test_the_layout_of_bytes_and_steps(dtype: DType):
    cache = make_cache(dtype=dtype)
    table = cache.new_table()
    table.append(6)
    kv = random_kv(dtype, 6)
    cache.write(table, 0, kv)
    values, *steps = arrays_of(kv)
    block, offset = int(table.blocks[1]), 1
    assert cache.k.dtype == cache.v.dtype == values.dtype
    assert np.array_equal(cache.k[1][block, :, :, offset], values[1, 0, 5])
    assert np.array_equal(cache.v[1][block, :, offset], values[1, 1, 5])
    assert cache.k_steps.size == (cache.k.size // cache.k.shape[3] if steps else 0)
    for part in steps:
        assert np.array_equal(cache.k_steps[1][block, :, offset], part[1, 0, 5])
        assert np.array_equal(cache.v_steps[1][block, :, offset], part[1, 1, 5])


def test_a_layer_may_be_written_before_its_tokens_are_held():
    cache = make_cache()
    table = cache.new_table()
    table.reserve(6)
    values = random_values(6)
    for layer in range(LAYERS):
        cache.write_layer(layer, table, 0, values[layer : layer + 1])
    with pytest.raises(IndexError, match="room for 8"):
        cache.write_layer(0, table, 4, values[:1, :, :5])
    with pytest.raises(ValueError, match=r"expected uint16 \(1, 2"):
        cache.write_layer(0, table, 0, values)
    table.append(6)
    assert np.array_equal(cache.read(table, 0, 6), values)


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
    cache = make_cache(dtype="int8")
    table = cache.new_table()
    table.append(2)
    whole = random_kv("int8", 2)
    assert isinstance(whole, QuantisedKV)
    for other in (
        whole.values,
        whole._replace(steps=whole.steps[:, :, :1]),
        whole._replace(values=whole.values.view(np.uint8)),
        random_kv("int4", 2),
        random_kv("bf16", 2),
    ):
        with pytest.raises(ValueError, match=r"expected int8 .* with uint16"):
            cache.write(table, 0, other)
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
    cache.pool.register(int(table.blocks[0]))
    twin.release()
    with pytest.raises(IntegrityError, match="what the prefix index knows"):
        cache.write(table, 2, random_values(1, seed=1))
    twin = table.fork()
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


@pytest.mark.parametrize(("dtype", "head_bytes"), [("fp8_e4m3", 64), ("fp8_e5m2", 64), ("int8", 66), ("int4", 34)])
def test_sizes_count_bytes_and_steps(dtype: DType, head_bytes: int):
    cache = PagedKVCache(3, 2, 64, 16, 5, dtype)
    assert cache.bytes_per_token == 2 * 3 * 2 * head_bytes
    held = sum(array.nbytes for array in (cache.k, cache.v, cache.k_steps, cache.v_steps))
    assert held == 5 * 16 * cache.bytes_per_token
    assert PagedKVCache.num_blocks_for(held, 3, 2, 64, 16, dtype) == 5
    assert PagedKVCache.num_blocks_for(held - 1, 3, 2, 64, 16, dtype) == 4


def test_impossible_caches_are_refused():
    with pytest.raises(InputError, match="choose one of bf16, fp16, fp8_e4m3, fp8_e5m2, int8, int4"):
        PagedKVCache(1, 1, 1, 1, 1, dtype="int3")
    with pytest.raises(InputError, match="which 3 channels do not fill"):
        PagedKVCache(1, 1, 3, 1, 1, dtype="int4")
    assert PagedKVCache(1, 1, 2, 1, 1, dtype="fp8").dtype == "fp8_e4m3"
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
