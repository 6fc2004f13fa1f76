"""One pass of the decoder over some rows, as a single compiled call: prefill chunks, decode steps and mixtures alike.

A row is one token of one sequence. Every step works on each row by itself or, in attention, on the row's own past in
its paged cache; rows are only ever grouped to share the reading of weights and of K, V.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from prolepsis.kernels.paged_attention import KVPool, attend
from prolepsis.kernels.qmatmul import Activations, Weights, multiply, quantise, unpack_row
from prolepsis.kernels.rows import add_row, gate_row, norm_row, rotate_head, store_head

# Rows of `Plan.groups` for each layer: products that share an input.
QKV, ATTENTION_OUT, GATE_UP, DOWN = range(4)
_SERIAL_ROWS = 4  # up to this many rows, waking a second thread costs more than it saves


class Plan(NamedTuple):
    """The shape of a model.

    groups int64 [layers * 4, 2]: first matrix and number of matrices of each product; norms float32 [2 * layers + 1,
    hidden], flat: before attention and before the MLP of each layer, then the last; cos, sin float32
    [max_positions, rotary_dim / 2], flat.
    """

    weights: Weights
    groups: NDArray[np.int64]
    norms: NDArray[np.float32]
    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    embedding: int
    head: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    rotary_dim: int
    eps: np.float32
    score_scale: np.float32


class Scratch(NamedTuple):
    """Working memory for some rows (`model.decoder` sizes it), flat float32 but for the quantised activations."""

    activations: Activations
    stream: NDArray[np.float32]
    change: NDArray[np.float32]
    projected: NDArray[np.float32]
    query: NDArray[np.float32]


@njit(cache=True)
def _norm(gains, hidden, eps, stream, change, activations, row, source):
    """Adds the last change to a row of the residual stream; activations[row] = its norm, quantised."""
    add_row(stream, source * hidden, hidden, change, source * hidden)
    norm_row(stream, source * hidden, hidden, gains, 0, eps, activations.x, row * hidden)
    quantise(activations, row, hidden)


@njit(inline="always")
def _norm_rows(plan, scratch, rows, norm):
    gains = plan.norms[norm * plan.hidden : (norm + 1) * plan.hidden]
    if rows > _SERIAL_ROWS:
        _norm_parallel(gains, plan.hidden, plan.eps, scratch.stream, scratch.change, scratch.activations, rows)
        return
    for row in range(rows):
        _norm(gains, plan.hidden, plan.eps, scratch.stream, scratch.change, scratch.activations, row, row)


@njit(cache=True, parallel=True)
def _norm_parallel(gains, hidden, eps, stream, change, activations, rows):
    x, quants, records = activations
    for i in prange(rows):
        row = np.int64(i)
        _norm(gains, hidden, eps, stream, change, Activations(x, quants, records), row, row)


@njit(cache=True)
def _rotate(pool, tables, layer, cos, sin, rotary, scale, projected, query, heads, rows, row, sequence, position):
    """Rotate a row's queries and keys, and put its keys and values into their slot.

    projected float32 [rows, heads + 2 kv_heads, head_dim]; query float32 [kv_heads, rows, group, head_dim]; both flat.
    """
    dim, kv_heads, size = pool.head_dim, pool.kv_heads, pool.block_size
    group = heads // kv_heads
    base, angle = row * (heads + 2 * kv_heads) * dim, position * (rotary // 2)
    for h in range(heads):
        to = (((h // group) * rows + row) * group + h % group) * dim
        rotate_head(projected, base + h * dim, rotary, dim, cos, sin, angle, scale, query, to)
    block = layer * pool.num_blocks + tables[sequence, position // size]
    inside = position % size
    turned, bits = np.empty(dim, np.float32), np.empty(dim, np.uint16)
    for h in range(kv_heads):
        key = base + (heads + h) * dim
        rotate_head(projected, key, rotary, dim, cos, sin, angle, np.float32(1.0), turned, 0)
        store_head(pool.dtype, turned, 0, dim, bits, 0)
        at = (block * kv_heads + h) * dim * size
        for d in range(dim):
            pool.k[at + d * size + inside] = bits[d]
        store_head(pool.dtype, projected, key + kv_heads * dim, dim, pool.v, at + inside * dim)


@njit(inline="always")
def _rotate_rows(plan, pool, tables, scratch, layer, rows, sequences, positions):
    if rows > _SERIAL_ROWS:
        _rotate_parallel(
            pool, tables, layer, plan.cos, plan.sin, plan.rotary_dim, plan.score_scale, scratch.projected,
            scratch.query, plan.heads, rows, sequences, positions,
        )  # fmt: skip
        return
    for row in range(rows):
        _rotate(
            pool, tables, layer, plan.cos, plan.sin, plan.rotary_dim, plan.score_scale, scratch.projected,
            scratch.query, plan.heads, rows, row, sequences[row], positions[row],
        )  # fmt: skip


@njit(cache=True, parallel=True)
def _rotate_parallel(
    pool, tables, layer, cos, sin, rotary, scale, projected, query, heads, rows, sequences, positions
):  # fmt: skip
    k, v, num_blocks, kv_heads, dim, block_size, dtype = pool
    for i in prange(rows):
        row = np.int64(i)
        _rotate(
            KVPool(k, v, num_blocks, kv_heads, dim, block_size, dtype), tables, layer, cos, sin, rotary, scale,
            projected, query, heads, rows, row, sequences[row], positions[row],
        )  # fmt: skip


@njit(cache=True)
def _gate(activations, projected, width, row):
    gate_row(projected, row * 2 * width, row * 2 * width + width, width, activations.x, row * width)
    quantise(activations, row, width)


@njit(inline="always")
def _gate_rows(activations, projected, width, rows):
    if rows > _SERIAL_ROWS:
        _gate_parallel(activations, projected, width, rows)
        return
    for row in range(rows):
        _gate(activations, projected, width, row)


@njit(cache=True, parallel=True)
def _gate_parallel(activations, projected, width, rows):
    x, quants, records = activations
    for i in prange(rows):
        row = np.int64(i)
        _gate(Activations(x, quants, records), projected, width, row)


@njit(inline="always")
def _quantise_rows(activations, width, rows):
    if rows > _SERIAL_ROWS:
        _quantise_parallel(activations, width, rows)
        return
    for row in range(rows):
        quantise(activations, row, width)


@njit(cache=True, parallel=True)
def _quantise_parallel(activations, width, rows):
    x, quants, records = activations
    for i in prange(rows):
        row = np.int64(i)
        quantise(Activations(x, quants, records), row, width)


@njit(inline="always")
def _product(plan, scratch, layer, group, rows, out, stride):
    first, count = plan.groups[4 * layer + group, 0], plan.groups[4 * layer + group, 1]
    multiply(plan.weights, first, count, scratch.activations, rows, out, stride)


@njit(inline="always")
def _layer(plan, pool, tiles, scratch, layer, rows, sequences, positions):
    width, dim = plan.heads * pool.head_dim, pool.head_dim
    _norm_rows(plan, scratch, rows, 2 * layer)
    _product(plan, scratch, layer, QKV, rows, scratch.projected, width + 2 * pool.kv_heads * dim)
    _rotate_rows(plan, pool, tiles.tables, scratch, layer, rows, sequences, positions)
    attend(pool, tiles, layer, plan.heads // pool.kv_heads, scratch.query[: rows * width], scratch.activations.x)
    _quantise_rows(scratch.activations, width, rows)
    _product(plan, scratch, layer, ATTENTION_OUT, rows, scratch.change, plan.hidden)
    _norm_rows(plan, scratch, rows, 2 * layer + 1)
    _product(plan, scratch, layer, GATE_UP, rows, scratch.projected, 2 * plan.intermediate)
    _gate_rows(scratch.activations, scratch.projected, plan.intermediate, rows)
    _product(plan, scratch, layer, DOWN, rows, scratch.change, plan.hidden)


@njit(cache=True, nogil=True)
def forward(plan, pool, tiles, scratch, tokens, sequences, positions, logit_rows, logits):
    """Run the decoder over `rows` tokens, write their K and V, and the logits of some of them.

    tokens, sequences, positions int64 [rows]: token id, row of `tiles.tables`, absolute position. Rows that belong to
    one sequence come in order of position, and every earlier position is in the cache or among the rows.
    logit_rows int64 [n]: ascending; logits float32 [n, padded vocabulary], written.
    """
    rows = tokens.size
    scratch.change[: rows * plan.hidden] = 0.0
    for row in range(rows):
        unpack_row(plan.weights, plan.embedding, tokens[row], scratch.stream, row * plan.hidden)
    for layer in range(plan.layers):
        _layer(plan, pool, tiles, scratch, layer, rows, sequences, positions)
    if logit_rows.size == 0:
        return
    gains = plan.norms[2 * plan.layers * plan.hidden :]
    for i in range(logit_rows.size):
        _norm(gains, plan.hidden, plan.eps, scratch.stream, scratch.change, scratch.activations, i, logit_rows[i])
    multiply(
        plan.weights, plan.head, np.int64(1), scratch.activations, logit_rows.size, logits.reshape(-1), logits.shape[1]
    )
