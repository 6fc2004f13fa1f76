"""Dropping K and V that receive little attention, so that a sequence holds a bounded number of tokens. Lossy.

Heavy hitters (H2O, Zhang et al. 2023, arXiv:2306.14048): the most recent tokens stay, and of the others those to which
most attention was paid. Other than in the paper, attention fades in the course of as many tokens as are held, and whole
units of tokens stay or go, the same ones in all layers and heads: so that blocks are freed, and kernels are as ever.
"""

import math
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError, IntegrityError
from prolepsis.kv.block_pool import BlockPool
from prolepsis.kv.block_table import BlockTable

UNIT = 32
"""Tokens that stay or go together: whole blocks, whatever their size, so that this does not show in what is dropped."""

LEAST_UNITS = 4
_HEAVY_HITTERS = "h2o:"
_MOST_DIGITS = 12


class Eviction(NamedTuple):
    """budget: the most tokens a sequence holds; recent: how many of them stay because they are the last. Multiples of
    `UNIT`."""

    budget: int
    recent: int

    @classmethod
    def named(cls, text: str, context: int) -> Self:
        """The policy "h2o:512", of so many tokens, or "h2o:20%", of so much of `context`, rounded down to units.

        Raises InputError for anything else, and for fewer than `LEAST_UNITS` units.
        """
        number = text.removeprefix(_HEAVY_HITTERS) if isinstance(text, str) else ""
        digits = number.removesuffix("%")
        if not (number != text and digits.isascii() and digits.replace(".", "", 1).isdecimal()):
            raise InputError(f"kv_evict must be none, or tokens or a share such as h2o:512 or h2o:20%, not {text!r}")
        budget = float(digits[:_MOST_DIGITS]) * (context / 100 if number != digits else 1)
        budget = min(math.floor(budget), context + UNIT - 1) // UNIT * UNIT
        if budget < LEAST_UNITS * UNIT:
            raise InputError(
                f"kv_evict {text!r} leaves {budget} of {context} tokens; it takes {LEAST_UNITS * UNIT} at least"
            )
        return cls(budget, budget // (2 * UNIT) * UNIT)


class EvictingTable(BlockTable):
    """The blocks of a sequence of which units are dropped when it holds `policy.budget` tokens: one each time.

    So what is held at any length is a function of the tokens alone, if no more than `room` are run at once and their
    attention is told to `observe`. A table that is cut to fewer tokens than that can be said of starts from nothing.
    """

    def __init__(self, pool: BlockPool, block_size: int, policy: Eviction) -> None:
        """Blocks of a size that divides `UNIT`."""
        super().__init__(pool, block_size)
        self.policy = policy
        self._mass = np.zeros(policy.budget // UNIT, np.int64)  # attention received, of each unit held
        self._observed = 0  # tokens whose own attention is in it
        self._settled = 0  # tokens there were when a unit was dropped last

    @property
    def room(self) -> int:
        """See `BlockTable`."""
        return self.policy.budget - self.held

    @property
    def first_unseen(self) -> int:
        """The place of the first token whose attention `observe` does not know."""
        return self._observed - self.evicted

    def observe(self, mass: NDArray[np.int64]) -> int:
        """Tokens from `first_unseen` to the last paid attention int64 [units] to what is held; returns how many tokens
        are dropped for it."""
        self._mass[: len(mass)] += mass[: len(self._mass)]
        self._observed = max(self._observed, self.length)
        if self.room > 0:
            return 0
        self._drop(int(np.argmin(self._mass[: -(self.policy.recent // UNIT)])))
        # What a unit got long ago fades: by the mere sum, old units stay for having been there longest.
        self._mass -= self._mass // len(self._mass)
        self._settled = self.length
        return UNIT

    def _drop(self, unit: int) -> None:
        blocks = UNIT // self.block_size
        first, last = unit * blocks, (unit + 1) * blocks
        for block in self._entries[first:last].tolist():
            self.pool.release(block)
        self._entries[first : self._num_blocks - blocks] = self._entries[last : self._num_blocks]
        self._num_blocks -= blocks
        self._length -= UNIT
        self.evicted += UNIT
        self._mass[unit:-1] = self._mass[unit + 1 :]
        self._mass[-1] = 0

    def blocks_to_write(self, n_tokens: int) -> int:
        """See `BlockTable`. However many tokens are to come, a unit is dropped before the next needs more blocks."""
        return super().blocks_to_write(min(n_tokens, self.room))

    def append(self, n_tokens: int) -> None:
        """See `BlockTable`. IntegrityError for more than `room`."""
        if n_tokens > self.room:
            raise IntegrityError(f"{n_tokens} tokens at once for a table with room for {self.room}")
        super().append(n_tokens)

    def truncate(self, length: int) -> None:
        """See `BlockTable`. The same tokens are to be run again; if any was dropped since, all of them."""
        super().truncate(length if length >= self._settled else self.evicted)
        if length == 0 or length < self._settled:
            self.evicted = self._observed = self._settled = 0
            self._mass[:] = 0

    def rewind(self, length: int) -> None:
        """See `BlockTable`. Attention of others cannot be taken back, so all tokens are run again."""
        self.truncate(length if length >= self._observed else 0)

    def require_range(self, start: int, stop: int) -> None:
        """See `BlockTable`. IndexError too where places are not positions any more."""
        super().require_range(start, stop)
        if self.evicted and start < stop:
            raise IndexError(
                f"{self.evicted} of {self.length} tokens were evicted: what is left cannot be read by position"
            )

    def fork(self) -> Self:
        """See `BlockTable`."""
        twin = super().fork()
        twin.evicted, twin._observed, twin._settled = self.evicted, self._observed, self._settled
        twin._mass[:] = self._mass
        return twin

    def _new(self) -> Self:
        return type(self)(self.pool, self.block_size, self.policy)
