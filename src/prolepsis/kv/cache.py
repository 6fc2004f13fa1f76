"""The paged KV cache: the bytes of every block, in every layer."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError, IntegrityError
from prolepsis.kv import kivi_rows
from prolepsis.kv.block_pool import BlockPool
from prolepsis.kv.block_table import BlockTable
from prolepsis.kv.stored import (
    FORMATS,
    KIVI_BLOCK,
    KIVI_RUN,
    KV,
    STEP_BITS,
    DType,
    KiviKV,
    QuantisedKV,
    arrays_of,
    dtype_named,
    token_count,
    values_of,
)

_TYPES: dict[DType, type] = {"bf16": np.uint16, "fp16": np.uint16, "int8": np.int8}  # of a value; bytes otherwise


class PagedKVCache:
    """K and V of every layer in fixed-size blocks, as bits of `dtype`, one of `stored.DType`.

    `v[layer]` is [num_blocks, num_kv_heads, block_size, head_dim]; `k[layer]` has the last two axes exchanged, so that
    the scores of consecutive tokens are lanes of a vector. Both are uint16 for bf16 and fp16, uint8 for fp8, int8 for
    int8, and uint8 with half the head_dim for int4, two channels in a byte. `k_steps[layer]` and `v_steps[layer]`:
    uint16 [num_blocks, num_kv_heads, block_size] for int8 and int4, the fp16 step of each token's head; else empty.

    kivi4 has blocks of `KIVI_BLOCK` tokens, in which the same arrays hold codes, and steps and minimums in turn, in the
    order of `kernels.kivi`. `recent_k[layer]` and `recent_v[layer]` hold the exact form of `recent` blocks at most, as
    bf16: those that are not full, or whose last tokens may be taken back. `BlockPool.recent` says which.

    Each is one allocation of zeroed memory that the operating system supplies as it is first touched, so an unused pool
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
        *,
        recent: int | None = None,
    ) -> None:
        """`recent`: exact blocks of kivi4, by default as many as there are blocks.

        Raises InputError for an unknown dtype, a size below 1, int4 of an odd head_dim, kivi4 of other blocks than it
        has or of a head_dim that is no multiple of 32, or more bytes than the machine grants.
        """
        self.dtype = dtype_named(dtype)
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        if min(shape) < 1:
            raise InputError(
                f"every size of a KV cache must be at least 1: layers, blocks, heads, block, dim = {shape}"
            )
        if self.dtype == "kivi4" and (block_size != KIVI_BLOCK or head_dim % KIVI_RUN):
            raise InputError(
                f"kivi4 has blocks of {KIVI_BLOCK} tokens and runs of {KIVI_RUN} channels, not blocks of {block_size} "
                f"and heads of {head_dim}"
            )
        bits = FORMATS[self.dtype].bits
        if head_dim * bits % 8:
            raise InputError(f"{self.dtype} packs two channels into a byte, which {head_dim} channels do not fill")
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        kind = _TYPES.get(self.dtype, np.uint8)
        self._width = head_dim * bits // (8 * np.dtype(kind).itemsize)
        exact = 0 if self.dtype != "kivi4" else num_blocks if recent is None else min(recent, num_blocks)
        recents = (num_layers, exact, num_kv_heads)
        try:
            row = block_size // 2 if self.dtype == "kivi4" else block_size
            self.k: NDArray[Any] = np.zeros((*shape[:3], self._width * block_size // row, row), kind)
            self.v: NDArray[Any] = np.zeros((*shape[:4], self._width), kind)
            self.k_steps, self.v_steps = np.zeros((2, *shape[:3], _params(self.dtype, block_size, head_dim)), np.uint16)
            self.recent_k = np.zeros((*recents, head_dim, block_size), np.uint16)
            self.recent_v = np.zeros((*recents, block_size, head_dim), np.uint16)
        except MemoryError as error:
            raise InputError(
                f"this machine has no memory for a KV cache of {num_blocks * block_size} tokens "
                f"({num_blocks * block_size * self.bytes_per_token} bytes); choose a smaller budget or context"
            ) from error
        self.pool = BlockPool(num_blocks, exact if self.dtype == "kivi4" else None)

    @staticmethod
    def num_blocks_for(
        budget_bytes: int, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str = "bf16"
    ) -> int:
        """Blocks that fit in `budget_bytes`: 2 (K, V) x layers x KV heads x bits of a head x tokens each.

        Raises InputError if not even one fits, and for an unknown dtype.
        """
        block_bytes = token_bytes(num_layers, num_kv_heads, head_dim, dtype_named(dtype)) * block_size
        if budget_bytes < block_bytes:
            raise InputError(
                f"a KV cache budget of {budget_bytes} bytes holds no block; "
                f"one block of {block_size} tokens takes {block_bytes} bytes"
            )
        return budget_bytes // block_bytes

    @staticmethod
    def exact_block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int) -> int:
        """Bytes of a block's exact form, which kivi4 keeps of some."""
        return token_bytes(num_layers, num_kv_heads, head_dim, "bf16") * block_size

    def readable(self, tokens: int) -> int:
        """How many of the first `tokens` tokens of a sequence can be read: of kivi4, those in whole blocks."""
        return tokens - tokens % KIVI_BLOCK if self.dtype == "kivi4" else tokens

    @property
    def is_lossy(self) -> bool:
        """Whether K and V are rounded to less than the 16 bits in which they are computed."""
        return FORMATS[self.dtype].bits < FORMATS["bf16"].bits

    @property
    def num_recent(self) -> int:
        """Blocks of kivi4 that can have an exact form."""
        return int(self.recent_k.shape[1])

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in all layers, K and V and their steps together, without what kivi4 keeps exactly."""
        return token_bytes(self.num_layers, self.num_kv_heads, self.head_dim, self.dtype)

    def new_table(self) -> BlockTable:
        """An empty sequence in this cache."""
        return BlockTable(self.pool, self.block_size)

    def read(self, table: BlockTable, start: int, stop: int) -> KV:
        """Copy the tokens `start .. stop - 1` out.

        Returns KV of `dtype`, [layers, 2 (K, V), stop - start, kv_heads, head_dim], contiguous; KiviKV of kivi4. Raises
        IndexError outside the tokens the table holds, and InputError where these are no whole blocks of kivi4.
        """
        table.require_range(start, stop)
        if self.dtype == "kivi4":
            blocks = table.blocks[kivi_rows.blocks_between(start, stop)]
            codes, params = ([array[:, blocks] for array in pair] for pair in self._coded)
            return kivi_rows.to_rows(codes, params, self.head_dim)
        shape = (self.num_layers, 2, stop - start, self.num_kv_heads)
        values, steps = np.empty((*shape, self._width), self.k.dtype), np.empty(shape, np.uint16)
        for block, inside, outside in _spans(table, start, stop):
            values[:, 0, outside] = self.k[:, block, :, :, inside].transpose(0, 3, 1, 2)
            values[:, 1, outside] = self.v[:, block, :, inside].swapaxes(1, 2)
            if self._has_steps:
                steps[:, 0, outside] = self.k_steps[:, block, :, inside].swapaxes(1, 2)
                steps[:, 1, outside] = self.v_steps[:, block, :, inside].swapaxes(1, 2)
        return QuantisedKV(values, steps) if self._has_steps else values

    def write(self, table: BlockTable, start: int, kv: KV) -> None:
        """The inverse of `read`: put KV [layers, 2, tokens, kv_heads, head_dim] at the tokens from `start` on.

        The table must already hold those tokens (`append`), in blocks that no other sequence holds: IndexError,
        IntegrityError otherwise, and ValueError for another shape or dtype, InputError as `read`; nothing has then been
        written. Blocks of kivi4 have no exact form afterwards.
        """
        self._require_shape(kv, self.num_layers)
        stop = start + token_count(kv)
        table.require_range(start, stop)
        if isinstance(kv, KiviKV):
            self._put_codes(table.blocks[kivi_rows.blocks_between(start, stop)], kv)
        else:
            self._put(slice(None), table, start, kv)

    def _put_codes(self, blocks: NDArray[np.int32], kv: KiviKV) -> None:
        for block in blocks.tolist():
            self._require_writable(block)
        for kind, (codes, params) in enumerate(zip(*self._coded, strict=True)):
            codes[:, blocks] = kivi_rows.codes_of(kv, kind).reshape(self.num_layers, len(blocks), *codes.shape[2:])
            params[:, blocks] = kivi_rows.params_of(kv, kind)
        for block in blocks.tolist():
            self.pool.settle(block)

    def write_layer(self, layer: int, table: BlockTable, start: int, kv: KV) -> None:
        """As `write`, KV of one layer, [1, 2, tokens, kv_heads, head_dim]; the table may have room for the tokens
        (`prepare_write`) and not hold them yet. Not of kivi4."""
        self._require_shape(kv, 1)
        stop = start + values_of(kv).shape[2]
        if not 0 <= start <= stop <= table.capacity:
            raise IndexError(f"tokens {start} .. {stop} of a sequence that has room for {table.capacity}")
        self._put(slice(layer, layer + 1), table, start, kv)

    def _put(self, layers: slice, table: BlockTable, start: int, kv: KV) -> None:
        values, *steps = arrays_of(kv)
        spans = list(_spans(table, start, start + values.shape[2]))
        for block, _, _ in spans:
            self._require_writable(block)
        for block, inside, outside in spans:
            self.k[layers, block, :, :, inside] = values[:, 0, outside].transpose(0, 2, 3, 1)
            self.v[layers, block, :, inside] = values[:, 1, outside].swapaxes(1, 2)
            for part in steps:
                self.k_steps[layers, block, :, inside] = part[:, 0, outside].swapaxes(1, 2)
                self.v_steps[layers, block, :, inside] = part[:, 1, outside].swapaxes(1, 2)

    def _require_writable(self, block: int) -> None:
        if self.pool.ref_count(block) > 1:
            raise IntegrityError(f"a write to block {block} would change {self.pool.ref_count(block)} sequences")
        if self.pool.is_registered(block):
            raise IntegrityError(f"a write to block {block} would change what the prefix index knows of it")

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks in every layer, (source, destination) each, in order."""
        for source, destination in pairs:
            for array in (self.k, self.v, self.k_steps, self.v_steps):
                array[:, destination] = array[:, source]
            here, there = self.pool.recent[[source, destination]].tolist() if self.pool.recent.size else (-1, -1)
            if here >= 0:
                for array in (self.recent_k, self.recent_v):
                    array[:, there] = array[:, here]

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

    @property
    def _coded(self) -> tuple[tuple[NDArray[Any], NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]]:
        """(codes, steps and minimums) of kivi4, of K and of V each."""
        return (self.k, self.v), (self.k_steps, self.v_steps)

    @property
    def _has_steps(self) -> bool:
        return self.k_steps.size > 0

    def _require_shape(self, kv: KV, layers: int) -> None:
        given, tokens = arrays_of(kv), values_of(kv).shape[2:3]
        shape: tuple[int, ...] = (layers, 2, *(tokens or (-1,)), self.num_kv_heads, self._width)
        expected = [(str(self.k.dtype), shape), ("uint16", shape[:4])][: 1 + self._has_steps]
        if self.dtype == "kivi4":
            shape = (*shape[:4], self.head_dim)
            expected = [("uint8", (*shape, KIVI_RUN // 2)), *[("uint16", shape)] * 2]
        found = [(str(array.dtype), array.shape) for array in given]
        if found != expected:
            raise ValueError(f"KV is {_told(found)}, expected {_told(expected)}")


def _told(arrays: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return " with ".join(f"{dtype} {shape}" for dtype, shape in arrays)


def _params(dtype: DType, tokens: int, dim: int) -> int:
    """Numbers of `STEP_BITS` that a head's K of so many tokens has beside its values; its V has as many."""
    if dtype == "kivi4":
        return 2 * tokens * dim // KIVI_RUN
    return tokens if FORMATS[dtype].limit else 0


def token_bytes(layers: int, heads: int, dim: int, dtype: DType) -> int:
    """Bytes of one token in so many layers and KV heads of `dim`: K and V, and what steps and minimums they have."""
    return 2 * layers * heads * (dim * FORMATS[dtype].bits + _params(dtype, 1, dim) * STEP_BITS) // 8


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
