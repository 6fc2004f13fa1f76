"""One sequence of tokens and the paged cache it fills."""

from collections.abc import Sequence as Tokens
from itertools import count

from prolepsis.kv.block_table import BlockTable

_numbers = count()


class Sequence:
    """Tokens in order. K and V of the first `num_cached` are in the cache; the rest are pending."""

    def __init__(self, table: BlockTable, tokens: Tokens[int] = ()) -> None:
        self.number = next(_numbers)
        """Its own for ever."""
        self.table = table
        self.tokens = list(tokens)

    @property
    def num_cached(self) -> int:
        """Tokens whose K and V are in the cache."""
        return self.table.length

    @property
    def num_pending(self) -> int:
        """Tokens that have to be run yet."""
        return len(self.tokens) - self.table.length

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        del self.tokens[length:]
        self.table.rewind(min(length, self.table.length))

    def replace(self, tokens: Tokens[int]) -> None:
        """Hold `tokens` instead, keeping what is cached of those that both begin with."""
        same = 0
        for ours, theirs in zip(self.tokens[: self.num_cached], tokens, strict=False):
            if ours != theirs:
                break
            same += 1
        self.table.rewind(same)
        self.tokens[:] = tokens

    def release(self) -> None:
        """Give the blocks back. The sequence is empty afterwards."""
        self.tokens.clear()
        self.table.release()
