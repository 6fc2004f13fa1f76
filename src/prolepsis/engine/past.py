"""The K and V of a sequence in the engine's cache, for coding them where they are."""

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import KV, from_scalars, token_count
from prolepsis.engine.runner import Runner
from prolepsis.engine.sequence import Sequence


class CachedPast:
    """A `coding.predictors.Past`: the cached tokens of `sequence`. `pool`: the runner's cache.

    Tokens that become known are cached from then on. Room that was made for others is given back by `discard_room`.
    """

    def __init__(self, runner: Runner, sequence: Sequence) -> None:
        self.pool = runner.decoder.pool_view(runner.cache)
        self._cache, self._table = runner.cache, sequence.table

    @property
    def known(self) -> int:
        """How many tokens are cached."""
        return self._table.length

    @known.setter
    def known(self, count: int) -> None:
        if count < self._table.length:
            self._table.truncate(count)
        else:
            self._table.append(count - self._table.length)

    def blocks(self, stop: int) -> NDArray[np.int32]:
        """The block table, int32 [blocks]; tokens from `known` to `stop` are in blocks that no other sequence holds.

        Raises:
            CapacityError: the cache has no room for so many. Nothing has changed.
        """
        if stop > self.known:
            self._cache.copy_blocks(self._table.prepare_write(stop - self.known))
        return self._table.blocks

    def put(self, layer: int, start: int, scalars: NDArray[np.uint16], steps: NDArray[np.uint16] | None) -> None:
        """Cache one layer of tokens that become known. Raises CapacityError as `blocks`."""
        self.blocks(start + scalars.shape[1])
        kv = from_scalars(scalars[None], None if steps is None else steps[None], self._cache.dtype)
        self._cache.write_layer(layer, self._table, start, kv)

    def append(self, kv: KV) -> None:
        """Cache further tokens, [layers, 2, tokens, kv_heads, head_dim]. Raises CapacityError as `blocks`."""
        start = self.known
        stop = start + token_count(kv)
        self.blocks(stop)
        self.known = stop
        self._cache.write(self._table, start, kv)

    def discard_room(self) -> None:
        """Give back the blocks that hold no cached token."""
        self._table.truncate(self.known)
