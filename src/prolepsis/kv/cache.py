"""The paged KV cache: the bytes of every block, in every layer."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError, IntegrityError
from prolepsis.kv.block_pool import BlockPool
from prolepsis.kv.block_table import BlockTable

DTYPES = ("bf16", "fp16")
_BYTES_PER_VALUE = 2


class PagedKVCache:
    """K and V of every layer in fixed-size blocks, as 16-bit patterns.

    `v[layer]` is uint16 [num_blocks, num_kv_heads, block_size, head_dim]; `k[layer]` has the last two axes exchanged,
    so that the scores of consecutive tokens are lanes of a vector. `dtype` says how to read the bits. Each of K and V
    is one allocation of zeroed memory that the operating system supplies as it is first touched, so an unused pool
    costs address space only.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        num_blocks: int,
        dtype: str = "bf16",
    ) -> None:
        """Raises InputError for an unknown dtype, a size below 1, or more bytes than the machine grants."""
        if dtype not in DTYPES:
            raise InputError(f"KV cache dtype {dtype!r} is not supported; choose one of {', '.join(DTYPES)}")
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        if min(shape) < 1:
            raise InputError(
                f"every size of a KV cache must be at least 1: layers, blocks, heads, block, dim = {shape}"
            )
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.dtype = dtype
        try:
            self.k: NDArray[np.uint16] = np.zeros((*shape[:3], head_dim, block_size), dtype=np.uint16)
            self.v: NDArray[np.uint16] = np.zeros(shape, dtype=np.uint16)
        except MemoryError as error:
            raise InputError(
                f"this machine has no memory for a KV cache of {num_blocks * block_size} tokens "
                f"({num_blocks * block_size * self.bytes_per_token} bytes); choose a smaller budget or context"
            ) from error
        self.pool = BlockPool(num_blocks)

    @staticmethod
    def num_blocks_for(budget_bytes: int, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int) -> int:
        """Blocks that fit in `budget_bytes`: 2 (K, V) x layers x KV heads x head dim x bytes per value x tokens each.

        Raises InputError if not even one fits.
        """
        block_bytes = 2 * num_layers * num_kv_heads * head_dim * _BYTES_PER_VALUE * block_size
        if budget_bytes < block_bytes:
            raise InputError(
                f"a KV cache budget of {budget_bytes} bytes holds no block; "
                f"one block of {block_size} tokens takes {block_bytes} bytes"
            )
        return budget_bytes // block_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in all layers, K and V together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _BYTES_PER_VALUE

    def new_table(self) -> BlockTable:
        """An empty sequence in this cache."""
        return BlockTable(self.pool, self.block_size)

    def read(self, table: BlockTable, start: int, stop: int) -> NDArray[np.uint16]:
        """Copy the tokens `start .. stop - 1` out.

        Returns uint16 [layers, 2 (K, V), stop - start, kv_heads, head_dim], contiguous. Raises IndexError outside the
        tokens the table holds.
        """
        table.require_range(start, stop)
        shape = (self.num_layers, 2, stop - start, self.num_kv_heads, self.head_dim)
        values = np.empty(shape, dtype=np.uint16)
        for block, inside, outside in _spans(table, start, stop):
            values[:, 0, outside] = self.k[:, block, :, :, inside].transpose(0, 3, 1, 2)
            values[:, 1, outside] = self.v[:, block, :, inside].swapaxes(1, 2)
        return values

    def write(self, table: BlockTable, start: int, values: NDArray[np.uint16]) -> None:
        """The inverse of `read`: put uint16 [layers, 2, tokens, kv_heads, head_dim] at the tokens from `start` on.

        The table must already hold those tokens (`append`), in blocks that no other sequence holds: IndexError,
        IntegrityError otherwise, and ValueError for another shape or dtype; nothing has then been written.
        """
        self._require_shape(values)
        stop = start + values.shape[2]
        table.require_range(start, stop)
        spans = list(_spans(table, start, stop))
        for block, _, _ in spans:
            if self.pool.ref_count(block) > 1:
                raise IntegrityError(f"a write to block {block} would change {self.pool.ref_count(block)} sequences")
        for block, inside, outside in spans:
            self.k[:, block, :, :, inside] = values[:, 0, outside].transpose(0, 2, 3, 1)
            self.v[:, block, :, inside] = values[:, 1, outside].swapaxes(1, 2)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks in every layer, (source, destination) each, in order."""
        for source, destination in pairs:
            self.k[:, destination] = self.k[:, source]
            self.v[:, destination] = self.v[:, source]

    def check(self, tables: Sequence[BlockTable]) -> None:
        """Prove that pool and tables are sound and that `tables` are all there is: no block is leaked or over-counted.

        IntegrityError names the first fault.
        """
        self.pool.check()
        holders = [0] * self.pool.num_blocks
        for table in tables:
            table.check()
            for block in table.blocks.tolist():
                holders[block] += 1
        for block, count in enumerate(holders):
            if count != self.pool.ref_count(block):
                raise IntegrityError(
                    f"block {block} is held by {count} table(s) but counts {self.pool.ref_count(block)}"
                )

    def _require_shape(self, values: NDArray[np.uint16]) -> None:
        expected = (self.num_layers, 2, -1, self.num_kv_heads, self.head_dim)
        if (
            values.dtype != np.uint16
            or values.ndim != 5
            or values.shape != (*expected[:2], values.shape[2], *expected[3:])
        ):
            raise ValueError(f"KV values are {values.dtype} {values.shape}, expected uint16 {expected}")


def _spans(table: BlockTable, start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
    """For each block under the tokens `start .. stop - 1`: its number, the slice in it, the slice of the tokens."""
    size = table.block_size
    position = start
    while position < stop:
        offset = position % size
        count = min(size - offset, stop - position)
        outside = position - start
        yield int(table.blocks[position // size]), slice(offset, offset + count), slice(outside, outside + count)
        position += count
