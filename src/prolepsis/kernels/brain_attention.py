"""Attention by dot products of bf16 (`brain_parts`), of K and V that are bf16 as attended.

Cut into parts and merged as in `paged_attention`, whose items these functions work on.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from prolepsis.kernels.attention_parts import PART, UNIT
from prolepsis.kernels.brain_parts import GROUP, add_weighted, join_sums, merge_row, round_queries, score_pairs, weigh
from prolepsis.kernels.kv_pool import block_at, read_view
from prolepsis.kernels.kv_widened import is_narrow, widen_block, widen_unit

_RUN = 16  # tokens of one vector of scores


class _Work(NamedTuple):
    """Memory for one part and some KV heads with some queries each: scores float32 [heads, GROUP, PART], weights uint16
    [heads, queries, PART], q uint16 [heads, queries, head_dim], all flat.

    valid int64 [queries]: how many tokens of the part each sees; blocks int64: numbers of the part's blocks with the
    first head; places int64: where those of one head lie; wide uint16 [heads, PART, head_dim]: for a narrow dtype.
    """

    scores: NDArray[np.float32]
    weights: NDArray[np.uint16]
    q: NDArray[np.uint16]
    valid: NDArray[np.int64]
    blocks: NDArray[np.int64]
    places: NDArray[np.int64]
    wide: NDArray[np.uint16]


@njit(inline="always")
def _new_work(pool, q, q_stride, heads, queries):
    """With the queries in it, rounded; those of the next head lie q_stride behind in q."""
    width = queries * pool.head_dim
    rounded = np.empty(heads * width, np.uint16)
    for i in range(heads):
        round_queries(q[i * q_stride :], width, rounded[i * width :])
    most = PART // _RUN
    return _Work(
        np.empty(heads * GROUP * PART, np.float32), np.empty(heads * queries * PART, np.uint16), rounded,
        np.empty(queries, np.int64), np.empty(most, np.int64), np.empty(most, np.int64),
        np.empty(heads * PART * pool.head_dim if is_narrow(pool.dtype) else 0, np.uint16),
    )  # fmt: skip


@njit(inline="always")
def _enter_part(pool, tables, sequence, layer, head, queries, group, position, start, stop, work):
    """Fill in blocks and valid."""
    before = start // pool.block_size
    for n in range((stop - start + pool.block_size - 1) // pool.block_size):
        work.blocks[n] = block_at(pool, layer, tables[sequence, before + n]) * pool.kv_heads + head
    v, seen = 0, position + 1 - start
    while v < queries:
        for _ in range(group):
            work.valid[v] = min(seen, stop - start)
            v += 1
        seen += 1


@njit(inline="always")
def _weigh_part(pool, heads, queries, group, position, count, work, tops, sums, stride):
    """Weights of the part's `count` tokens, and their maxima and sums, which for the next head lie `stride` behind.

    position: of the first row, counted from the part's start.
    """
    dim, size = pool.head_dim, pool.block_size
    padded = (count + UNIT - 1) // UNIT * UNIT
    for low in range(max(-position, 0) * group, queries, GROUP):
        some = min(GROUP, queries - low)
        n, slot = 0, 0
        for token in range(0, count, UNIT):
            first, at = work.blocks[n], slot
            second, then = first, at
            for run in range(2):
                if token + run * _RUN < count:
                    second, then = work.blocks[n], slot
                    slot += _RUN
                    if slot == size:
                        n, slot = n + 1, 0
            seeing = min(max(max(token - position, 0) * group - low, 0), some)  # queries before do not
            for i in range(heads):
                keys, step = pool.k, size
                here, there = (first + i) * dim * size + at, (second + i) * dim * size + then
                if is_narrow(pool.dtype):
                    keys, step = work.wide, UNIT
                    here = (i * PART + token) * dim
                    there = here + UNIT // 2
                    if low < GROUP + max(-position, 0) * group:
                        widen_unit(pool, (first + i, at), (second + i, then), work.wide[here:])
                score_pairs(
                    keys, here, there, step, dim, work.q[(i * queries + low) * dim :], seeing, some,
                    work.scores[i * GROUP * PART :], token, PART,
                )  # fmt: skip
        for i in range(heads):
            for v in range(some):
                weigh(
                    work.scores, (i * GROUP + v) * PART, work.valid[low + v], padded, work.weights,
                    (i * queries + low + v) * PART, tops, sums, i * stride + low + v,
                )  # fmt: skip


@njit(inline="always")
def _add_values(pool, heads, queries, group, position, count, first, stop, work, out, stride, keep, take, merge):
    """`add_weighted` of the part's blocks first .. stop, of `count` tokens in the part."""
    dim, size = pool.head_dim, pool.block_size
    for i in range(heads):
        values = pool.v
        for n in range(first, stop):
            place = (work.blocks[n] + i) * dim * size
            if is_narrow(pool.dtype):
                values, place = work.wide, (n - first) * dim * size
                widen_block(pool, work.blocks[n] + i, min(size, count - n * size), work.wide[place:])
            work.places[n - first] = place
        add_weighted(
            values, work.places, stop - first, size, dim, work.weights[i * queries * PART :], first * size, PART,
            work.valid, max(first * size - position, 0) * group, queries, out[i * stride :], keep, take, merge,
        )  # fmt: skip


@njit(cache=True)
def attend_parts(
    pool, tables, sequence, layer, heads, q, q_stride, queries, group, position, parts, out, tops, sums, steps, merged
):  # fmt: skip
    """Parts first .. last of a context, for each query v: out[v] = sum of weight * v, tops[v] and sums[v] the weights'
    maximum, as a power of two, and sum.

    heads: the first KV head and how many; q float32: of the next one q_stride behind. Query v = row * group + head in
    group, at `position` + v // group; tokens after it are not seen. parts: the first, the one behind the last, and the
    tokens of the whole. out, tops, sums: float32; steps: the strides of out, from part to part and from head to head,
    and those of tops and sums. If `merged`, the results are those of all parts; there must be 0, -inf and 0 before.
    tops and sums of a query that sees nothing of a part are left as they are.
    """
    dim, together = pool.head_dim, heads[1]
    first, last, end = parts
    out_step, stride, state_step, state_stride = steps
    work = _new_work(pool, q, q_stride, together, queries)
    every = together * queries if merged else 0
    part_tops, part_sums = np.empty(every, np.float32), np.empty(every, np.float32)
    keep, take = np.empty(every, np.float32), np.empty(every, np.float32)
    # Few queries take V in memory's order, all heads of a block before the next one.
    whole = merged and together == 1
    part = np.empty(0 if whole else every * dim, np.float32)
    for number in range(first, last):
        start = number * PART
        stop, seeing = min(start + PART, end), max(start - position, 0) * group
        if merged:
            target, own_tops, own_sums = out if whole else part, part_tops, part_sums
        else:
            at = (number - first) * state_step
            target, own_tops, own_sums = out[(number - first) * out_step :], tops[at:], sums[at:]
        count, place = stop - start, position - start
        view = read_view(pool, start, position)
        _enter_part(view, tables, sequence, layer, heads[0], queries, group, position, start, stop, work)
        _weigh_part(view, together, queries, group, place, count, work, own_tops, own_sums, state_stride)
        if merged:
            for i in range(together):
                at = i * queries
                join_sums(tops, sums, part_tops, part_sums, keep, take, at + seeing, at + queries)
        if not whole:
            for i in range(together):
                target[i * stride : i * stride + queries * dim] = 0.0
        blocks = (count + pool.block_size - 1) // pool.block_size
        run = blocks if whole else 1
        for block in range(0, blocks, run):
            _add_values(
                view, together, queries, group, place, count, block, block + run, work, target, stride, keep, take,
                whole,
            )  # fmt: skip
        if merged and not whole:
            for i in range(together):
                for v in range(i * queries + seeing, (i + 1) * queries):
                    merge_row(out, v * dim, part, v * dim, dim, keep, take, v)


@njit(inline="always")
def merge_part(total, tops, sums, part, part_tops, part_sums, first, queries, dim):
    """Merge what `attend_parts` left of a later part, for the queries from `first` on, which see some of it."""
    keep, take = np.empty(queries, np.float32), np.empty(queries, np.float32)
    join_sums(tops, sums, part_tops, part_sums, keep, take, first, queries)
    for v in range(first, queries):
        merge_row(total, v * dim, part, v * dim, dim, keep, take, v)
