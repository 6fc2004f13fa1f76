"""The decoder: a loaded model that runs rows of tokens against a paged cache."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from prolepsis.kernels.attention_parts import PART
from prolepsis.kernels.forward import Batch, Plan, new_scratch, run_pass
from prolepsis.kernels.kv_pool import KVPool
from prolepsis.kernels.llvm import LANES
from prolepsis.kernels.paged_attention import Tiles, add_tiles
from prolepsis.kernels.products import need
from prolepsis.kernels.qmatmul import KIND
from prolepsis.kernels.rows import DTYPES
from prolepsis.kernels.team import Team, default_threads
from prolepsis.kernels.unpacking import unpack_rows
from prolepsis.kv.cache import PagedKVCache
from prolepsis.model.attention_mass import MassMeter
from prolepsis.model.config import ModelConfig
from prolepsis.model.weights import Source, load_plan

PRECISIONS = {"high": "prolepsis-1/int16x32", "fast": "prolepsis-1/int8x32-bf16"}
"""How activations are rounded on their way into a product: to 16 bits, or to 8 as most engines do, with a scale for
each 32. The names of the arithmetic: K and V made under another name may differ, and are not mixed with these."""


def precision_of(numerics: str) -> str:
    """The precision that computes with the named arithmetic; "high" for a name that is not known."""
    return next((precision for precision, name in PRECISIONS.items() if name == numerics), "high")


class Rows(NamedTuple):
    """Tokens of one sequence to run: ids int64 [n] at positions `start`, `start` + 1, ... through its block table
    int32 [blocks]; `logits` says for which of them logits are wanted: "none", "last" or "all"; `evicted`: how many of
    the tokens before have no place in the blocks any more."""

    tokens: NDArray[np.int64]
    start: int
    blocks: NDArray[np.int32]
    logits: str = "last"
    evicted: int = 0


class Decoder:
    """Runs a model. Holds its weights, threads and working memory, and no state of any sequence: that is in the cache.

    Not for use by two threads at once. Results for a row depend on the row and its past alone (`docs/determinism.md`).
    """

    def __init__(
        self, config: ModelConfig, plan: Plan, max_rows: int, threads: int | None = None, keep_queries: bool = False
    ) -> None:
        """`plan` has angles for the longest sequence; `max_rows`: most tokens in one call of `forward`; `threads`: by
        default one for each core; `keep_queries`: for `attention_mass`.
        """
        self.config = config
        self.plan = plan
        self.max_rows = max_rows
        self.max_positions = len(plan.cos) // (plan.rotary_dim // 2)
        """Longest sequence, in tokens."""
        self.threads = threads or default_threads()
        self.numerics = PRECISIONS["fast" if plan.fast else "high"]
        """Names the arithmetic."""
        self._scratch = new_scratch(
            plan, config.num_kv_heads, config.head_dim, max_rows, self.max_positions, config.vocab_size,
            keep_queries,
        )  # fmt: skip
        self._team = Team(self.threads, _help)
        self._pool: KVPool | None = None
        self._batch: Batch | None = None
        self._meter = MassMeter(self.threads) if keep_queries else None
        self._shape = (0, 0, 0)

    @classmethod
    def load(
        cls,
        source: Source,
        config: ModelConfig,
        max_positions: int,
        max_rows: int,
        threads: int | None = None,
        precision: str = "high",
        keep_queries: bool = False,
    ) -> Self:
        """A decoder of the weights of `source`, for sequences of up to `max_positions` tokens; `precision`: one of
        `PRECISIONS`.

        Raises ModelFileError for tensors that are missing or not supported.
        """
        plan = load_plan(source, config, max_positions, precision == "fast")
        return cls(config, plan, max_rows, threads, keep_queries)

    def pool_view(self, cache: PagedKVCache) -> KVPool:
        """The flat view of `cache` that the kernels take."""
        return KVPool(
            cache.k.reshape(-1).view(np.uint16),
            cache.v.reshape(-1).view(np.uint16),
            cache.k_steps.reshape(-1),
            cache.v_steps.reshape(-1),
            cache.k.shape[1],
            cache.num_kv_heads,
            cache.head_dim,
            cache.block_size,
            DTYPES[cache.dtype],
            cache.recent_k.reshape(-1),
            cache.recent_v.reshape(-1),
            cache.pool.recent,
            cache.num_recent,
        )

    def embedding_rows(self, ids: NDArray[np.uint32]) -> NDArray[np.float32]:
        """The token embedding's rows of `ids`, which must be within the vocabulary: float32 [tokens, hidden]."""
        out = np.empty((len(ids), self.plan.hidden), np.float32)
        unpack_rows(self.plan.weights, self.plan.embedding, np.asarray(ids, np.int64), out)
        return out

    def forward(self, pool: KVPool, batch: Sequence[Rows]) -> NDArray[np.float32]:
        """Run the rows of several sequences, write their K and V, return the logits asked for, in order.

        Returns float32 [wanted rows, vocabulary], a view that is valid until the next call.
        """
        total = sum(len(rows.tokens) for rows in batch)
        if total > self.max_rows:
            raise ValueError(f"{total} rows in one call, at most {self.max_rows}")
        arrays = self._bound_batch(pool)
        tiles, wanted = self._fill(arrays, batch, cut=PART if pool.recent.size else self.max_positions)
        self._shape = (len(batch), total, tiles)
        try:
            self._team.begin()
            shape = (self.threads, total, tiles, wanted)
            run_pass(self._team.control, 0, shape, self.plan, pool, arrays, self._scratch)
        finally:
            self._team.end()
        padded = -(-self.config.vocab_size // LANES) * LANES
        logits = self._scratch.logits[: wanted * padded].reshape(wanted, padded)
        return logits[:, : self.config.vocab_size]

    def attention_mass(self, seen: Sequence[int]) -> NDArray[np.int64]:
        """Attention that the rows of the last pass paid to each `UNIT` of the places in their sequence's blocks.

        seen: for each sequence of that pass, a place; only rows at it or behind count. Returns int64 [sequences, units]
        in parts of `MASS`, summed over rows, layers and heads: a view that is valid until the next call. Only for a
        decoder that keeps queries.
        """
        if self._meter is None or self._pool is None or self._batch is None:
            raise ValueError("no pass with kept queries")
        return self._meter.measure(self._pool, self.plan, self._batch.tiles, self._scratch, self._shape, seen)

    def _bound_batch(self, pool: KVPool) -> Batch:
        """The arrays that describe a pass over `pool`, known to the helpers together with it."""
        if self._batch is None or self._pool is not pool:
            need(self.plan.weights.matrices[:, KIND], self.plan.fast)
            batch = _new_batch(self.max_rows, -(-self.max_positions // pool.block_size))
            self._team.bind(self.plan, pool, batch, self._scratch)
            self._batch, self._pool = batch, pool
        return self._batch

    def _fill(self, arrays: Batch, batch: Sequence[Rows], cut: int) -> tuple[int, int]:
        """Describe `batch` in `arrays`; returns the numbers of tiles, which end at the multiples of `cut`, and of rows
        whose logits are wanted."""
        row, tile, wanted = 0, 0, 0
        group = self.config.num_heads // self.config.num_kv_heads
        for sequence, rows in enumerate(batch):
            count = len(rows.tokens)
            arrays.tokens[row : row + count] = rows.tokens
            arrays.sequences[row : row + count] = sequence
            arrays.positions[row : row + count] = np.arange(rows.start, rows.start + count)
            slot = rows.start - rows.evicted
            arrays.slots[row : row + count] = np.arange(slot, slot + count)
            used = rows.blocks[: arrays.tiles.tables.shape[1]]
            arrays.tiles.tables[sequence, : len(used)] = used
            first = 0
            while first < count:
                some = min(cut - (slot + first) % cut, count - first)
                tile = add_tiles(arrays.tiles, tile, sequence, row + first, slot + first, some, group, self.plan.fast)
                first += some
            logits = {"none": 0, "last": 1, "all": count}[rows.logits]
            arrays.logit_rows[wanted : wanted + logits] = np.arange(row + count - logits, row + count)
            wanted += logits
            row += count
        return tile, wanted


def _help(control: NDArray[np.int64], generation: int, *work: object) -> None:
    run_pass(control, generation, (0, 0, 0, 0), *work)


def _new_batch(rows: int, blocks: int) -> Batch:
    def numbers() -> NDArray[np.int64]:
        return np.zeros(rows, np.int64)

    tiles = Tiles(numbers(), numbers(), numbers(), numbers(), np.zeros((rows, blocks), np.int32))
    return Batch(numbers(), numbers(), numbers(), numbers(), numbers(), tiles)
