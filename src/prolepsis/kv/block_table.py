"""The logical side of the paged KV cache: where the tokens of one sequence lie."""

import sys
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import IntegrityError
from prolepsis.kv.block_pool import BlockPool

_INITIAL_ENTRIES = 16


class BlockTable:
    """Maps the tokens of one sequence to blocks: token i lies in `blocks[i // block_size]` at offset `i % block_size`.

    Blocks that hold tokens may be shared with other tables (`fork`, `PrefixIndex.match`) or known to the prefix index;
    blocks reserved beyond `length` never are. So a write of new tokens can meet a block that must not change only at a
    partly filled tail, which `prepare_write` replaces:

        copies = table.prepare_write(n)   # copy-on-write, and room for n tokens
        cache.copy_blocks(copies)
        table.append(n)                   # now fill `table.slots(table.length - n, table.length)`
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.num_known = 0
        """Full blocks, from the first on, that the prefix index has as one chain. `PrefixIndex` counts it up."""
        self.evicted = 0
        """Tokens that are counted as held and have no place any more (`eviction`)."""
        self._entries = np.zeros(_INITIAL_ENTRIES, dtype=np.int32)
        self._num_blocks = 0
        self._length = 0
        self._num_settled = 0

    @property
    def blocks(self) -> NDArray[np.int32]:
        """Physical block of each logical block, int32. A view: valid until the table next changes; do not write."""
        return self._entries[: self._num_blocks]

    @property
    def length(self) -> int:
        """Tokens held, or held once and evicted since."""
        return self._length + self.evicted

    @property
    def held(self) -> int:
        """Tokens held: each has a place in the blocks."""
        return self._length

    @property
    def room(self) -> int:
        """The most tokens that may be appended at once."""
        return sys.maxsize

    @property
    def capacity(self) -> int:
        """What `length` can become in the blocks taken so far."""
        return self._num_blocks * self.block_size + self.evicted

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

    def blocks_to_write(self, n_tokens: int) -> int:
        """Free blocks that `prepare_write` takes for `n_tokens` more tokens."""
        missing = max(self._blocks_for(self._length + n_tokens) - self._num_blocks, 0)
        if n_tokens <= 0 or self._tail_is_writable():
            return missing
        alone = self.pool.ref_count(int(self._entries[self._length // self.block_size])) == 1
        return missing if alone and missing == self.pool.num_free else missing + 1

    def prepare_write(self, n_tokens: int) -> list[tuple[int, int]]:
        """Make room for `n_tokens` more tokens in blocks that this table alone holds and the index does not know.

        Returns the (source, destination) block copies to make before anything else is written to any table
        (none, or one for a tail that is shared or registered). All or nothing: on CapacityError the table is unchanged.
        """
        self.settle()
        if n_tokens <= 0 or self._tail_is_writable():
            self.reserve(n_tokens)
            return []
        source = int(self._entries[self._length // self.block_size])
        missing = max(self._blocks_for(self._length + n_tokens) - self._num_blocks, 0)
        if self.pool.ref_count(source) == 1 and missing == self.pool.num_free:
            # No room for a copy, and nobody else holds the original.
            self.reserve(n_tokens)
            self.pool.forget(source)
            return []
        self.pool.require(missing + 1)
        self._replace(self._length // self.block_size, self.pool.allocate())
        self.reserve(n_tokens)
        return [(source, int(self._entries[self._length // self.block_size]))]

    def append(self, n_tokens: int) -> None:
        """Count `n_tokens` more tokens as held.

        Reserves what is missing (CapacityError: nothing changed). Raises IntegrityError if the first slot lies in a
        block that other sequences hold or the index knows: `prepare_write` must have been called.
        """
        if n_tokens > 0 and not self._tail_is_writable():
            raise IntegrityError(
                f"tokens would be appended to block {self._entries[self._length // self.block_size]}, "
                "which other sequences hold or the prefix index knows; call prepare_write first"
            )
        self.reserve(n_tokens)
        self._length += n_tokens

    def settle(self) -> None:
        """The tokens held will stay: keep no exact form of the blocks that they fill (`BlockPool.settle`)."""
        full = self._length // self.block_size
        if self.pool.recent.size:
            for block in self._entries[self._num_settled : full].tolist():
                self.pool.settle(block)
        self._num_settled = full

    def slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """Slots of the tokens `start .. stop - 1`, int64 (block * block_size + offset).

        Raises IndexError outside `0 .. length`.
        """
        self.require_range(start, stop)
        positions = np.arange(start, stop, dtype=np.int64)
        return self._entries[positions // self.block_size] * np.int64(self.block_size) + positions % self.block_size

    def require_range(self, start: int, stop: int) -> None:
        """Raise IndexError unless `0 <= start <= stop <= length`."""
        if not 0 <= start <= stop <= self.length:
            raise IndexError(f"tokens {start} .. {stop} of a sequence that holds {self.length}")

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens and release every block they do not need, reserved ones included.

        Fewer are kept where the last would be some of a settled block's, of which only all or none can be.

        The last block is released first: of a chain that the index knows, the end is evicted before the beginning.
        """
        if not self.evicted <= length <= self.length:
            raise IndexError(f"a sequence that holds {self.length} tokens cannot keep {length}")
        held = length - self.evicted
        inside = held % self.block_size
        if inside and self.pool.is_settled(int(self._entries[held // self.block_size])):
            held -= inside
        needed = self._blocks_for(held)
        for block in self._entries[needed : self._num_blocks][::-1].tolist():
            self.pool.release(block)
        self._num_blocks = needed
        self._length = held
        self._num_settled = min(self._num_settled, held // self.block_size)
        self.num_known = min(self.num_known, held // self.block_size)

    def rewind(self, length: int) -> None:
        """`truncate`, where others will follow than the tokens that did."""
        self.truncate(length)

    def fork(self) -> Self:
        """A second sequence with the same tokens: shares every block that holds some, copies none."""
        twin = self._new()
        twin.adopt(self._entries[: self._blocks_for(self._length)].tolist(), self._length)
        twin.num_known = self.num_known
        return twin

    def adopt(self, blocks: Sequence[int], n_tokens: int) -> None:
        """Hold `n_tokens` more tokens, which lie in `blocks`, used or registered ones.

        Raises IntegrityError if the table ends within a block, has reserved others, or the blocks are not as many as
        the tokens need.
        """
        if self.length != self.capacity or len(blocks) != self._blocks_for(n_tokens):
            raise IntegrityError(
                f"{len(blocks)} blocks with {n_tokens} tokens are given to a table that has {self._num_blocks} blocks "
                f"with {self._length}"
            )
        for block in blocks:
            self.pool.hold(block)
        self._grow(self._num_blocks + len(blocks))
        self._entries[self._num_blocks : self._num_blocks + len(blocks)] = blocks
        self._num_blocks += len(blocks)
        self._length += n_tokens

    def exchange(self, index: int, block: int) -> None:
        """Hold `block`, a used or registered one with the same contents, in place of the table's own block `index`."""
        self.pool.hold(block)
        self._replace(index, block)

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
            if index >= held and not self.pool.is_writable(block):
                raise IntegrityError(f"block {block} is only reserved and yet shared or registered")
            if index < self.num_known and not self.pool.is_registered(block):
                raise IntegrityError(f"block {block} counts as known to the prefix index and yet is not registered")
        if self._length % self.block_size and self.pool.is_settled(blocks[held - 1]):
            raise IntegrityError(f"block {blocks[held - 1]} is partly filled and yet settled")
        if not 0 <= self.num_known <= self._length // self.block_size:
            raise IntegrityError(f"a table of {self._length} tokens says that {self.num_known} full blocks are known")

    def _new(self) -> Self:
        return type(self)(self.pool, self.block_size)

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_size)

    def _tail_is_writable(self) -> bool:
        """Whether the next token may be written, as far as the block it belongs to is taken already."""
        if self._length % self.block_size == 0:
            return True
        return self.pool.is_writable(int(self._entries[self._length // self.block_size]))

    def _replace(self, index: int, block: int) -> None:
        own = int(self._entries[index])
        self._entries[index] = block
        self.pool.release(own)

    def _grow(self, num_blocks: int) -> None:
        """Make room for `num_blocks` entries; doubling keeps the cost per appended token constant."""
        if num_blocks > len(self._entries):
            entries = np.zeros(max(num_blocks, 2 * len(self._entries)), dtype=np.int32)
            entries[: self._num_blocks] = self.blocks
            self._entries = entries
