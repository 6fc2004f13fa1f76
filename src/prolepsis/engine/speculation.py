"""Drafts for the sequences of a pass: how many, from whom, and what became of them."""

import time
from collections import OrderedDict
from collections.abc import Sequence as Many

from prolepsis.engine.completion import Delta
from prolepsis.engine.request import Request
from prolepsis.engine.runner import CHUNK, Runner
from prolepsis.engine.scheduler import Part
from prolepsis.engine.task import Task
from prolepsis.errors import ProlepsisError
from prolepsis.speculate.drafter import Draft, Draftee, Drafter
from prolepsis.speculate.length import DraftLength

MOST_HELD = 8
"""Sequences outside of any engine of which drafters keep what they know, as from turn to turn of a chat."""

NO_DRAFT = Draft([], [])


class Speculation:
    """A drafter at work for one engine. `failure` says why it has stopped, if it has."""

    def __init__(self, drafter: Drafter, tokens: int | None) -> None:
        """tokens: how many to draft each time; None finds out what pays (`speculate.length`)."""
        self.drafter = drafter
        self.failure: ProlepsisError | None = None
        self._tokens = tokens
        self._length = DraftLength()
        self._held: OrderedDict[int, None] = OrderedDict()

    def lengths(self, tasks: Many[Task], rows: int) -> list[int]:
        """How many tokens to draft for each of `tasks`, for a pass with room for so many rows more."""
        if self.failure is not None:
            return [0] * len(tasks)
        if self._tokens is None:
            return self._length.plan([task.sequences[0].number for task in tasks], rows)
        fair = min(self._tokens, rows // max(len(tasks), 1))
        return [fair] * len(tasks)

    def propose(self, parts: Many[Part]) -> list[Draft]:
        """The drafts to run with `parts`, one for each."""
        wanted = {part.task: part for part in parts if part.drafts > 0}
        if not wanted:
            return [NO_DRAFT] * len(parts)
        batch = [_draftee(part) for part in wanted.values()]
        start = time.perf_counter()
        try:
            found = self.drafter.propose(batch)
        except ProlepsisError as error:
            self.failure = type(error)(f"the drafter {self.drafter.name} failed: {error}")
            return [NO_DRAFT] * len(parts)
        self._length.observe_draft(max(len(draft.tokens) for draft in found), time.perf_counter() - start)
        drafts = dict(zip(wanted, found, strict=True))
        return [drafts.get(part.task, NO_DRAFT) for part in parts]

    def step(self, runner: Runner, request: Request) -> list[Delta]:
        """Let a request take a step alone, outside of any engine. Raises CapacityError."""
        sequence = request.sequence
        self._remember(sequence.number)
        most = min(self.lengths([request], CHUNK - 1)[0], request.most_drafts)
        if sequence.table.blocks_to_write(1 + most) > runner.cache.pool.num_writable:
            most = 0
        runner.cache.copy_blocks(sequence.table.prepare_write(1 + most))
        parts = [Part(request, sequence, 1, True, most)]
        [draft] = self.propose(parts)
        start = time.perf_counter()
        logits = runner.run([(sequence, 1, "all")], [draft.tokens])
        deltas = request.verify(logits, draft)
        self.observe(parts, [draft], [accepted(deltas, draft)], time.perf_counter() - start)
        return deltas

    def observe(self, parts: Many[Part], drafts: Many[Draft], taken: Many[int], seconds: float) -> None:
        """What became of the drafts of a pass that, without drafting, took so long."""
        for part, draft, count in zip(parts, drafts, taken, strict=True):
            if part.drafts > 0:
                self._length.observe(part.sequence.number, len(draft.tokens), count)
        if all(part.tokens == 1 for part in parts):
            self._length.observe_pass(sum(1 + len(draft.tokens) for draft in drafts), seconds)

    def forget(self, task: Task) -> None:
        """The task has ended, and its sequences with it."""
        for sequence in task.sequences:
            self._forget(sequence.number)

    def _forget(self, number: int) -> None:
        self.drafter.forget(number)
        self._length.forget(number)

    def _remember(self, number: int) -> None:
        """Keep what is known of a sequence that someone holds for as long as it is among the last few used."""
        self._held[number] = None
        self._held.move_to_end(number)
        while len(self._held) > MOST_HELD:
            self._forget(self._held.popitem(last=False)[0])


def accepted(deltas: Many[Delta], draft: Draft) -> int:
    """How many tokens of a draft are among those that were told."""
    return sum(delta.token.token == guess for delta, guess in zip(deltas, draft.tokens, strict=False))


def _draftee(part: Part) -> Draftee:
    assert isinstance(part.task, Request)
    sequence = part.sequence
    return Draftee(sequence.number, sequence.tokens, sequence.table, part.drafts, part.task.chooser)
