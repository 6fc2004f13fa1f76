"""Attention over paged K and V, for prefill chunks and decode steps alike.

The context is cut into parts of `PART` tokens at absolute positions; each part is scored, exponentiated and summed by
itself, and parts are merged in order. How rows are grouped and which thread does what therefore never shows in the
result. Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691) for the tiling, PagedAttention (Kwon et al. 2023,
arXiv:2309.06180) for the block table.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from prolepsis.kernels.attention_parts import PART, UNIT, add_values, divide_row, exponentiate, merge, score_unit
from prolepsis.kernels.brain_attention import attend_parts, merge_part
from prolepsis.kernels.kv_pool import block_at, read_view
from prolepsis.kernels.kv_widened import is_brain, is_narrow, widen_block, widen_unit
from prolepsis.kernels.narrow_kv import attended

TILE_QUERIES = 24  # queries (rows x heads of a group) that share one read of K and V
FAST_TILE_QUERIES = 48  # the same by dot products of bf16, which take half the time
_ITEMS_A_THREAD = 4  # as many items the shares of few pairs are gathered into, for each thread
ENOUGH_PAIRS = 16  # below this many (tile, head) pairs the parts of the context are spread over threads too


class Tiles(NamedTuple):
    """Runs of rows of one sequence at consecutive positions, of kivi4 within a part: int64 [tiles] each, and the
    sequences' block tables int32 [sequences, max_blocks]. Positions are places in these tables."""

    first_row: NDArray[np.int64]
    num_rows: NDArray[np.int64]
    first_position: NDArray[np.int64]
    sequence: NDArray[np.int64]
    tables: NDArray[np.int32]


def add_tiles(
    tiles: Tiles, tile: int, sequence: int, row: int, position: int, count: int, group: int, fast: bool = False
) -> int:
    """Describe `count` rows from `row` on, of one sequence from `position` on, in `tiles` from number `tile` on.

    group: query heads that share a KV head; fast: as in `attend_item`. Returns the number of the next tile.
    """
    step = max(1, (FAST_TILE_QUERIES if fast else TILE_QUERIES) // group)
    for first in range(0, count, step):
        tiles.first_row[tile] = row + first
        tiles.num_rows[tile] = min(step, count - first)
        tiles.first_position[tile] = position + first
        tiles.sequence[tile] = sequence
        tile += 1
    return tile


@njit(inline="always")
def score(pool, first, second, q, queries, scores, column, width, wide):
    """Score 32 tokens; first, second: where the first 16 and the others lie, (block and head, slot) each; width: scores
    of a query."""
    dim, size = pool.head_dim, pool.block_size
    dtype, keys, stride = pool.dtype, pool.k, size
    at, then = first[0] * dim * size + first[1], second[0] * dim * size + second[1]
    if is_narrow(pool.dtype):
        widen_unit(pool, first, second, wide)
        dtype, keys, stride, at, then = attended(pool.dtype), wide, UNIT, 0, UNIT // 2
    score_unit(dtype, keys, at, then, stride, dim, q, queries, scores, column, width)


@njit(cache=True)
def _attend_part(
    pool, tables, sequence, layer, heads, q, q_stride, queries, group, position, start, stop, scores, wide, out,
    out_stride, state, state_stride,
):  # fmt: skip
    """One part of the context: out[v] = sum of exp(score - max) * v and state[v] = (max, sum) for each query v.

    heads: the first KV head and how many; q, out and state of the next one lie `q_stride`, `out_stride` and
    `state_stride` behind. Query v = row * group + head in group, at `position` + v // group; tokens after it are not
    seen. A query that sees nothing of the part gets sum 0. wide: uint16 [tokens of a block or UNIT, head_dim], for K
    and V of a narrow dtype in 16 bits.
    """
    dim, size, width = pool.head_dim, pool.block_size, queries * PART
    head, together = heads
    for token in range(start, stop, UNIT):
        then = min(token + 16, stop - 1) // 16 * 16
        first = block_at(pool, layer, tables[sequence, token // size]) * pool.kv_heads + head
        second = block_at(pool, layer, tables[sequence, then // size]) * pool.kv_heads + head
        for i in range(together):
            score(
                pool, (first + i, token % size), (second + i, then % size), q[i * q_stride :], queries,
                scores[i * width :], token - start, PART, wide,
            )  # fmt: skip
    for i in range(together):
        for v in range(queries):
            valid, at = min(position + v // group + 1, stop) - start, i * state_stride + 2 * v
            if valid > 0:
                exponentiate(scores, i * width + v * PART, valid, state, at)
            else:
                state[at], state[at + 1] = -np.inf, 0.0
        out[i * out_stride : i * out_stride + queries * dim] = 0.0
    for token in range(start, stop, size):
        first = block_at(pool, layer, tables[sequence, token // size]) * pool.kv_heads + head
        for i in range(together):
            at, count = (first + i) * dim * size, min(size, stop - token)
            dtype, values = pool.dtype, pool.v
            if is_narrow(pool.dtype):
                widen_block(pool, first + i, count, wide)
                dtype, values, at = attended(pool.dtype), wide, 0
            v = 0
            while v < queries:
                # A row whose own position lies inside these tokens stops short; from the first that sees all, all do.
                seen = min(position + v // group + 1 - token, count)
                rows = queries - v if seen == count else group
                if seen > 0:
                    add_values(
                        dtype, values, at, seen, dim, scores[i * width :], token - start, PART, v, rows,
                        out[i * out_stride :],
                    )  # fmt: skip
                v += rows


@njit(inline="always")
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


@njit(inline="always")
def _finish(queries, dim, group, head, heads, row, total, sums, step, out):
    """Divide by the sums, every `step`-th of `sums`, and put each query's output in its place: out float32
    [rows, heads * dim], flat."""
    for v in range(queries):
        at = ((row + v // group) * heads + head * group + v % group) * dim
        divide_row(total, v * dim, dim, sums, step * v, out, at)


@njit(inline="always")
def _heads_at_once(heads, queries, fast):
    """How many KV heads one item takes for a tile of so many queries a head.

    Where these are few, reading K and V is what takes the time, and memory is read several times as fast in its own
    order, in which the heads of a block follow each other.
    """
    return min(max((FAST_TILE_QUERIES if fast else TILE_QUERIES) // queries, 1), heads)


@njit(cache=True)
def plan_attention(pool, tiles, count, group, threads, room, fast):
    """How to cut the attention of `count` tiles into items: (pairs, shares, span, width).

    A pair is a tile with a KV head; its item may do the work of the pairs behind it (`_heads_at_once`), whose own then
    do nothing. With few that do any, every part of the context is a share of its own, so that all threads have work,
    provided that `room` floats hold the results of all shares; `width` is the floats of one result.
    An item is `span` shares of a pair in a row: pairs * ceil(shares / span) items in all.
    """
    longest, widest, working = 0, 0, 0
    for tile in range(count):
        longest = max(longest, tiles.first_position[tile] + tiles.num_rows[tile])
        widest = max(widest, tiles.num_rows[tile] * group)
        together = _heads_at_once(pool.kv_heads, tiles.num_rows[tile] * group, fast)
        working += (pool.kv_heads + together - 1) // together
    pairs, parts = count * pool.kv_heads, (longest + PART - 1) // PART
    width = widest * pool.head_dim
    if threads == 1 or working >= ENOUGH_PAIRS or pairs * parts * width > room:
        return pairs, 1, 1, width
    return pairs, parts, (working * parts - 1) // (_ITEMS_A_THREAD * threads) + 1, width


@njit(inline="always")
def _attend_in_brains(
    pool, tiles, tile, layer, heads, group, query, q_stride, parts, at, shares, width, partial, partial_state, out
):  # fmt: skip
    """`attend_item` by dot products of bf16; at: number of its first share.

    partial_state is float32 [shares of all pairs, 2, width / head_dim] here: the maxima, and the sums.
    """
    dim, queries, own = pool.head_dim, tiles.num_rows[tile] * group, shares == 1
    every, most = heads[1] * queries if own else 0, width // dim
    total, sums = np.zeros(every * dim, np.float32), np.zeros(every, np.float32)
    tops = np.full(every, -np.inf, np.float32)
    steps = (0, queries * dim, 0, queries)
    if not own:
        total, tops, sums = partial[at * width :], partial_state[2 * at * most :], partial_state[(2 * at + 1) * most :]
        steps = (width, shares * width, 2 * most, 2 * most * shares)
    attend_parts(
        pool, tiles.tables, tiles.sequence[tile], layer, heads, query, q_stride, queries, group,
        tiles.first_position[tile], parts, total, tops, sums, steps, own,
    )  # fmt: skip
    if own:
        for i in range(heads[1]):
            _finish(
                queries, dim, group, heads[0] + i, pool.kv_heads * group, tiles.first_row[tile],
                total[i * queries * dim :], sums[i * queries :], 1, out,
            )  # fmt: skip


@njit(inline="always")
def attend_item(pool, tiles, layer, group, rows, item, shares, span, width, q, partial, partial_state, out, fast):
    """One item of `plan_attention`: softmax(q k^T) v over a tile's own past, or over some parts of it each.

    q float32 [kv_heads, rows, group, head_dim] (already rotated and scaled), flat. With one share the result goes to
    out float32 [rows, heads * head_dim], else to partial and partial_state, from where `merge_shares` takes it. Block
    sizes are multiples of 16 and divide `PART`; head_dim is a multiple of 32. fast: by dot products of bf16, where K
    and V are bf16 as attended, with other results.
    """
    heads, dim = pool.kv_heads, pool.head_dim
    groups = (shares + span - 1) // span
    pair, first = item // groups, item % groups * span
    tile, head = pair // heads, pair % heads
    end = tiles.first_position[tile] + tiles.num_rows[tile]
    queries = tiles.num_rows[tile] * group
    together = _heads_at_once(heads, queries, fast)
    if head % together != 0:
        return
    together = min(together, heads - head)
    q_stride, every = rows * group * dim, together * queries
    query = q[head * q_stride + tiles.first_row[tile] * group * dim :]
    if fast and is_brain(pool.dtype):
        parts = (end + PART - 1) // PART
        last = parts if shares == 1 else min(first + span, shares, parts)
        _attend_in_brains(
            pool, tiles, tile, layer, (head, together), group, query, q_stride, (first, last, end),
            pair * shares + first, shares, width, partial, partial_state, out,
        )  # fmt: skip
        return
    scores = np.empty(every * PART, np.float32)
    wide = np.empty(max(UNIT, pool.block_size) * dim if is_narrow(pool.dtype) else 0, np.uint16)
    if shares > 1:
        states = 2 * (width // dim)
        for share in range(first, min(first + span, shares, (end + PART - 1) // PART)):
            at = pair * shares + share
            view = read_view(pool, share * PART, tiles.first_position[tile])
            _attend_part(
                view, tiles.tables, tiles.sequence[tile], layer, (head, together), query, q_stride, queries, group,
                tiles.first_position[tile], share * PART, min((share + 1) * PART, end), scores, wide,
                partial[at * width :], shares * width, partial_state[at * states :], shares * states,
            )  # fmt: skip
        return
    part, part_state = np.empty(every * dim, np.float32), np.empty(2 * every, np.float32)
    total, state = np.empty(every * dim, np.float32), np.empty(2 * every, np.float32)
    for start in range(0, end, PART):
        view = read_view(pool, start, tiles.first_position[tile])
        _attend_part(
            view, tiles.tables, tiles.sequence[tile], layer, (head, together), query, q_stride, queries, group,
            tiles.first_position[tile], start, min(start + PART, end), scores, wide, part, queries * dim, part_state,
            2 * queries,
        )  # fmt: skip
        _fold(start == 0, every, dim, total, state, part, part_state)
    for i in range(together):
        _finish(
            queries, dim, group, head + i, heads * group, tiles.first_row[tile], total[i * queries * dim :],
            state[2 * i * queries + 1 :], 2, out,
        )  # fmt: skip


@njit(cache=True)
def merge_shares(pool, tiles, pairs, shares, width, group, partial, partial_state, out, fast):
    """Merge the shares that `attend_item` left, in order, into out float32 [rows, heads * head_dim]."""
    heads, dim = pool.kv_heads, pool.head_dim
    results = partial[: pairs * shares * width].reshape(pairs * shares, width)
    states = partial_state[: pairs * shares * 2 * (width // dim)].reshape(pairs * shares, 2 * (width // dim))
    for pair in range(pairs):
        tile, first = pair // heads, pair * shares
        queries = tiles.num_rows[tile] * group
        end = tiles.first_position[tile] + tiles.num_rows[tile]
        brains, most = fast and is_brain(pool.dtype), width // dim
        for later in range(first + 1, first + (end + PART - 1) // PART):
            if brains:
                seeing = max((later - first) * PART - tiles.first_position[tile], 0) * group
                merge_part(
                    results[first], states[first], states[first][most:], results[later], states[later],
                    states[later][most:], seeing, queries, dim,
                )  # fmt: skip
            else:
                _fold(np.bool_(False), queries, dim, results[first], states[first], results[later], states[later])
        sums, step = (states[first][most:], 1) if brains else (states[first][1:], 2)
        _finish(
            queries, dim, group, pair % heads, heads * group, tiles.first_row[tile], results[first], sums, step, out
        )  # fmt: skip
