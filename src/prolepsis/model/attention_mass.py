"""Measures the attention of a pass's rows, for whoever decides what a sequence can do without."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prolepsis.kernels.attention_mass import Observed, add_mass
from prolepsis.kernels.attention_parts import UNIT
from prolepsis.kernels.forward import Plan, Scratch
from prolepsis.kernels.kv_pool import KVPool
from prolepsis.kernels.paged_attention import Tiles
from prolepsis.kernels.team import Team


class MassMeter:
    """Threads and memory to measure with. Pool and scratch stay the same as long as the tiles' arrays do."""

    def __init__(self, threads: int) -> None:
        self._team = Team(threads, _help)
        self._bound: Tiles | None = None
        self._observed: Observed | None = None

    def measure(
        self,
        pool: KVPool,
        plan: Plan,
        tiles: Tiles,
        scratch: Scratch,
        shape: tuple[int, int, int],
        seen: Sequence[int],
    ) -> NDArray[np.int64]:
        """See `Decoder.attention_mass`; shape = (sequences, rows, tiles) of the pass."""
        sequences, rows, count = shape
        observed = self._bind(pool, plan, tiles, scratch)
        observed.seen[:sequences] = seen
        mass = observed.mass.reshape(len(observed.seen), -1)[:sequences]
        mass[:] = 0
        try:
            self._team.begin()
            add_mass(self._team.control, 0, (plan.layers, count, rows), pool, tiles, observed)
        finally:
            self._team.end()
        return mass

    def _bind(self, pool: KVPool, plan: Plan, tiles: Tiles, scratch: Scratch) -> Observed:
        """The memory for a pass of these, known to the helpers."""
        if self._observed is None or self._bound is not tiles:
            sequences, blocks = tiles.tables.shape
            units = -(-blocks * pool.block_size // UNIT)
            numbers = np.zeros(sequences, np.int64), np.zeros(sequences * units, np.int64)
            self._observed = Observed(scratch.query, scratch.query_step, plan.heads // pool.kv_heads, *numbers)
            self._bound = tiles
            self._team.bind(pool, tiles, self._observed)
        return self._observed


def _help(control: NDArray[np.int64], generation: int, *work: object) -> None:
    add_mass(control, generation, (0, 0, 0), *work)
