"""One pass of the decoder over some rows, as a single compiled call: prefill chunks, decode steps and mixtures alike.

A row is one token of one sequence. Every step works on each row by itself or, in attention, on the row's own past in
its paged cache; rows are only ever grouped to share the reading of weights and of K, V.

A pass is a sequence of sections (`team`), each of which works through all rows; leader and helpers take its items.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from prolepsis.kernels.attention_parts import PART
from prolepsis.kernels.cells import CELL, PLANES, RECORD
from prolepsis.kernels.kivi import code_block
from prolepsis.kernels.kv_blocks import put_head
from prolepsis.kernels.kv_pool import block_at, has_codes, written_view
from prolepsis.kernels.llvm import LANES
from prolepsis.kernels.paged_attention import ENOUGH_PAIRS, Tiles, attend_item, merge_shares, plan_attention
from prolepsis.kernels.qmatmul import (
    ROWS,
    Activations,
    Weights,
    count_tiles,
    multiply_tiles,
    quantise,
)
from prolepsis.kernels.rows import add_row, gate_row, norm_row, rotate_head
from prolepsis.kernels.team import JOB, arrive, finish, idle, join, publish, take
from prolepsis.kernels.unpacking import unpack_row

# Rows of `Plan.groups` for each layer: products that share an input.
QKV, ATTENTION_OUT, GATE_UP, DOWN = range(4)

# Kinds of sections, and the words of their parameters behind `team.JOB`.
_EMBED, _NORM, _MULTIPLY, _ROTATE, _ATTEND, _QUANTISE, _GATE, _LAST_NORM, _CODE = range(9)
_KIND, _ROWS, _A, _B, _C, _D, _E = range(JOB, JOB + 7)

_PHASES = 11  # sections of a layer
_ROWS_AN_ITEM = 8  # rows of a section that works row by row; fewer are not worth sharing
_ITEMS_A_THREAD = 2  # a product is cut into this many items for each thread: long runs of memory, yet balanced
_CHANGE, _PROJECTED, _LOGITS = range(3)  # where a product's result goes


class Plan(NamedTuple):
    """The shape of a model.

    groups int64 [layers * 4 + 1, 3]: first matrix and number of matrices of each product, the head's last, and the
    order in which its quantised activations are taken (`qmatmul.ORDER`; float weights read them as they are); norms
    float32 [2 * layers + 1, hidden], flat: before attention and before the MLP of each layer, then the last; cos, sin
    float32 [max_positions, rotary_dim / 2], flat.
    """

    weights: Weights
    groups: NDArray[np.int64]
    norms: NDArray[np.float32]
    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    embedding: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    rotary_dim: int
    eps: np.float32
    score_scale: np.float32
    fast: bool


class Scratch(NamedTuple):
    """Working memory for some rows, flat float32 but for the quantised activations.

    query_step: from the queries of one layer to those of the next; 0 where each layer's take the place of the last's.
    """

    activations: Activations
    stream: NDArray[np.float32]
    change: NDArray[np.float32]
    projected: NDArray[np.float32]
    query: NDArray[np.float32]
    partial: NDArray[np.float32]
    partial_state: NDArray[np.float32]
    logits: NDArray[np.float32]
    query_step: int


def new_scratch(
    plan: Plan, kv_heads: int, head_dim: int, rows: int, positions: int, vocabulary: int, keep_queries: bool = False
) -> Scratch:
    """Working memory for `rows` rows of sequences up to `positions` long; vocabulary: 0 where no logits are wanted;
    keep_queries: those of every layer stay until the next pass."""
    heads_width, kv_width = plan.heads * head_dim, kv_heads * head_dim
    widest = max(plan.hidden, plan.intermediate, heads_width, 2 * kv_width)
    joined = max(heads_width + 2 * kv_width, 2 * plan.intermediate)
    # Results of attention over every part of the longest context, for as many single rows as are spread out at once.
    shares = -(-positions // PART) * max(ENOUGH_PAIRS, kv_heads)
    group_width = heads_width // kv_heads

    def floats(width: int) -> NDArray[np.float32]:
        return np.empty(rows * width, np.float32)

    return Scratch(
        activations=Activations(
            x=floats(widest),
            quants=np.empty(rows * widest * PLANES, np.int8),
            records=np.empty(rows * widest // CELL * RECORD, np.int32),
        ),
        stream=floats(plan.hidden),
        change=floats(plan.hidden),
        projected=floats(joined),
        query=floats(heads_width * (plan.layers if keep_queries else 1)),
        partial=np.empty(shares * group_width, np.float32),
        partial_state=np.empty(2 * shares * group_width // head_dim, np.float32),
        logits=floats(-(-vocabulary // LANES) * LANES),
        query_step=rows * heads_width if keep_queries else 0,
    )


class Batch(NamedTuple):
    """The rows of a pass, in arrays that hold the largest: int64 [rows] each.

    slots: places in the block tables, which are the positions where nothing was evicted (`kv.eviction`).
    """

    tokens: NDArray[np.int64]
    sequences: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    logit_rows: NDArray[np.int64]
    tiles: Tiles


@njit(inline="always")
def _embed(plan, scratch, token, row):
    hidden = plan.hidden
    unpack_row(plan.weights, plan.embedding, token, scratch.stream, row * hidden)
    scratch.change[row * hidden : (row + 1) * hidden] = 0.0


@njit(inline="always")
def _norm(plan, scratch, norm, row, source):
    """Adds the last change to a row of the residual stream; activations[row] = its norm, quantised.

    Norm n is that before product 2 n: QKV or GATE_UP of a layer, or the head.
    """
    hidden = plan.hidden
    add_row(scratch.stream, source * hidden, hidden, scratch.change, source * hidden)
    norm_row(
        scratch.stream, source * hidden, hidden, plan.norms, norm * hidden, plan.eps, scratch.activations.x,
        row * hidden,
    )  # fmt: skip
    _quantise(plan, scratch, row, hidden, 2 * norm)


@njit(inline="always")
def _quantise(plan, scratch, row, width, group):
    quantise(scratch.activations, row, width, plan.fast, plan.weights.orders, plan.groups[group, 2])


@njit(inline="always")
def _rotate(plan, pool, scratch, tables, layer, rows, row, sequence, position, slot):
    """Rotate a row's queries and keys, and put its keys and values into their slot.

    projected float32 [rows, heads + 2 kv_heads, head_dim]; query float32 [kv_heads, rows, group, head_dim]; both flat.
    """
    dim, kv_heads, size = pool.head_dim, pool.kv_heads, pool.block_size
    heads, rotary, projected = plan.heads, plan.rotary_dim, scratch.projected
    group = heads // kv_heads
    base, angle = row * (heads + 2 * kv_heads) * dim, position * (rotary // 2)
    for h in range(heads):
        to = layer * scratch.query_step + (((h // group) * rows + row) * group + h % group) * dim
        rotate_head(
            projected, base + h * dim, rotary, dim, plan.cos, plan.sin, angle, plan.score_scale, scratch.query, to
        )  # fmt: skip
    place = written_view(pool)
    block = block_at(place, layer, tables[sequence, slot // size])
    inside = slot % size
    turned, column = np.empty(dim, np.float32), np.empty(dim, np.uint16)
    for h in range(kv_heads):
        key = base + (heads + h) * dim
        rotate_head(projected, key, rotary, dim, plan.cos, plan.sin, angle, np.float32(1.0), turned, 0)
        put_head(place, block * kv_heads + h, inside, turned, projected, key + kv_heads * dim, column)


@njit(inline="always")
def _code(pool, tables, layer, sequence, position):
    """The row at `position` may have filled a block of kivi4, which rows of later ones read as codes."""
    if (position + 1) % pool.block_size == 0:
        block, recent = tables[sequence, position // pool.block_size], written_view(pool)
        code_block(pool, recent, (block_at(pool, layer, block), block_at(recent, layer, block)))


@njit(inline="always")
def _gate(plan, scratch, row, layer):
    width = plan.intermediate
    gate_row(
        scratch.projected, row * 2 * width, row * 2 * width + width, width, scratch.activations.x, row * width
    )  # fmt: skip
    _quantise(plan, scratch, row, width, 4 * layer + DOWN)


@njit(inline="always")
def _run_item(control, item, plan, pool, batch, scratch):
    """One item of the section whose parameters are in `control`."""
    kind, rows = control[_KIND], control[_ROWS]
    if kind == _MULTIPLY:
        out = scratch.change
        if control[_D] == _PROJECTED:
            out = scratch.projected
        elif control[_D] == _LOGITS:
            out = scratch.logits
        share = control[_C]
        first = control[_A]
        multiply_tiles(
            plan.weights, plan.groups[first, 0], plan.groups[first, 1], item * share, share, scratch.activations,
            rows, out, control[_B], plan.fast,
        )  # fmt: skip
        return
    if kind == _ATTEND:
        attend_item(
            pool, batch.tiles, control[_A], plan.heads // pool.kv_heads, rows, item, control[_B], control[_E],
            control[_C], scratch.query[control[_A] * scratch.query_step :], scratch.partial, scratch.partial_state,
            scratch.activations.x, plan.fast,
        )  # fmt: skip
        return
    for row in range(item * _ROWS_AN_ITEM, min((item + 1) * _ROWS_AN_ITEM, rows)):
        if kind == _NORM:
            _norm(plan, scratch, control[_A], row, row)
        elif kind == _ROTATE:
            _rotate(
                plan, pool, scratch, batch.tiles.tables, control[_A], rows, row, batch.sequences[row],
                batch.positions[row], batch.slots[row],
            )  # fmt: skip
        elif kind == _CODE:
            _code(pool, batch.tiles.tables, control[_A], batch.sequences[row], batch.positions[row])
        elif kind == _QUANTISE:
            _quantise(plan, scratch, row, plan.heads * pool.head_dim, 4 * control[_A] + ATTENTION_OUT)
        elif kind == _GATE:
            _gate(plan, scratch, row, control[_A])
        elif kind == _EMBED:
            _embed(plan, scratch, batch.tokens[row], row)
        else:
            _norm(plan, scratch, 2 * plan.layers, row, batch.logit_rows[row])


@njit(inline="always")
def _set(control, kind, rows, a, b, c, d):
    control[_KIND], control[_ROWS] = kind, rows
    control[_A], control[_B], control[_C], control[_D] = a, b, c, d


@njit(inline="always")
def _row_section(control, kind, rows, a):
    _set(control, kind, rows, a, 0, 0, 0)
    return (rows + _ROWS_AN_ITEM - 1) // _ROWS_AN_ITEM


@njit(inline="always")
def _product_section(control, plan, threads, group, rows, stride, out):
    tiles = count_tiles(plan.weights, plan.groups[group, 0], plan.groups[group, 1])
    share = tiles if threads == 1 else (tiles + _ITEMS_A_THREAD * threads - 1) // (_ITEMS_A_THREAD * threads)
    _set(control, _MULTIPLY, rows, group, stride, share, out)
    return (tiles + share - 1) // share


@njit(cache=True)
def _prepare(control, step, threads, rows, tiles, logit_rows, plan, pool, batch, room):
    """Set the parameters of section `step` of a pass; returns the number of its items, 0 for none."""
    layer, phase = (step - 1) // _PHASES, (step - 1) % _PHASES
    if step == 0:
        return _row_section(control, _EMBED, rows, 0)
    if layer == plan.layers:
        if phase == 0:
            return _row_section(control, _LAST_NORM, logit_rows, 0)
        padded = plan.weights.matrices[plan.groups[4 * plan.layers, 0], ROWS]
        return _product_section(control, plan, threads, 4 * plan.layers, logit_rows, padded, _LOGITS)
    width, first = plan.heads * pool.head_dim, 4 * layer
    if phase == 0:
        return _row_section(control, _NORM, rows, 2 * layer)
    if phase == 1:
        joined = width + 2 * pool.kv_heads * pool.head_dim
        return _product_section(control, plan, threads, first + QKV, rows, joined, _PROJECTED)
    if phase == 2:
        return _row_section(control, _ROTATE, rows, layer)
    if phase == 3:
        return _row_section(control, _CODE, rows, layer) if has_codes(pool) else 0
    if phase == 4:
        group = plan.heads // pool.kv_heads
        pairs, shares, span, size = plan_attention(
            pool, batch.tiles, tiles, group, threads, room, plan.fast
        )  # fmt: skip
        _set(control, _ATTEND, rows, layer, shares, size, pairs)
        control[_E] = span
        return pairs * ((shares + span - 1) // span)
    if phase == 5:
        return _row_section(control, _QUANTISE, rows, layer)
    if phase == 6:
        return _product_section(control, plan, threads, first + ATTENTION_OUT, rows, plan.hidden, _CHANGE)
    if phase == 7:
        return _row_section(control, _NORM, rows, 2 * layer + 1)
    if phase == 8:
        return _product_section(control, plan, threads, first + GATE_UP, rows, 2 * plan.intermediate, _PROJECTED)
    if phase == 9:
        return _row_section(control, _GATE, rows, layer)
    return _product_section(control, plan, threads, first + DOWN, rows, plan.hidden, _CHANGE)


@njit(cache=True, nogil=True)
def run_pass(control, generation, shape, plan, pool, batch, scratch):
    """Run the decoder over the rows of `batch` and write their K and V: the leader's part, and a helper's.

    shape = (threads, rows, tiles, logit rows) for the leader; a helper gives no threads, and stays for as long as
    `idle` says to wait for more work (`team.Team`). The leader leaves the logits of the first batch.logit_rows
    (ascending) in scratch.logits, float32 [logit rows, padded vocabulary]. Rows that belong to one sequence come in
    order of position, and every earlier position is in the cache or among the rows.

    Leader and helper are one function with one place that runs items: compiling that takes nearly all the time.
    """
    threads, rows, tiles, logit_rows = shape
    leader = threads > 0
    if not leader and not arrive(control, generation):
        return
    steps = 1 + plan.layers * _PHASES + (2 if logit_rows > 0 else 0)
    step, waited, items = 0, 0, 0
    while True:
        item = np.int64(-1)
        if leader:
            if step == steps:
                return
            items = _prepare(control, step, threads, rows, tiles, logit_rows, plan, pool, batch, scratch.partial.size)
            step += 1
            if items == 0:
                continue
            if items == 1:
                item = np.int64(0)
            else:
                publish(control, items)
        elif not idle(control, waited):
            return
        waited += 1
        alone = item == 0
        if not alone:
            item = take(control)
        done = 0
        while item >= 0:
            _run_item(control, item, plan, pool, batch, scratch)
            done += 1
            item = np.int64(-1) if alone else take(control)
        if done > 0:
            waited = 0
            if not alone:
                finish(control, done)
        if leader:
            if not alone:
                join(control, items)
            if control[_KIND] == _ATTEND and control[_B] > 1:
                merge_shares(
                    pool, batch.tiles, control[_D], control[_B], control[_C], plan.heads // pool.kv_heads,
                    scratch.partial, scratch.partial_state, scratch.activations.x, plan.fast,
                )  # fmt: skip
