"""The twin's pass over a segment of one sequence, layer by layer, as sections that a team works through.

A layer begins with the prediction of its K and V. When the true ones are known, the hidden state is corrected by how
far the prediction was off, and attention and the MLP go on from there with the true K and V. Every row is worked on
by itself, in the steps of `kernels.forward`: a prediction depends on its own token and that token's past alone.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from prolepsis.kernels.forward import Plan
from prolepsis.kernels.paged_attention import Tiles, attend_item, merge_shares, plan_attention
from prolepsis.kernels.qmatmul import (
    Weights,
    count_tiles,
    multiply_tiles,
    quantise,
)
from prolepsis.kernels.rows import (
    add_moderate_row,
    gate_row,
    moderate_row,
    norm_row,
    root_mean_square,
    rotate_head,
    subtract_row,
)
from prolepsis.kernels.team import JOB, arrive, finish, idle, join, publish, take
from prolepsis.kernels.unpacking import unpack_row

PHASES = 15
"""Steps of a layer; step 0 looks the tokens up, and layer l has those from 1 + PHASES * l on."""
PREDICTION = 3
"""The first steps of a layer, after which its K and V are predicted."""

# Rows of `Network.groups` for each layer.
KV, CORRECTION, QUERY, ATTENTION_OUT, GATE_UP, DOWN = range(6)
GROUPS = 6
TARGETS, MADE, CORRECTIONS = range(3)

_EMBED, _NORM, _MULTIPLY, _PREDICT, _RESIDUAL, _ROTATE, _ATTEND, _QUANTISE, _GATE = range(9)
_KIND, _ROWS, _A, _B, _C, _D, _E = range(JOB, JOB + 7)
_CHANGE, _PROJECTED = range(2)

_ROWS_AN_ITEM = 8
_ITEMS_A_THREAD = 2


class Network(NamedTuple):
    """The twin's network. plan: the target's. made: weights that the target has in another form. corrections: those
    of hidden states.

    groups int64 [layers * 6, 5]: first matrix and number of matrices of each product, where they are (TARGETS, MADE or
    CORRECTIONS), whether its activations have 16 bits and not 8, and the order in which they are taken (the target's
    `qmatmul.ORDER`). Products of no matrices are left out.
    """

    plan: Plan
    made: Weights
    corrections: Weights
    groups: NDArray[np.int64]
    back_sin: NDArray[np.float32]


class TwinRows(NamedTuple):
    """The rows of a pass. tokens, positions: int64 [rows]. means: float32 [2, rows, kv_heads, head_dim], flat: the
    predicted K, turned, and V of the layer at hand. actual: float32, the true ones, in the same form."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    means: NDArray[np.float32]
    actual: NDArray[np.float32]
    tiles: Tiles


@njit(inline="always")
def _embed(network, scratch, token, row):
    hidden = network.plan.hidden
    unpack_row(network.plan.weights, network.plan.embedding, token, scratch.stream, row * hidden)
    scratch.change[row * hidden : (row + 1) * hidden] = 0.0


@njit(inline="always")
def _quantise(network, scratch, row, width, group):
    quantise(
        scratch.activations, row, width, network.groups[group, 3] == 0, network.plan.weights.orders,
        network.groups[group, 4],
    )  # fmt: skip


@njit(inline="always")
def _norm(network, scratch, norm, row, group):
    """Adds the last change to a row of the hidden state; activations[row] = its norm, quantised."""
    plan = network.plan
    hidden = plan.hidden
    at = row * hidden
    add_moderate_row(scratch.stream, at, hidden, scratch.change)
    norm_row(scratch.stream, at, hidden, plan.norms, norm * hidden, plan.eps, scratch.activations.x, at)
    _quantise(network, scratch, row, hidden, group)


@njit(inline="always")
def _predict(plan, pool, scratch, rows_of, rows, row):
    """means[row] = the projected K, turned, and V."""
    dim, kv_heads, rotary = pool.head_dim, pool.kv_heads, plan.rotary_dim
    width = kv_heads * dim
    base = row * (plan.heads * dim + 2 * width) + plan.heads * dim
    angle = rows_of.positions[row] * (rotary // 2)
    at, second = row * width, (rows + row) * width
    for h in range(kv_heads):
        rotate_head(
            scratch.projected, base + h * dim, rotary, dim, plan.cos, plan.sin, angle, np.float32(1.0), rows_of.means,
            at + h * dim,
        )  # fmt: skip
    _scale(plan, scratch.projected, base + width, width, np.float32(1.0), rows_of.means, second)
    moderate_row(rows_of.means, at, width)
    moderate_row(rows_of.means, second, width)


@njit(inline="always")
def _scale(plan, x, at, width, factor, out, out_at):
    """out = x * factor: a head that does not turn."""
    rotate_head(x, at, 0, width, plan.cos, plan.sin, 0, factor, out, out_at)


@njit(inline="always")
def _residual(network, pool, scratch, rows_of, rows, row, group):
    """activations[row] = how far the prediction is off, K's turned back, times the hidden state's magnitude.

    The projections see the hidden state divided by that magnitude; the correction is added to the state itself.
    """
    plan = network.plan
    dim, kv_heads = pool.head_dim, pool.kv_heads
    width, x = kv_heads * dim, scratch.activations.x
    factor = root_mean_square(scratch.stream, row * plan.hidden, plan.hidden)
    base, out = row * (plan.heads * dim + 2 * width) + plan.heads * dim, row * 2 * width
    angle = rows_of.positions[row] * (plan.rotary_dim // 2)
    subtract_row(rows_of.actual, rows_of.means, row * width, width, scratch.projected, base)
    subtract_row(rows_of.actual, rows_of.means, (rows + row) * width, width, scratch.projected, base + width)
    for h in range(kv_heads):
        rotate_head(
            scratch.projected, base + h * dim, plan.rotary_dim, dim, plan.cos, network.back_sin, angle, factor, x,
            out + h * dim,
        )  # fmt: skip
    _scale(plan, scratch.projected, base + width, width, factor, x, out + width)
    moderate_row(x, out, 2 * width)
    _quantise(network, scratch, row, 2 * width, group)


@njit(inline="always")
def _rotate(plan, pool, scratch, rows_of, rows, row):
    """query float32 [kv_heads, rows, group, head_dim] = the projected queries, turned and scaled."""
    dim, heads = pool.head_dim, plan.heads
    group = heads // pool.kv_heads
    base = row * (heads + 2 * pool.kv_heads) * dim
    angle = rows_of.positions[row] * (plan.rotary_dim // 2)
    for h in range(heads):
        to = (((h // group) * rows + row) * group + h % group) * dim
        rotate_head(
            scratch.projected, base + h * dim, plan.rotary_dim, dim, plan.cos, plan.sin, angle, plan.score_scale,
            scratch.query, to,
        )  # fmt: skip


@njit(inline="always")
def _gate(network, scratch, row, group):
    width = network.plan.intermediate
    gate_row(
        scratch.projected, row * 2 * width, row * 2 * width + width, width, scratch.activations.x, row * width
    )  # fmt: skip
    _quantise(network, scratch, row, width, group)


@njit(inline="always")
def _weights(network, group):
    place, weights = network.groups[group, 2], network.plan.weights
    if place == MADE:
        weights = network.made
    elif place == CORRECTIONS:
        weights = network.corrections
    return weights


@njit(inline="always")
def _multiply(control, item, network, scratch):
    group, share = control[_A], control[_C]
    first, count = network.groups[group, 0], network.groups[group, 1]
    weights = _weights(network, group)
    out = scratch.change if control[_D] == _CHANGE else scratch.projected
    multiply_tiles(
        weights, first, count, item * share, share, scratch.activations, control[_ROWS], out, control[_B],
        control[_E] == 0,
    )  # fmt: skip


@njit(inline="always")
def _run_item(control, item, network, pool, rows_of, scratch):
    """One item of the section whose parameters are in `control`."""
    kind, rows, plan = control[_KIND], control[_ROWS], network.plan
    if kind == _MULTIPLY:
        _multiply(control, item, network, scratch)
        return
    if kind == _ATTEND:
        attend_item(
            pool, rows_of.tiles, control[_A], plan.heads // pool.kv_heads, rows, item, control[_B], control[_E],
            control[_C], scratch.query, scratch.partial, scratch.partial_state, scratch.activations.x,
            False,
        )  # fmt: skip
        return
    group = control[_B]
    for row in range(item * _ROWS_AN_ITEM, min((item + 1) * _ROWS_AN_ITEM, rows)):
        if kind == _NORM:
            _norm(network, scratch, control[_A], row, group)
        elif kind == _PREDICT:
            _predict(plan, pool, scratch, rows_of, rows, row)
        elif kind == _RESIDUAL:
            _residual(network, pool, scratch, rows_of, rows, row, group)
        elif kind == _ROTATE:
            _rotate(plan, pool, scratch, rows_of, rows, row)
        elif kind == _QUANTISE:
            _quantise(network, scratch, row, control[_A], group)
        elif kind == _GATE:
            _gate(network, scratch, row, group)
        else:
            _embed(network, scratch, rows_of.tokens[row], row)


@njit(inline="always")
def _row_section(control, kind, rows, a, group):
    control[_KIND], control[_ROWS] = kind, rows
    control[_A], control[_B] = a, group
    return (rows + _ROWS_AN_ITEM - 1) // _ROWS_AN_ITEM


@njit(inline="always")
def _product_section(control, network, threads, group, rows, stride, out):
    tiles = count_tiles(_weights(network, group), network.groups[group, 0], network.groups[group, 1])
    share = tiles if threads == 1 else (tiles + _ITEMS_A_THREAD * threads - 1) // (_ITEMS_A_THREAD * threads)
    control[_KIND], control[_ROWS] = _MULTIPLY, rows
    control[_A], control[_B], control[_C], control[_D] = group, stride, share, out
    control[_E] = network.groups[group, 3]
    return (tiles + share - 1) // share


@njit(cache=True)
def _prepare(control, step, threads, rows, tiles, pool_layer, network, pool, rows_of, room):
    """Set the parameters of section `step` of a pass; returns the number of its items, 0 for none."""
    plan = network.plan
    if step == 0:
        return _row_section(control, _EMBED, rows, 0, 0)
    layer, phase = (step - 1) // PHASES, (step - 1) % PHASES
    width, norm = plan.heads * pool.head_dim, 2 * layer
    joined = width + 2 * pool.kv_heads * pool.head_dim
    if phase < PREDICTION:
        group = GROUPS * layer + KV
    elif phase < 5:
        group = GROUPS * layer + CORRECTION
    elif phase < 9:
        group = GROUPS * layer + QUERY
    elif phase < 11:
        group = GROUPS * layer + ATTENTION_OUT
    elif phase < 13:
        group, norm = GROUPS * layer + GATE_UP, norm + 1
    else:
        group = GROUPS * layer + DOWN
    if network.groups[group, 1] == 0:
        return 0
    if phase == 0 or phase == 5 or phase == 11:
        return _row_section(control, _NORM, rows, norm, group)
    if phase == 1 or phase == 6:
        return _product_section(control, network, threads, group, rows, joined, _PROJECTED)
    if phase == 2:
        return _row_section(control, _PREDICT, rows, 0, 0)
    if phase == 3:
        return _row_section(control, _RESIDUAL, rows, 0, group)
    if phase == 7:
        return _row_section(control, _ROTATE, rows, 0, 0)
    if phase == 8:
        pairs, shares, span, size = plan_attention(
            pool, rows_of.tiles, tiles, plan.heads // pool.kv_heads, threads, room, False
        )  # fmt: skip
        control[_KIND], control[_ROWS] = _ATTEND, rows
        control[_A], control[_B], control[_C], control[_D], control[_E] = pool_layer, shares, size, pairs, span
        return pairs * ((shares + span - 1) // span)
    if phase == 9:
        return _row_section(control, _QUANTISE, rows, width, group)
    if phase == 12:
        return _product_section(control, network, threads, group, rows, 2 * plan.intermediate, _PROJECTED)
    if phase == 13:
        return _row_section(control, _GATE, rows, 0, group)
    return _product_section(control, network, threads, group, rows, plan.hidden, _CHANGE)  # phases 4, 10 and 14


@njit(cache=True, nogil=True)
def run_twin(control, generation, shape, network, pool, rows_of, scratch):
    """Run some steps of the twin over the rows: the leader's part, and a helper's, as in `forward.run_pass`.

    shape = (threads, rows, tiles, first step, step behind the last, pool layer) for the leader; a helper gives no
    threads. The rows belong to one sequence and come in order of position; K and V of all earlier positions, and from
    step `PREDICTION` of a layer on those of the rows, are in layer `pool layer` of the pool.
    """
    threads, rows, tiles, step, stop, pool_layer = shape
    leader = threads > 0
    if not leader and not arrive(control, generation):
        return
    waited, items = 0, 0
    while True:
        item = np.int64(-1)
        if leader:
            if step == stop:
                return
            items = _prepare(
                control, step, threads, rows, tiles, pool_layer, network, pool, rows_of, scratch.partial.size
            )  # fmt: skip
            step += 1
            if items == 0:
                continue
            if items == 1 or threads == 1:
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
            _run_item(control, item, network, pool, rows_of, scratch)
            done += 1
            following = np.int64(done) if done < items else np.int64(-1)
            item = following if alone else take(control)
        if done > 0:
            waited = 0
            if not alone:
                finish(control, done)
        if leader:
            if not alone:
                join(control, items)
            if control[_KIND] == _ATTEND and control[_B] > 1:
                merge_shares(
                    pool, rows_of.tiles, control[_D], control[_B], control[_C],
                    network.plan.heads // pool.kv_heads, scratch.partial, scratch.partial_state, scratch.activations.x,
                    False,
                )  # fmt: skip
