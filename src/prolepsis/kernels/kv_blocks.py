"""K and V of tokens into the blocks of a pool."""

import numpy as np
from numba import njit

from prolepsis.kernels.kv_widened import bytes_of, is_narrow
from prolepsis.kernels.narrow_kv import scatter_bytes, store_narrow_head
from prolepsis.kernels.rows import store_head


@njit(cache=True)
def _store_narrow(dtype, x, at, width, out, out_at, steps, step_at):
    """`store_narrow_head`, compiled once for K and V."""
    store_narrow_head(dtype, x, at, width, out, out_at, steps, step_at)


@njit(cache=True)
def put_head(pool, head, inside, key, value, value_at, column):
    """Store one token of one head: slot `inside` of block and head number `head`, counted through all layers.

    key float32 [head_dim]; value float32[:], from element value_at on; column uint16 [head_dim], working memory.
    """
    dim, size = pool.head_dim, pool.block_size
    at, step = head * dim * size, head * size + inside
    if is_narrow(pool.dtype):
        _store_narrow(pool.dtype, key, 0, dim, column, 0, pool.k_steps, step)
        scatter_bytes(column, bytes_of(pool.dtype, dim), pool.k, bytes_of(pool.dtype, at) + inside, size)
        place = bytes_of(pool.dtype, at + inside * dim)
        _store_narrow(pool.dtype, value, value_at, dim, pool.v, place, pool.v_steps, step)
        return
    store_head(pool.dtype, key, 0, dim, column, 0)
    for d in range(dim):
        pool.k[at + d * size + inside] = column[d]
    store_head(pool.dtype, value, value_at, dim, pool.v, at + inside * dim)


@njit(cache=True, nogil=True)
def put_rows(pool, table, layer, start, values):
    """Put the K and V of tokens at positions from `start` on into one layer of a `kv_pool.KVPool` of 16 bits.

    table: block table, int32 [blocks]. values: uint16 [2, tokens, kv_heads, head_dim], bits of the pool's dtype.
    """
    _, tokens, heads, dim = values.shape
    size = pool.block_size
    for t in range(tokens):
        position = start + t
        block = layer * pool.num_blocks + np.int64(table[position // size])
        inside = position % size
        for h in range(heads):
            at = (block * heads + h) * dim * size
            for d in range(dim):
                pool.k[at + d * size + inside] = values[0, t, h, d]
                pool.v[at + inside * dim + d] = values[1, t, h, d]
