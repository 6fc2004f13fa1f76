"""One sequence of tokens and the paged cache it fills."""

from collections.abc import Sequence as Tokens

import numpy as np
from numpy.typing import NDArray

from prolepsis.kv.block_table import BlockTable


class Sequence:
    """Tokens in order. K and V of the first `num_cached` are in the cache; the rest are `pending`."""

    def __init__(self, table: BlockTable, tokens: Tokens[int] = ()) -> None:
        self.table = table
        self.tokens = list(tokens)

    @property
    def num_cached(self) -> int:
        """Tokens whose K and V are in the cache."""
        return self.table.length

    @property
    def pending(self) -> NDArray[np.int64]:
        """Tokens that no pass has seen yet, int64."""
        return np.array(self.tokens[self.table.length :], np.int64)

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        del self.tokens[length:]
        self.table.truncate(min(length, self.table.length))

    def release(self) -> None:
        """Give the blocks back. The sequence is empty afterwards."""
        self.tokens.clear()
        self.table.release()
