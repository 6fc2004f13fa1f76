"""Codes of kivi4 against plain NumPy, for every kind of run, and where attention reads them."""

import numpy as np
import pytest
from attention_cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from prolepsis.coding.cache_dtypes import quantise
from prolepsis.kernels.attention_parts import PART
from prolepsis.kernels.kivi import RUN, code_block, read_keys, read_values
from prolepsis.kernels.kv_pool import KVPool, written_view
from prolepsis.kernels.rows import DTYPES
from prolepsis.kv.stored import KIVI_BLOCK, KIVI_RUN

HEADS, DIM = 2, 64


def as_read(x):
    """bf16 bits of runs, [..., RUN], as attention should read them once they are codes."""
    x = np.where(np.isfinite(x), x, np.float32(0))
    with np.errstate(over="ignore"):
        low, step = x.min(-1).astype(np.float16), ((x.max(-1) - x.min(-1)) / np.float32(15)).astype(np.float16)
    low, step = (np.where(np.isfinite(y), y, 0).astype(np.float32)[..., None] for y in (low, step))
    codes = np.clip(np.rint((x - low) / np.where(step == 0, np.float32(np.inf), step)), 0, 15)
    return quantise((codes.astype(np.float64) * step + low).astype(np.float32), "bf16")


def pool_of(k, v):
    """A pool whose blocks are all exact: bf16 bits [blocks, HEADS, DIM, PART] and [blocks, HEADS, PART, DIM]."""
    blocks = len(k)
    codes, params = np.full((2, k.size // 4), 0xFFFF, np.uint16), np.full((2, k.size // 16), 0xFFFF, np.uint16)
    recent = np.roll(np.arange(blocks, dtype=np.int32), 1)
    k, v = (x[np.argsort(recent)].reshape(-1) for x in (k, v))
    return KVPool(
        *codes, *params, blocks, HEADS, DIM, PART, DTYPES["kivi4"], k, v, recent, blocks,
    )  # fmt: skip


def bits_of(x):
    return quantise(x.astype(np.float32), "bf16")


def floats(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def read_back(pool, block):
    keys, values = np.zeros((HEADS, PART // RUN, DIM, RUN), np.uint16), np.zeros((HEADS, PART, DIM), np.uint16)
    for head in range(HEADS):
        for run in range(PART // RUN):
            read_keys(pool, block * HEADS + head, run * RUN, keys[head, run].reshape(-1))
        read_values(pool, block * HEADS + head, PART, values[head].reshape(-1))
    return keys.swapaxes(1, 2).reshape(HEADS, DIM, PART), values


def assert_coded_as_numpy(k, v):
    pool = pool_of(np.stack([k] * 3), np.stack([v] * 3))
    code_block(pool, written_view(pool), (1, int(pool.recent[1])))
    keys, values = read_back(pool, 1)
    for ours, exact in ((keys, k), (values, v)):
        expected = as_read(floats(exact).reshape(-1, RUN)).reshape(exact.shape)
        assert np.array_equal(floats(ours), floats(expected))  # -0 is 0


def test_the_names_say_what_the_kernels_do():
    assert (KIVI_BLOCK, KIVI_RUN) == (PART, RUN)


def test_blocks_of_every_magnitude_are_coded_as_numpy_does():
    rng = np.random.default_rng(0)
    k = rng.standard_normal((HEADS, DIM, PART)) * 10.0 ** rng.integers(-8, 6, (HEADS, DIM, 1)) + rng.integers(-9, 9)
    v = rng.standard_normal((HEADS, PART, DIM))
    k[0, :3], v[0, :3] = 0, 7.25
    k[1, 5:9][rng.random((4, PART)) < 0.3] = np.nan
    v[1, 5:9][rng.random((4, DIM)) < 0.3] = -np.inf
    assert_coded_as_numpy(bits_of(k), bits_of(v))


@settings(deadline=None, max_examples=30)
@given(hnp.arrays(np.uint16, (RUN,), elements=st.integers(0, 65535)))
def test_any_run_is_coded_as_numpy_does(run):
    assert_coded_as_numpy(np.resize(run, (HEADS, DIM, PART)), np.resize(run, (HEADS, PART, DIM)))


class Coded(Case):
    """With every block in both forms."""

    def pool(self, block_size, rng, filler=0xFFFF):
        exact, tables = super().pool(PART, rng, filler)
        shape = (exact.num_blocks, HEADS, DIM, PART)
        k, v = exact.k.reshape(shape), exact.v.reshape(shape).reshape(shape[0], HEADS, PART, DIM)
        pool = pool_of(k, v)
        for block in range(exact.num_blocks):
            code_block(pool, written_view(pool), (block, int(pool.recent[block])))
        return pool, tables


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_part_is_read_exactly_by_its_own_rows_and_as_codes_by_later_ones(fast, threads):
    """As attention over bf16 in which the parts before a row's own hold what their codes stand for."""
    case = Coded.random(np.random.default_rng(1), [300], [60], kv_heads=HEADS, dim=DIM, fast=fast)
    k, v = case.keys[0].copy(), case.values[0].copy()
    expected = []
    for start in (0, PART):
        part = slice(start, start + PART)
        k[part] = (
            as_read(floats(k[part].transpose(1, 2, 0)).reshape(-1, RUN)).reshape(HEADS, DIM, PART).transpose(2, 0, 1)
        )
        v[part] = as_read(floats(v[part]).reshape(-1, RUN)).reshape(PART, HEADS, DIM)
        expected.append(Case("bf16", case.group, [k.copy()], [v.copy()], case.queries, fast=fast).run())
    in_second = 2 * PART - (300 - 60)
    expected = np.concatenate([expected[0][:in_second], expected[1][in_second:]])
    assert np.array_equal(case.run(threads=threads, rows_a_tile=8), expected)
