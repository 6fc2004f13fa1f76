"""What every drafter is: something that continues sequences, at a guess."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from prolepsis.kv.block_table import BlockTable


class Choice(NamedTuple):
    """A token drawn from a drafter's logits, and the distribution it was drawn from: float64 [vocab], or None where
    the target will be asked for this very token (`acceptance`)."""

    token: int
    probabilities: NDArray[np.float64] | None


class Chooser(Protocol):
    """Draws the drafts of one sequence in one round, in order, from a drafter's logits.

    It applies the request's temperature, penalties and so on, as the target's sampler will.
    """

    def choose(self, logits: NDArray[np.float32]) -> Choice:
        """The next draft, from float32 logits [vocab]."""


class Draftee(NamedTuple):
    """A sequence that is to be continued. key: names it for as long as it lives. tokens: all it has; K and V of all but
    the last are in the target's cache, through `table`, which has room for 1 + `limit` more that no one else sees.
    limit: most tokens to draft."""

    key: int
    tokens: Sequence[int]
    table: BlockTable
    limit: int
    chooser: Chooser


class Draft(NamedTuple):
    """Tokens that may follow, and the distribution that each was drawn from (`Choice`): one entry for each token, or
    none at all."""

    tokens: list[int]
    probabilities: list[NDArray[np.float64] | None]


class Drafter(Protocol):
    """Continues sequences. Whatever it drafts, the output stays right; a good guess only makes it come sooner."""

    name: str
    """What it is called in reports."""

    def propose(self, batch: Sequence[Draftee]) -> list[Draft]:
        """A draft for each sequence: `limit` tokens, or fewer, or none."""

    def forget(self, key: int) -> None:
        """The sequence has ended, or another one may come to have its key. Unknown keys are fine."""
