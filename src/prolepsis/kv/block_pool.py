"""The physical side of the paged KV cache: which blocks are free, and how many sequences hold each of the others.

A block is a fixed number of token slots in every layer's K and V array (PagedAttention, Kwon et al. 2023, section 4.2).
The pool hands out block numbers only; the bytes live in `prolepsis.kv.cache.PagedKVCache`.
"""

from collections import OrderedDict

from prolepsis.errors import CapacityError, IntegrityError


class BlockPool:
    """Reference-counted blocks `0 .. num_blocks - 1`; every operation takes constant time.

    A block is either free (count 0) or used (count >= 1). Free blocks keep their contents and are handed out oldest
    first, so what was released last stays readable longest. Not thread-safe: one engine thread owns the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        # Ordered by time of release, yet a block can be taken out of the middle in O(1), which a deque cannot do.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still hand out."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks held by at least one sequence."""
        return self.num_blocks - len(self._free)

    def require(self, count: int) -> None:
        """Raise CapacityError unless `count` blocks are free; nothing is taken."""
        if count > len(self._free):
            raise CapacityError(
                f"the KV cache needs {count} more block(s) but only {len(self._free)} of {self.num_blocks} are free; "
                "release a sequence or give the cache a larger memory budget"
            )

    def allocate(self) -> int:
        """Take the block that has been free longest, with a count of 1. Raises CapacityError when none is free."""
        self.require(1)
        block, _ = self._free.popitem(last=False)
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a holder to a used block. Raises IntegrityError if it is free or does not exist."""
        self._require_used(block)
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Drop one holder; the last one frees the block. Raises IntegrityError if it is free or does not exist."""
        self._require_used(block)
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._free[block] = None

    def ref_count(self, block: int) -> int:
        """How many sequences hold `block`; 0 means free."""
        return self._ref_counts[block]

    def check(self) -> None:
        """Prove free + used == total, with no block in both states; IntegrityError names the first fault."""
        for block, count in enumerate(self._ref_counts):
            if count < 0:
                raise IntegrityError(f"block {block} has the negative reference count {count}")
            if count > 0 and block in self._free:
                raise IntegrityError(f"block {block} is free and yet held by {count} sequence(s)")
        used = sum(count > 0 for count in self._ref_counts)
        if used + len(self._free) != self.num_blocks:
            raise IntegrityError(f"{len(self._free)} free + {used} used blocks, but the pool has {self.num_blocks}")

    def _require_used(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise IntegrityError(f"block {block} does not exist in a pool of {self.num_blocks}")
        if self._ref_counts[block] == 0:
            raise IntegrityError(f"block {block} is free: it can be neither shared nor released")
