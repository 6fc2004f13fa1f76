"""The target's quantised twin as drafter: it reads the target's own K and V, and so has no cache and reads no prompt.

A draft's K and V go where the target's will lie: the twin writes those of the last token and of each draft behind the
cached ones, and the pass that verifies the drafts overwrites every one before it is read.

A twin pays where the target's weights have more than 4 bits. Of a model with 4 bits it is nearly the target itself: it
agrees almost always, and costs as much.
"""

from collections.abc import Sequence

from prolepsis.kernels.forward import Plan
from prolepsis.kv.cache import PagedKVCache
from prolepsis.model.decoder import Decoder
from prolepsis.speculate.drafter import Draft, Draftee
from prolepsis.speculate.rounds import Line, draft_together, in_batches
from prolepsis.speculate.twin_weights import twin_plan


class TwinDrafter:
    """Drafts for sequences of `target` that lie in `cache`.

    It has weights, threads and working memory of its own, no state of any sequence, and writes to `cache` behind the
    tokens of the sequences' tables only.
    """

    name = "twin"

    def __init__(self, target: Decoder, cache: PagedKVCache, plan: Plan | None = None) -> None:
        """`plan`: the twin's; by default `twin_plan` of the target's."""
        plan = twin_plan(target.plan) if plan is None else plan
        self._decoder = Decoder(target.config, plan, target.max_rows, target.threads)
        self._pool = self._decoder.pool_view(cache)

    def propose(self, batch: Sequence[Draftee]) -> list[Draft]:
        """See `Drafter`."""
        return in_batches(batch, self._decoder.max_rows, self._propose)

    def forget(self, key: int) -> None:
        """Nothing is remembered."""

    def _propose(self, batch: Sequence[Draftee]) -> list[Draft]:
        lines = [self._line(draftee) for draftee in batch]
        return draft_together(self._decoder, self._pool, lines)

    def _line(self, draftee: Draftee) -> Line:
        table = draftee.table
        room = min(table.capacity, self._decoder.max_positions) - table.length
        return Line(draftee, draftee.tokens[-1:], table.length, table.blocks, min(draftee.limit, room))
