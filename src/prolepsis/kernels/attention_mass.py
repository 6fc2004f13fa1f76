"""How much attention the rows of a pass pay to each stretch of their context, from the queries that the pass left.

The attention of a row is the softmax of its scores, as in `paged_attention`; a stretch is `UNIT` places of the block
table. Weights are counted in whole parts of `MASS`, so that their sums are the same in any order.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from prolepsis.kernels.attention_parts import UNIT, exponentiate
from prolepsis.kernels.kv_widened import is_narrow
from prolepsis.kernels.paged_attention import score
from prolepsis.kernels.team import JOB, arrive, atomic_add, finish, idle, join, publish, take

MASS = 1 << 20
"""The attention of one row in one head. Sums of 2**43 of them are exact."""

_TILES, _ROWS = JOB, JOB + 1


class Observed(NamedTuple):
    """The queries of a pass: `forward.Scratch.query` of all layers, `query_step` apart, of `group` heads for each KV
    head; seen int64 [sequences]: the first place whose row counts; mass int64 [sequences, units], both as long as
    there may be sequences."""

    query: NDArray[np.float32]
    query_step: int
    group: int
    seen: NDArray[np.int64]
    mass: NDArray[np.int64]


@njit(inline="always")
def _score_all(pool, table, base, head, query, queries, end, padded, scores, wide):
    """scores[v, place] for all places before `end`; float32 [queries, padded], flat."""
    size = pool.block_size
    for place in range(0, end, UNIT):
        then = min(place + UNIT // 2, end - 1) // (UNIT // 2) * (UNIT // 2)
        first = (base + table[place // size]) * pool.kv_heads + head
        second = (base + table[then // size]) * pool.kv_heads + head
        score(pool, (first, place % size), (second, then % size), query, queries, scores, place, padded, wide)


@njit(inline="always")
def _add_item(pool, tiles, count, rows, observed, item):
    """The attention of one tile's rows in one layer and KV head, which `item` numbers."""
    heads, dim, group = pool.kv_heads, pool.head_dim, observed.group
    layer, head, tile = item // (heads * count), item // count % heads, item % count
    place, sequence = tiles.first_position[tile], tiles.sequence[tile]
    end, queries = place + tiles.num_rows[tile], tiles.num_rows[tile] * group
    padded = (end + UNIT - 1) // UNIT * UNIT
    scores, state = np.empty(queries * padded, np.float32), np.empty(2, np.float32)
    sums = np.zeros(padded // UNIT, np.int64)
    wide = np.empty(UNIT * dim if is_narrow(pool.dtype) else 0, np.uint16)
    query = observed.query[layer * observed.query_step + (head * rows + tiles.first_row[tile]) * group * dim :]
    _score_all(
        pool, tiles.tables[sequence], layer * pool.num_blocks, head, query, queries, end, padded, scores, wide
    )  # fmt: skip
    for v in range(max(observed.seen[sequence] - place, 0) * group, queries):
        valid = place + v // group + 1
        exponentiate(scores, v * padded, valid, state, 0)
        share = np.float32(MASS) / state[1]
        for unit in range((valid + UNIT - 1) // UNIT):
            weight, start = np.float32(0.0), v * padded + unit * UNIT
            for at in range(start, start + UNIT):
                weight += scores[at]
            sums[unit] += np.int64(weight * share + np.float32(0.5))
    units = observed.mass.size // observed.seen.size
    for unit in range(sums.size):
        atomic_add(observed.mass, sequence * units + unit, sums[unit])


@njit(cache=True, nogil=True)
def add_mass(control, generation, shape, pool, tiles, observed):
    """Add to observed.mass what the last pass's rows paid: the leader's part, and a helper's.

    shape = (layers, tiles, rows) for the leader; a helper gives no layers, and stays as `team.idle` says.
    """
    layers, count, rows = shape
    leader, items = layers > 0, layers * count * pool.kv_heads
    if leader:
        control[_TILES], control[_ROWS] = count, rows
        publish(control, items)
    elif not arrive(control, generation):
        return
    waited = 0
    while leader or idle(control, waited):
        waited += 1
        done, item = 0, take(control)
        while item >= 0:
            _add_item(pool, tiles, control[_TILES], control[_ROWS], observed, item)
            done, item = done + 1, take(control)
        if done > 0:
            waited = 0
            finish(control, done)
        if leader:
            join(control, items)
            return
