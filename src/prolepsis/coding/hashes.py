"""Checksums, and chained hashes of token blocks: a block's hash stands for all tokens from the start to its end."""

import numpy as np
import xxhash
from numpy.typing import NDArray


def checksum(*parts: bytes | memoryview) -> bytes:
    """xxh3-64 of the parts in a row, as the 8 bytes that stand in the file."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return int(digest.intdigest()).to_bytes(8, "little")


class BlockHashes:
    """Hashes blocks as their last token arrives: xxh3-64 of (hash of the block before, token ids), little-endian.

    The hash before the first block is 0. Blocks lie at multiples of `block_size`, which `start` must be too.
    """

    def __init__(self, block_size: int, last: int = 0) -> None:
        """`last`: the hash of the block before."""
        self._block_size = block_size
        self._last = last
        self._pending = np.empty(0, np.uint32)

    def add(self, ids: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """The hashes of the blocks that `ids` complete."""
        pending = np.concatenate([self._pending, ids])
        whole = len(pending) - len(pending) % self._block_size
        hashes = []
        for block in pending[:whole].reshape(-1, self._block_size):
            self._last = xxhash.xxh3_64_intdigest(self._last.to_bytes(8, "little") + block.astype("<u4").tobytes())
            hashes.append(self._last)
        self._pending = pending[whole:]
        return np.array(hashes, np.uint64)
