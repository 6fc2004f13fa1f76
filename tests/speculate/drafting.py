"""A target that generates with its own cache, for drafters to continue; greedy throughout."""

import numpy as np

from prolepsis.kv.cache import PagedKVCache
from prolepsis.model.config import ModelConfig
from prolepsis.model.decoder import Decoder, Rows
from prolepsis.speculate.drafter import Choice, Draftee

CONTEXT = 256


class Greedy:
    """Chooses the likeliest token."""

    def choose(self, logits):
        return Choice(int(logits.argmax()), None)


class Target:
    """A model with a cache, and sequences of it as they are between two passes."""

    def __init__(self, file, threads=1):
        self.file = file
        config = ModelConfig.from_gguf(file)
        self.decoder = Decoder.load(file, config, CONTEXT, 128, threads)
        self.cache = PagedKVCache(config.num_layers, config.num_kv_heads, config.head_dim, 16, 256)
        self.pool = self.decoder.pool_view(self.cache)

    def draftee(self, key, tokens, limit):
        """A sequence of which all but the last token are cached, with room for a pass that verifies."""
        draftee = Draftee(key, list(tokens), self.cache.new_table(), limit, Greedy())
        self.run(draftee, draftee.tokens[:-1])
        draftee.table.reserve(1 + limit)
        return draftee

    def run(self, draftee, tokens):
        """Run tokens that follow those in the cache; the logits after each."""
        start = draftee.table.length
        draftee.table.append(len(tokens))
        return self.decoder.forward(
            self.pool, [Rows(np.array(tokens, np.int64), start, draftee.table.blocks, "all")]
        ).copy()  # fmt: skip

    def verify(self, draftee, drafts):
        """Settle drafts as a greedy target does; returns the tokens that came."""
        length = draftee.table.length
        likeliest = self.run(draftee, [draftee.tokens[-1], *drafts]).argmax(axis=1).tolist()
        agreed = next((i for i, draft in enumerate(drafts) if draft != likeliest[i]), len(drafts))
        draftee.tokens.extend(likeliest[: agreed + 1])
        draftee.table.truncate(length + agreed + 1)
        draftee.table.reserve(1 + draftee.limit)
        return likeliest[: agreed + 1]

    def greedy(self, tokens, count):
        """The next `count` tokens, one pass each."""
        draftee = self.draftee(0, tokens, 0)
        out = [self.verify(draftee, [])[0] for _ in range(count)]
        draftee.table.release()
        return out

    def kv(self, draftee):
        """K and V of what is cached."""
        return self.cache.read(draftee.table, 0, draftee.table.length)
