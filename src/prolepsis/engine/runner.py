"""Runs sequences through the decoder against the paged cache."""

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from prolepsis.engine.sequence import Sequence
from prolepsis.kv.cache import PagedKVCache
from prolepsis.kv.eviction import EvictingTable, Eviction
from prolepsis.model.decoder import Decoder, Rows

CHUNK = 256  # tokens of a prompt run at once; chunks end at multiples of this

Progress = Callable[[int, int], None]


class Runner:
    """A decoder and the cache its sequences share. Not for use by two threads at once."""

    def __init__(self, decoder: Decoder, cache: PagedKVCache, eviction: Eviction | None = None) -> None:
        """`eviction`: what sequences drop, with a decoder that keeps queries; None: nothing."""
        self.decoder = decoder
        self.cache = cache
        self.eviction = eviction
        self.evicted_tokens = 0
        """Tokens that were dropped so far."""
        self._pool = decoder.pool_view(cache)

    def new_sequence(self, tokens: Many[int] = ()) -> Sequence:
        """A sequence that holds no blocks yet."""
        if self.eviction is None:
            return Sequence(self.cache.new_table(), tokens)
        return Sequence(EvictingTable(self.cache.pool, self.cache.block_size, self.eviction), tokens)

    def prefill(self, sequence: Sequence, progress: Progress | None = None) -> NDArray[np.float32]:
        """Run all pending tokens; returns the logits after the last, float32 [vocab].

        Where none is pending the last token is run again, for its logits. `progress(done, total)` is called after each
        chunk. Raises CapacityError, with the finished chunks kept.
        """
        if sequence.num_cached == len(sequence.tokens):
            sequence.table.truncate(len(sequence.tokens) - 1)
        total = len(sequence.tokens) - sequence.num_cached
        left = total
        while True:
            start = sequence.num_cached
            count = min(left, CHUNK - start % CHUNK, sequence.table.room)
            last = count == left
            logits = self.run([(sequence, count, "last" if last else "none")])
            left -= count
            if progress is not None:
                progress(total - left, total)
            if last:
                return logits[0].copy()

    def all_logits(self, sequence: Sequence, most: int = CHUNK) -> NDArray[np.float32]:
        """Run the next chunk of pending tokens, at most so many; returns the logits after each, float32 [n, vocab]."""
        start = sequence.num_cached
        count = min(len(sequence.tokens) - start, CHUNK - start % CHUNK, sequence.table.room, most)
        return self.run([(sequence, count, "all")]).copy()

    def step(self, sequences: Many[Sequence]) -> NDArray[np.float32]:
        """Run the one pending token of each sequence; returns the logits after each, float32 [n, vocab]."""
        return self.run([(sequence, 1, "last") for sequence in sequences]).copy()

    def run(self, parts: Many[tuple[Sequence, int, str]], drafts: Many[Many[int]] | None = None) -> NDArray[np.float32]:
        """Run `count` pending tokens of each sequence, at most `CHUNK` in all; returns the logits asked for.

        parts: (sequence, count, "none" | "last" | "all"). drafts: for each, tokens that are run after all its own; they
        count as cached although the sequence does not have them, until its table is truncated. Returns float32
        [wanted rows, vocab], in order: a view that is valid until the next run. Raises CapacityError; nothing is cached
        then.
        """
        before = [sequence.num_cached for sequence, _, _ in parts]
        guesses = [()] * len(parts) if drafts is None else drafts
        try:
            batch = []
            for (sequence, own, logits), start, guess in zip(parts, before, guesses, strict=True):
                tokens = np.array([*sequence.tokens[start : start + own], *guess], np.int64)
                count = len(tokens)
                self.cache.copy_blocks(sequence.table.prepare_write(count))
                sequence.table.append(count)
                batch.append(Rows(tokens, start, sequence.table.blocks, logits, sequence.table.evicted))
            found = self.decoder.forward(self._pool, batch)
            if self.eviction is not None:
                self._evict([sequence for sequence, _, _ in parts])
        except BaseException:
            # Interrupted or out of blocks: a token counts as cached only once its K and V are.
            for (sequence, _, _), length in zip(parts, before, strict=True):
                sequence.table.truncate(length)
            raise
        for (sequence, _, _), guess in zip(parts, guesses, strict=True):
            if not guess:
                sequence.table.settle()
        return found

    def _evict(self, sequences: Many[Sequence]) -> None:
        """Let the sequences of the last pass drop what was paid least attention to."""
        tables = [sequence.table for sequence in sequences if isinstance(sequence.table, EvictingTable)]
        masses = self.decoder.attention_mass([table.first_unseen for table in tables])
        for table, mass in zip(tables, masses, strict=True):
            self.evicted_tokens += table.observe(mass)
