"""The logical side of the paged KV cache: where the tokens of one sequence lie."""

from typing import Self

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import IntegrityError
from prolepsis.kv.block_pool import BlockPool

_INITIAL_ENTRIES = 16


class BlockTable:
    """Maps the tokens of one sequence to blocks: token i lies in `blocks[i // block_size]` at offset `i % block_size`.

    Blocks that hold tokens may be shared with other tables (`fork`); blocks reserved beyond `length` never are.
    So a write of new tokens can meet a shared block only at a partly filled tail, which `prepare_write` replaces:

        copies = table.prepare_write(n)   # copy-on-write, and room for n tokens
        cache.copy_blocks(copies)
        slots = table.append(n)           # now fill these
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self._entries = np.zeros(_INITIAL_ENTRIES, dtype=np.int32)
        self._num_blocks = 0
        self._length = 0

    @property
    def blocks(self) -> NDArray[np.int32]:
        """Physical block of each logical block, int32. A view: valid until the table next changes; do not write."""
        return self._entries[: self._num_blocks]

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._length

    @property
    def capacity(self) -> int:
        """Tokens the blocks taken so far have room for."""
        return self._num_blocks * self.block_size

    def reserve(self, n_tokens: int) -> None:
        """Take blocks until `n_tokens` more tokens fit after `length`.

        All or nothing: on CapacityError no block has been taken.
        """
        missing = self._blocks_for(self._length + n_tokens) - self._num_blocks
        if missing <= 0:
            return
        self.pool.require(missing)
        self._grow(self._num_blocks + missing)
        for _ in range(missing):
            self._entries[self._num_blocks] = self.pool.allocate()
            self._num_blocks += 1

    def prepare_write(self, n_tokens: int) -> list[tuple[int, int]]:
        """Make room for `n_tokens` more tokens in blocks that this table alone holds.

        Returns the (source, destination) block copies to make before anything else is written to either table
        (none, or one for a shared tail). All or nothing: on CapacityError the table is unchanged.
        """
        if n_tokens <= 0 or not self._tail_is_shared():
            self.reserve(n_tokens)
            return []
        missing = self._blocks_for(self._length + n_tokens) - self._num_blocks
        self.pool.require(max(missing, 0) + 1)
        tail = self._length // self.block_size
        source = int(self._entries[tail])
        destination = self.pool.allocate()
        self._entries[tail] = destination
        self.pool.release(source)
        self.reserve(n_tokens)
        return [(source, destination)]

    def append(self, n_tokens: int) -> NDArray[np.int64]:
        """Count `n_tokens` more tokens as held and return their slots, int64 [n_tokens] (block * block_size + offset).

        Reserves what is missing (CapacityError: nothing changed). Raises IntegrityError if the first slot lies in a
        block that other sequences hold too: `prepare_write` must have been called.
        """
        if n_tokens > 0 and self._tail_is_shared():
            raise IntegrityError(
                f"tokens would be appended to block {self._entries[self._length // self.block_size]}, "
                "which other sequences hold too; call prepare_write first"
            )
        self.reserve(n_tokens)
        self._length += n_tokens
        return self.slots(self._length - n_tokens, self._length)

    def slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """Slots of the tokens `start .. stop - 1`, int64. Raises IndexError outside `0 .. length`."""
        self.require_range(start, stop)
        positions = np.arange(start, stop, dtype=np.int64)
        return self._entries[positions // self.block_size] * np.int64(self.block_size) + positions % self.block_size

    def require_range(self, start: int, stop: int) -> None:
        """Raise IndexError unless `0 <= start <= stop <= length`."""
        if not 0 <= start <= stop <= self._length:
            raise IndexError(f"tokens {start} .. {stop} of a sequence that holds {self._length}")

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens and release every block they do not need, reserved ones included."""
        self.require_range(0, length)
        needed = self._blocks_for(length)
        for block in self._entries[needed : self._num_blocks].tolist():
            self.pool.release(block)
        self._num_blocks = needed
        self._length = length

    def fork(self) -> Self:
        """A second sequence with the same tokens: shares every block that holds some, copies none."""
        twin = type(self)(self.pool, self.block_size)
        held = self._blocks_for(self._length)
        for block in self._entries[:held].tolist():
            self.pool.share(block)
        twin._grow(held)
        twin._entries[:held] = self._entries[:held]
        twin._num_blocks = held
        twin._length = self._length
        return twin

    def release(self) -> None:
        """Give every block back; the table is then empty and may be used again."""
        self.truncate(0)

    def check(self) -> None:
        """Prove that the table is sound; IntegrityError names the first fault."""
        if not 0 <= self._length <= self.capacity:
            raise IntegrityError(f"a table with room for {self.capacity} tokens says it holds {self._length}")
        blocks = self.blocks.tolist()
        if len(set(blocks)) != len(blocks):
            raise IntegrityError(f"a table holds one block twice: {blocks}")
        held = self._blocks_for(self._length)
        for index, block in enumerate(blocks):
            if not 0 <= block < self.pool.num_blocks or self.pool.ref_count(block) < 1:
                raise IntegrityError(f"a table holds block {block}, which is free or does not exist")
            if index >= held and self.pool.ref_count(block) != 1:
                raise IntegrityError(f"block {block} is only reserved and yet shared")

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_size)

    def _tail_is_shared(self) -> bool:
        if self._length % self.block_size == 0:
            return False
        return self.pool.ref_count(int(self._entries[self._length // self.block_size])) > 1

    def _grow(self, num_blocks: int) -> None:
        """Make room for `num_blocks` entries; doubling keeps the cost per appended token constant."""
        if num_blocks > len(self._entries):
            entries = np.zeros(max(num_blocks, 2 * len(self._entries)), dtype=np.int32)
            entries[: self._num_blocks] = self.blocks
            self._entries = entries
