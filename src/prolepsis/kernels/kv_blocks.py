"""K and V of consecutive tokens into the blocks of a pool."""

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def put_rows(pool, table, layer, start, values):
    """Put the K and V of tokens at positions from `start` on into one layer of a `paged_attention.KVPool`.

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
