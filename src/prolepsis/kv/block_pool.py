"""The physical side of the paged KV cache: which blocks are free, and how many sequences hold each of the others.

A block is a fixed number of token slots in every layer's K and V array (PagedAttention, Kwon et al. 2023, section 4.2).
The pool hands out block numbers only; the bytes live in `prolepsis.kv.cache.PagedKVCache`.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import CapacityError, IntegrityError


class BlockPool:
    """Reference-counted blocks `0 .. num_blocks - 1`; every operation takes constant time.

    A block is free (count 0) or used (count >= 1), and it may be registered: its contents are known to the prefix index
    and do not change. A registered block that becomes free keeps its contents, and `hold` takes it into use again.
    `allocate` prefers free blocks that are blank, that is not registered, the one released last first, so that memory
    never touched stays untouched; when there is none, the registered one released longest ago is evicted.
    Not thread-safe: one engine thread owns the pool.
    """

    def __init__(self, num_blocks: int, num_recent: int | None = None) -> None:
        """num_recent: how many blocks can have an exact form beside them (`PagedKVCache`); None: none needs one."""
        self.num_blocks = num_blocks
        self.recent = np.full(0 if num_recent is None else num_blocks, -1, np.int32)
        """int32 [num_blocks]: where the exact form of a block is, -1 where it has none. Empty where none needs one."""
        self._num_recent = num_recent or 0
        self._free_recent = list(reversed(range(self._num_recent)))
        self.on_forget: Callable[[int], None] | None = None
        """Called with a block that is about to lose its registration, after which it may be overwritten."""
        self._ref_counts = array("i", bytes(num_blocks * array("i").itemsize))
        self._registered = bytearray(num_blocks)
        self._blank = list(reversed(range(num_blocks)))
        # In the order of release, yet `hold` takes a block out of the middle in O(1).
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still hand out, blank or registered."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_used(self) -> int:
        """Blocks held by at least one sequence."""
        return self.num_blocks - self.num_free

    @property
    def num_writable(self) -> int:
        """Blocks that can be taken before others are `settled`."""
        return min(self.num_free, len(self._free_recent)) if self.recent.size else self.num_free

    def require(self, count: int) -> None:
        """Raise CapacityError unless `count` blocks can be taken; nothing is taken."""
        if self.num_free >= count > self.num_writable:
            raise CapacityError(
                f"the KV cache needs exact room for {count} more block(s) but only {self.num_writable} are free; "
                "release a sequence, or give the cache a larger memory budget"
            )
        if count > self.num_free:
            raise CapacityError(
                f"the KV cache needs {count} more block(s) but only {self.num_free} of {self.num_blocks} are free; "
                "release a sequence or give the cache a larger memory budget"
            )

    def allocate(self) -> int:
        """Take a free block, with a count of 1 and not registered. Raises CapacityError when none is free."""
        self.require(1)
        if not self._blank:
            self.forget(next(iter(self._evictable)))
        block = self._blank.pop()
        self._ref_counts[block] = 1
        if self.recent.size:
            self.recent[block] = self._free_recent.pop()
        return block

    def settle(self, block: int) -> None:
        """Keep no exact form of a block beside it, for its tokens will stay."""
        if self.recent.size and self.recent[block] >= 0:
            self._free_recent.append(int(self.recent[block]))
            self.recent[block] = -1

    def is_settled(self, block: int) -> bool:
        """Whether tokens of a block can no longer be taken back one by one, since it has no exact form."""
        return self.recent.size > 0 and bool(self.recent[block] < 0)

    def hold(self, block: int) -> None:
        """Add a holder to a used block, or take a free registered one into use.

        Raises IntegrityError if the block is blank or does not exist.
        """
        if not self.is_registered(block):
            self._require_used(block)
        self._evictable.pop(block, None)
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Drop one holder; the last one frees the block. Raises IntegrityError if it is free or does not exist."""
        self._require_used(block)
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self.settle(block)
            if self._registered[block]:
                self._evictable[block] = None
            else:
                self._blank.append(block)

    def register(self, block: int) -> None:
        """Mark a used block as known to the index. IntegrityError if it is free, unknown or registered already."""
        self._require_used(block)
        if self._registered[block]:
            raise IntegrityError(f"block {block} is registered already")
        self.settle(block)
        self._registered[block] = True

    def forget(self, block: int) -> None:
        """End the registration of a block, used or free, and tell the index. IntegrityError unless it is registered."""
        if not self.is_registered(block):
            raise IntegrityError(f"block {block} is not registered")
        if self.on_forget is not None:
            self.on_forget(block)
        self._registered[block] = False
        if self._ref_counts[block] == 0:
            del self._evictable[block]
            self._blank.append(block)

    def ref_count(self, block: int) -> int:
        """How many sequences hold `block`; 0 means free."""
        return self._ref_counts[block]

    @property
    def ref_counts(self) -> NDArray[np.int32]:
        """How many sequences hold each block, int32 [num_blocks]. A view; do not write."""
        return np.frombuffer(self._ref_counts, np.int32)

    @property
    def registered(self) -> NDArray[np.bool_]:
        """Whether the contents of each block are known to the index, bool [num_blocks]. A view; do not write."""
        return np.frombuffer(self._registered, np.bool_)

    def is_registered(self, block: int) -> bool:
        """Whether the contents of `block` are known to the index, and so must not change."""
        self._require_exists(block)
        return bool(self._registered[block])

    def is_writable(self, block: int) -> bool:
        """Whether one sequence alone holds `block`, and the index does not know it."""
        return self._ref_counts[block] == 1 and not self._registered[block]

    def eviction_order(self) -> list[int]:
        """The free registered blocks, the one to be evicted next first. Takes time for each of them."""
        return list(self._evictable)

    def check(self) -> None:
        """Prove that every block is in exactly one state; IntegrityError names the first fault."""
        blank = set(self._blank)
        if len(blank) != len(self._blank):
            raise IntegrityError("a block is in the list of blank blocks twice")
        for block, count in enumerate(self._ref_counts):
            if count < 0:
                raise IntegrityError(f"block {block} has the negative reference count {count}")
            if count > 0 and (block in blank or block in self._evictable):
                raise IntegrityError(f"block {block} is free and yet held by {count} sequence(s)")
            if self._registered[block] and block in blank:
                raise IntegrityError(f"block {block} is registered and yet blank")
            if not self._registered[block] and block in self._evictable:
                raise IntegrityError(f"block {block} waits to be evicted and yet is not registered")
        used = sum(count > 0 for count in self._ref_counts)
        if used + self.num_free != self.num_blocks:
            raise IntegrityError(f"{self.num_free} free + {used} used blocks, but the pool has {self.num_blocks}")
        self._check_recent()

    def _check_recent(self) -> None:
        exact = np.flatnonzero(self.recent >= 0).tolist()
        places = self.recent[exact].tolist() + self._free_recent
        if len(set(places)) != len(places) or len(places) != self._num_recent:
            raise IntegrityError(f"of {self._num_recent} places for exact blocks, these are used or free: {places}")
        for block in exact:
            if self._ref_counts[block] == 0 or self._registered[block]:
                raise IntegrityError(f"block {block} is free or registered and yet has an exact form")

    def _require_exists(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise IntegrityError(f"block {block} does not exist in a pool of {self.num_blocks}")

    def _require_used(self, block: int) -> None:
        self._require_exists(block)
        if self._ref_counts[block] == 0:
            raise IntegrityError(f"block {block} is free: no sequence holds it")
