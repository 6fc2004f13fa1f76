"""The twin at work on one segment: a workspace, and the steps of `kernels.twin_pass` in their order."""

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.predictors import Past, Segment
from prolepsis.coding.profile import GRID
from prolepsis.coding.threads import thread_count
from prolepsis.coding.twin_network import Target
from prolepsis.kernels.forward import new_scratch
from prolepsis.kernels.paged_attention import Tiles, add_tiles
from prolepsis.kernels.team import Team
from prolepsis.kernels.twin_pass import PHASES, PREDICTION, Network, TwinRows, run_twin


class Workspace:
    """Working memory and threads for one segment of up to GRID tokens at a time.

    means, actual: float32 [2, tokens, kv_heads, head_dim], the predicted and the true K and V of the layer at hand.
    """

    def __init__(self, target: Target, threads: int | None = None) -> None:
        """threads: by default `thread_count`."""
        self._target, self.threads = target, threads or thread_count()
        plan, positions = target.plan, target.positions
        self._scratch = new_scratch(plan, target.kv_heads, target.head_dim, GRID, positions, 0)
        tokens, turned, first, count, position, sequence = np.zeros((6, GRID), np.int64)
        means, actual = np.zeros((2, GRID * target.kv_width), np.float32)
        tiles = Tiles(first, count, position, sequence, np.zeros((1, positions), np.int32))
        self._rows = TwinRows(tokens, turned, means, actual, tiles)
        self._team = Team(self.threads, _help)
        self._count = self._tiles = 0
        self._network: Network | None = None

    def begin(self, network: Network, segment: Segment, past: Past) -> None:
        """Take a segment, whose ids are known. Raises InputError for more positions than there is room for."""
        table = past.blocks(segment.start + segment.count)
        rows, group = self._rows, self._target.plan.heads // self._target.kv_heads
        assert segment.ids is not None
        rows.tokens[: segment.count] = segment.ids
        rows.positions[: segment.count] = np.arange(segment.start, segment.start + segment.count)
        rows.tiles.tables[0, : len(table)] = table[: rows.tiles.tables.shape[1]]
        self._tiles = add_tiles(rows.tiles, 0, 0, 0, segment.start, segment.count, group)
        self._count, self._network, self._pool = segment.count, network, past.pool
        self._team.bind(network, past.pool, rows, self._scratch)

    def _view(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        shape = (2, self._count, self._target.kv_heads, self._target.head_dim)
        return values[: self._count * self._target.kv_width].reshape(shape)

    @property
    def means(self) -> NDArray[np.float32]:
        """What is predicted, K turned."""
        return self._view(self._rows.means)

    @property
    def actual(self) -> NDArray[np.float32]:
        """To be filled with what is true, before `finish`."""
        return self._view(self._rows.actual)

    @property
    def hidden(self) -> NDArray[np.float32]:
        """The hidden state before the next layer, float32 [tokens, hidden]; a copy, which may be put back."""
        size = self._count * self._target.plan.hidden
        return (self._scratch.stream[:size] + self._scratch.change[:size]).reshape(self._count, -1)

    @hidden.setter
    def hidden(self, values: NDArray[np.float32]) -> None:
        self._scratch.stream[: values.size] = values.reshape(-1)
        self._scratch.change[: values.size] = 0.0

    def embed(self) -> None:
        """The hidden state of the tokens before layer 0."""
        self._run(0, 1, 0)

    def predict(self, layer: int) -> None:
        """Fill `means`."""
        first = 1 + PHASES * layer
        self._run(first, first + PREDICTION, 0)

    def finish(self, layer: int, pool_layer: int) -> None:
        """Go on to the next layer. `actual` holds what is true, and so does this layer of the past's pool."""
        first = 1 + PHASES * layer
        self._run(first + PREDICTION, first + PHASES, pool_layer)

    def _run(self, first: int, stop: int, pool_layer: int) -> None:
        shape = (self.threads, self._count, self._tiles, first, stop, pool_layer)
        try:
            self._team.begin()
            run_twin(self._team.control, 0, shape, self._network, self._pool, self._rows, self._scratch)
        finally:
            self._team.end()


def _help(control: NDArray[np.int64], generation: int, *work: object) -> None:
    run_twin(control, generation, (0, 0, 0, 0, 0, 0), *work)
