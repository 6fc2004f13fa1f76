"""Attention over paged K and V, for prefill chunks and decode steps alike.

The context is cut into parts of `PART` tokens at absolute positions; each part is scored, exponentiated and summed by
itself, and parts are merged in order. How rows are grouped and which thread does what therefore never shows in the
result. Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691) for the tiling, PagedAttention (Kwon et al. 2023,
arXiv:2309.06180) for the block table.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from prolepsis.kernels.attention_parts import UNIT, add_values, divide_row, exponentiate, merge, score_unit

PART = 128  # tokens of context that are one unit of work
TILE_QUERIES = 24  # queries (rows x heads of a group) that share one read of K and V
_ENOUGH_PAIRS = 16  # below this many (tile, head) pairs the parts of the context are spread over threads too


class KVPool(NamedTuple):
    """The blocks of every layer, flat: k uint16 [layers, blocks, kv_heads, head_dim, block_size], v with the last two
    axes exchanged; `dtype` one of `rows.DTYPES`."""

    k: NDArray[np.uint16]
    v: NDArray[np.uint16]
    num_blocks: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: int


class Tiles(NamedTuple):
    """Runs of rows of one sequence at consecutive positions: int64 [tiles] each, and the sequences' block tables
    int32 [sequences, max_blocks]."""

    first_row: NDArray[np.int64]
    num_rows: NDArray[np.int64]
    first_position: NDArray[np.int64]
    sequence: NDArray[np.int64]
    tables: NDArray[np.int32]


# Numba cannot carry a tuple into a parallel loop: such loops take the fields apart before and put them together inside.


@njit(cache=True)
def _attend_part(pool, tables, sequence, layer, head, q, queries, group, position, start, stop, scores, out, state):
    """One part of the context: out[v] = sum of exp(score - max) * v and state[v] = (max, sum) for each query v.

    Query v = row * group + head in group, at `position` + v // group; tokens after it are not seen. A query that sees
    nothing of the part gets sum 0.
    """
    dim, size = pool.head_dim, pool.block_size
    base = layer * pool.num_blocks
    for token in range(start, stop, UNIT):
        places = (token, min(token + 16, stop - 1) // 16 * 16)
        first = ((base + tables[sequence, places[0] // size]) * pool.kv_heads + head) * dim * size + places[0] % size
        second = ((base + tables[sequence, places[1] // size]) * pool.kv_heads + head) * dim * size + places[1] % size
        score_unit(pool.dtype, pool.k, first, second, size, dim, q, queries, scores, token - start, PART)
    for v in range(queries):
        valid = min(position + v // group + 1, stop) - start
        if valid > 0:
            exponentiate(scores, v * PART, valid, state, 2 * v)
        else:
            state[2 * v], state[2 * v + 1] = -np.inf, 0.0
    out[: queries * dim] = 0.0
    for token in range(start, stop, size):
        at = ((base + tables[sequence, token // size]) * pool.kv_heads + head) * dim * size
        count = min(size, stop - token)
        v = 0
        while v < queries:
            # A row whose own position lies inside these tokens stops short; from the first that sees all, all do.
            seen = min(position + v // group + 1 - token, count)
            together = queries - v if seen == count else group
            if seen > 0:
                add_values(pool.dtype, pool.v, at, seen, dim, scores, token - start, PART, v, together, out)
            v += together


@njit(cache=True)
def _fold(first, queries, dim, total, state, part, part_state):
    """Merge one part's results into the running ones; the first part is where they start."""
    if first:
        for i in range(queries * dim):
            total[i] = part[i]
        for i in range(2 * queries):
            state[i] = part_state[i]
        return
    for v in range(queries):
        if part_state[2 * v + 1] != 0.0:
            merge(total, v * dim, state, 2 * v, part, v * dim, part_state, 2 * v, dim)


@njit(cache=True)
def _finish(queries, dim, group, head, heads, row, total, state, out):
    """Divide by the sums and put each query's output in its place: out float32 [rows, heads * dim], flat."""
    for v in range(queries):
        at = ((row + v // group) * heads + head * group + v % group) * dim
        divide_row(total, v * dim, dim, state, 2 * v, out, at)


@njit(cache=True, parallel=True)
def _attend_all(pool, tiles, layer, group, q, out):
    k, v, num_blocks, heads, dim, block_size, dtype = pool
    first_row, num_rows, first_position, sequences, tables = tiles
    rows = q.size // (heads * group * dim)
    longest, widest = 0, 0
    for tile in range(first_row.size):
        longest = max(longest, first_position[tile] + num_rows[tile])
        widest = max(widest, num_rows[tile] * group)
    pairs = first_row.size * heads
    parts = (longest + PART - 1) // PART
    # Few pairs: every part of their context is an item of its own, so that all threads have work.
    span, shares = (1, parts) if pairs < _ENOUGH_PAIRS else (parts, 1)
    items = pairs * shares
    results = np.empty((items, widest * dim), np.float32)
    states = np.empty((items, 2 * widest), np.float32)
    for i in prange(items):
        item = np.int64(i)
        if shares == 1:
            # Later tiles of a prompt see more: the first goes with the last, so that equal shares are equal work.
            item = item // 2 if item % 2 == 0 else items - 1 - item // 2
        pair, share = item // shares, item % shares
        tile, head = pair // heads, pair % heads
        end = first_position[tile] + num_rows[tile]
        queries = num_rows[tile] * group
        at = (head * rows + first_row[tile]) * group * dim
        scores, part = np.empty(queries * PART, np.float32), np.empty(queries * dim, np.float32)
        part_state = np.empty(2 * queries, np.float32)
        first = share * span * PART
        for start in range(first, min(first + span * PART, end), PART):
            _attend_part(
                KVPool(k, v, num_blocks, heads, dim, block_size, dtype), tables, sequences[tile], layer, head,
                q[at : at + queries * dim], queries, group, first_position[tile], start, min(start + PART, end),
                scores, part, part_state,
            )  # fmt: skip
            _fold(start == first, queries, dim, results[item], states[item], part, part_state)
    for p in range(pairs):
        tile, begin = p // heads, p * shares
        queries = num_rows[tile] * group
        if shares > 1:
            for later in range(begin + 1, begin + (first_position[tile] + num_rows[tile] + PART - 1) // PART):
                _fold(np.bool_(False), queries, dim, results[begin], states[begin], results[later], states[later])
        _finish(queries, dim, group, p % heads, heads * group, first_row[tile], results[begin], states[begin], out)


@njit(inline="always")
def attend(pool, tiles, layer, group, q, out):
    """out = softmax(q k^T) v over each row's own past, itself included.

    q float32 [kv_heads, rows, group, head_dim] (already rotated and scaled), out float32 [rows, heads * head_dim],
    both flat. Block sizes are multiples of 16 and divide `PART`; head_dim is a multiple of 32.
    """
    _attend_all(pool, tiles, layer, group, q, out)
