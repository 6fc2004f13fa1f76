"""Another, smaller model as drafter: any whose tokens are those of the target.

Its K and V have a paged cache of their own, in which each sequence keeps what was run for it: a round rolls back to
where the tokens that came and those that were drafted part, and runs what is new.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prolepsis.errors import CapacityError, InputError
from prolepsis.kv.block_table import BlockTable
from prolepsis.kv.cache import PagedKVCache
from prolepsis.model.decoder import Decoder, Rows
from prolepsis.model.model_file import ModelFile, open_model
from prolepsis.speculate.drafter import Draft, Draftee
from prolepsis.speculate.rounds import Line, draft_together, in_batches

_MAX_ROWS = 256  # tokens of prompts run at once
_BLOCK = 32  # tokens
_STRIDE = 64  # tokens compared at once


@dataclass
class _Reading:
    """What was run for one sequence: K and V of all of `tokens` are in the table."""

    tokens: list[int]
    table: BlockTable

    def roll_back(self, tokens: Sequence[int]) -> None:
        """Keep what `tokens` begin with."""
        same = _common(self.tokens, tokens)
        del self.tokens[same:]
        self.table.truncate(same)

    def count(self, tokens: Sequence[int]) -> None:
        """These were run."""
        self.tokens += tokens
        self.table.append(len(tokens))


class ModelDrafter:
    """Drafts with another model.

    Of a sequence that the cache has no room for, or that is longer than the model's context, nothing is drafted.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: ModelFile,
        *,
        memory: int,
        max_context: int,
        threads: int | None = None,
        precision: str = "fast",
    ) -> None:
        """memory: bytes for K and V; max_context: longest sequence of the target, in tokens; precision: as of
        `Decoder`, for drafts do not have to be exact.

        Raises InputError for a file that cannot be read, for one of other tokens than `target`'s, and for `memory`
        that holds no block.
        """
        file = open_model(path)
        self.name = f"model:{path}"
        config = file.config
        require_same_tokens(file, target)
        longest = min(max_context, config.max_context)
        self._decoder = Decoder.load(file, config, longest, _MAX_ROWS, threads, precision)
        shape = (config.num_layers, config.num_kv_heads, config.head_dim, _BLOCK)
        self._cache = PagedKVCache(*shape, PagedKVCache.num_blocks_for(memory, *shape))
        self._pool = self._decoder.pool_view(self._cache)
        self._readings: OrderedDict[int, _Reading] = OrderedDict()  # used longest ago first

    def propose(self, batch: Sequence[Draftee]) -> list[Draft]:
        """See `Drafter`."""
        return in_batches(batch, _MAX_ROWS, self._propose)

    def forget(self, key: int) -> None:
        """See `Drafter`."""
        reading = self._readings.pop(key, None)
        if reading is not None:
            reading.table.release()

    def _propose(self, batch: Sequence[Draftee]) -> list[Draft]:
        keys = {draftee.key for draftee in batch}
        limits = [self._prepare(draftee, keys) for draftee in batch]
        able = {draftee.key: draftee for draftee, limit in zip(batch, limits, strict=True) if limit > 0}
        ready = self._catch_up(list(able.values()))
        limits = [limit if draftee.key in ready else 0 for draftee, limit in zip(batch, limits, strict=True)]
        lines = [self._line(draftee, limit) for draftee, limit in zip(batch, limits, strict=True) if limit > 0]
        made = iter(draft_together(self._decoder, self._pool, lines))
        drafts = [next(made) if limit > 0 else Draft([], []) for limit in limits]
        for draftee, draft in zip(batch, drafts, strict=True):
            if draft.tokens:
                self._readings[draftee.key].count([*self._pending(draftee), *draft.tokens[:-1]])
        return drafts

    def _prepare(self, draftee: Draftee, keys: set[int]) -> int:
        """Roll its reading back to what still holds, and make room; returns how many tokens can be drafted.

        keys: sequences whose readings are not given up for it.
        """
        limit = min(draftee.limit, self._decoder.max_positions + 1 - len(draftee.tokens))
        if limit < 1:
            return 0
        reading = self._readings.setdefault(draftee.key, _Reading([], self._cache.new_table()))
        self._readings.move_to_end(draftee.key)
        reading.roll_back(draftee.tokens[:-1])
        if self._reserve(reading.table, len(draftee.tokens) - 1 + limit, keys):
            return limit
        self.forget(draftee.key)
        return 0

    def _reserve(self, table: BlockTable, length: int, keys: set[int]) -> bool:
        """Room for `length` tokens, if need be at the cost of sequences that were not continued for longest."""
        others = (key for key in list(self._readings) if key not in keys)
        while True:
            try:
                table.reserve(length - table.length)
                return True
            except CapacityError:
                other = next(others, None)
                if other is None:
                    return False
                self.forget(other)

    def _catch_up(self, batch: Sequence[Draftee]) -> set[int]:
        """Run a pass of what is pending where it is too much for one; returns the keys of those that can go on.

        The others have more to read, and go on in a later round: one pass is the longest pause for those that generate.
        """
        if sum(len(self._pending(draftee)) for draftee in batch) > _MAX_ROWS:
            room, parts = _MAX_ROWS, []
            for draftee in sorted(batch, key=lambda draftee: len(self._pending(draftee))):
                tokens = self._pending(draftee)[:-1][:room]
                if tokens:
                    parts.append((self._readings[draftee.key], tokens))
                    room -= len(tokens)
            rows = [
                Rows(np.array(tokens, np.int64), reading.table.length, reading.table.blocks, "none")
                for reading, tokens in parts
            ]
            self._decoder.forward(self._pool, rows)
            for reading, tokens in parts:
                reading.count(tokens)
        room, ready = _MAX_ROWS, set()
        for draftee in sorted(batch, key=lambda draftee: len(self._pending(draftee))):
            room -= len(self._pending(draftee))
            if room >= 0:
                ready.add(draftee.key)
        return ready

    def _pending(self, draftee: Draftee) -> Sequence[int]:
        return draftee.tokens[len(self._readings[draftee.key].tokens) :]

    def _line(self, draftee: Draftee, limit: int) -> Line:
        table = self._readings[draftee.key].table
        return Line(draftee, self._pending(draftee), table.length, table.blocks, limit)


def require_same_tokens(file: ModelFile, target: ModelFile) -> None:
    """Raise InputError, which names both files and the first difference, unless their token ids mean the same.

    Where one of them has no tokenizer, only the sizes of the vocabularies can be compared.
    """
    ours, theirs = file.config.vocab_size, target.config.vocab_size
    one, other = file.token_table, target.token_table
    # What only one of two formats says is no difference.
    shared = [key for key in one if key in other]
    difference = next((_told(key, one[key], other[key]) for key in shared if one[key] != other[key]), None)
    if difference is None and ours != theirs:
        difference = f"it knows {ours} tokens and the other {theirs}"
    if difference is not None:
        raise InputError(
            f"{file.path} cannot draft for {target.path}, since their tokenizers are not the same: {difference}"
        )


def _told(key: str, ours: Any, theirs: Any) -> str:
    """The first difference of two unequal values of a metadata key."""
    if not (isinstance(ours, list) and isinstance(theirs, list)):
        return f"{key} is {_short(ours)} there and {_short(theirs)} here"
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return f"entry {index} of {key} is {_short(one)} there and {_short(other)} here"
    return f"{key} has {len(ours)} entries there and {len(theirs)} here"


def _short(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else "missing" if value is None else repr(value)[:80]


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens both begin with."""
    at, end = 0, min(len(ours), len(theirs))
    while at < end and ours[at : at + _STRIDE] == theirs[at : at + _STRIDE]:
        at += _STRIDE
    while at < end and ours[at] == theirs[at]:
        at += 1
    return min(at, end)
