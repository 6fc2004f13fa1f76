"""The decoder: a loaded model that runs rows of tokens against a paged cache."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.kernels.forward import Scratch, forward
from prolepsis.kernels.llvm import LANES
from prolepsis.kernels.paged_attention import TILE_QUERIES, KVPool, Tiles
from prolepsis.kernels.qmatmul import Activations
from prolepsis.kernels.rows import DTYPES
from prolepsis.kernels.tile import CELL, RECORD
from prolepsis.kv.cache import PagedKVCache
from prolepsis.model.config import ModelConfig
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.weights import load_plan

# Names the arithmetic: cached K and V made under another name may differ in their last bits and are not mixed.
NUMERICS = "prolepsis-1/int8x32"


class Rows(NamedTuple):
    """Tokens of one sequence to run: ids int64 [n] at positions `start`, `start` + 1, ... through its block table
    int32 [blocks]; `logits` says for which of them logits are wanted: "none", "last" or "all"."""

    tokens: NDArray[np.int64]
    start: int
    blocks: NDArray[np.int32]
    logits: str = "last"


class Decoder:
    """Runs a model. Holds its weights and working memory, and no state of any sequence: that is in the cache.

    Not for use by two threads at once. Results for a row depend on the row and its past alone (`docs/determinism.md`).
    """

    def __init__(self, file: GGUFFile, config: ModelConfig, max_positions: int, max_rows: int) -> None:
        """`max_positions`: longest sequence, in tokens; `max_rows`: most tokens in one call of `forward`.

        Raises ModelFileError for tensors that are missing or not supported.
        """
        self.config = config
        self.max_rows = max_rows
        self.plan = load_plan(file, config, max_positions)
        self._scratch = self._new_scratch(max_rows)

    def _new_scratch(self, rows: int) -> Scratch:
        config = self.config
        heads_width = config.num_heads * config.head_dim
        widest = max(config.hidden_size, config.intermediate_size, heads_width)
        joined = max(heads_width + 2 * config.num_kv_heads * config.head_dim, 2 * config.intermediate_size)

        def floats(width: int) -> NDArray[np.float32]:
            return np.empty(rows * width, np.float32)

        return Scratch(
            activations=Activations(
                x=floats(widest),
                quants=np.empty(rows * widest, np.int8),
                records=np.empty(rows * widest // CELL * RECORD, np.int32),
            ),
            stream=floats(config.hidden_size),
            change=floats(config.hidden_size),
            projected=floats(joined),
            query=floats(heads_width),
        )

    def pool_view(self, cache: PagedKVCache) -> KVPool:
        """The flat view of `cache` that the kernels take."""
        return KVPool(
            cache.k.reshape(-1),
            cache.v.reshape(-1),
            cache.k.shape[1],
            cache.num_kv_heads,
            cache.head_dim,
            cache.block_size,
            DTYPES[cache.dtype],
        )

    def forward(self, pool: KVPool, batch: Sequence[Rows]) -> NDArray[np.float32]:
        """Run the rows of several sequences, write their K and V, return the logits asked for, in order.

        Returns float32 [wanted rows, vocabulary].
        """
        starts = np.cumsum([0, *(len(rows.tokens) for rows in batch)])
        total = int(starts[-1])
        if total > self.max_rows:
            raise ValueError(f"{total} rows in one call, at most {self.max_rows}")
        wanted = [
            np.arange(stop - {"none": 0, "last": 1, "all": stop - start}[rows.logits], stop)
            for rows, start, stop in zip(batch, starts[:-1], starts[1:], strict=True)
        ]
        logit_rows = np.concatenate(wanted).astype(np.int64)
        padded = -(-self.config.vocab_size // LANES) * LANES
        logits = np.empty((len(logit_rows), padded), np.float32)
        forward(
            self.plan,
            pool,
            self._tiles(batch, starts),
            self._scratch,
            np.concatenate([rows.tokens for rows in batch]).astype(np.int64),
            np.repeat(np.arange(len(batch)), np.diff(starts)),
            np.concatenate([np.arange(rows.start, rows.start + len(rows.tokens)) for rows in batch]),
            logit_rows,
            logits,
        )
        return logits[:, : self.config.vocab_size]

    def _tiles(self, batch: Sequence[Rows], starts: NDArray[np.int64]) -> Tiles:
        step = max(1, TILE_QUERIES * self.config.num_kv_heads // self.config.num_heads)
        tables = np.zeros((len(batch), max(len(rows.blocks) for rows in batch)), np.int32)
        tiles = []
        for i, rows in enumerate(batch):
            tables[i, : len(rows.blocks)] = rows.blocks
            for first in range(0, len(rows.tokens), step):
                count = min(step, len(rows.tokens) - first)
                tiles.append((int(starts[i]) + first, count, rows.start + first, i))
        first_row, num_rows, first_position, sequence = np.array(tiles, np.int64).T.copy()
        return Tiles(first_row, num_rows, first_position, sequence, tables)
