"""A round of drafting with a decoder: one token after the other, all sequences together."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.kernels.kv_pool import KVPool
from prolepsis.model.decoder import Decoder, Rows
from prolepsis.speculate.drafter import Draft, Draftee


class Line(NamedTuple):
    """A sequence in a round. pending: the tokens to run before the first draft, at positions from `start` on; blocks:
    where K and V lie, with room for them and for all drafts but the last; limit: drafts to make, none if below 1."""

    draftee: Draftee
    pending: Sequence[int]
    start: int
    blocks: NDArray[np.int32]
    limit: int


def draft_together(decoder: Decoder, pool: KVPool, lines: Sequence[Line]) -> list[Draft]:
    """`limit` drafts for each line, in as many passes as the largest limit says.

    K and V of all but the last draft are written. The lines' pending tokens are at most `decoder.max_rows` in all.
    """
    drafts = [Draft([], []) for _ in lines]
    running = [index for index, line in enumerate(lines) if line.limit > 0]
    rows = [Rows(np.array(lines[i].pending, np.int64), lines[i].start, lines[i].blocks) for i in running]
    while running:
        logits = decoder.forward(pool, rows)
        for row, index in enumerate(running):
            choice = lines[index].draftee.chooser.choose(logits[row])
            drafts[index].tokens.append(choice.token)
            drafts[index].probabilities.append(choice.probabilities)
        running = [index for index in running if len(drafts[index].tokens) < lines[index].limit]
        rows = [_next_row(lines[index], drafts[index].tokens) for index in running]
    return drafts


def in_batches(batch: Sequence[Draftee], size: int, propose: Callable[[Sequence[Draftee]], list[Draft]]) -> list[Draft]:
    """`propose` for at most `size` sequences at a time."""
    drafts: list[Draft] = []
    for first in range(0, len(batch), size):
        drafts += propose(batch[first : first + size])
    return drafts


def _next_row(line: Line, drafted: list[int]) -> Rows:
    position = line.start + len(line.pending) + len(drafted) - 1
    return Rows(np.array(drafted[-1:], np.int64), position, line.blocks)
