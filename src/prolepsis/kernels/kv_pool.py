"""The blocks of a cache as kernels see them, and in which of their forms they are read and written."""

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from prolepsis.kernels.attention_parts import PART
from prolepsis.kernels.rows import DTYPE_BF16, DTYPES

_KIVI4 = DTYPES["kivi4"]
_BF16: Any = np.int64(DTYPE_BF16)  # of the type that Numba has for a pool's


class KVPool(NamedTuple):
    """The blocks of every layer, flat: k uint16 [layers, blocks, kv_heads, head_dim, block_size], v with the last two
    axes exchanged; `dtype` one of `rows.DTYPES`.

    Where that has fewer than 16 bits, k and v are views of bytes in the same order, one byte for each channel, or for
    two of int4. k_steps, v_steps: the steps of integers, fp16 bits [layers, blocks, kv_heads, block_size], else empty.

    Of kivi4, whose blocks have `attention_parts.PART` tokens, see `kivi` for the order of codes, steps and minimums.
    recent_k, recent_v: bf16 bits of `num_recent` blocks more in each layer, in the order of k and v of bf16. recent
    int32 [blocks]: which of these has a block's exact form, where it is kept.
    """

    k: NDArray[np.uint16]
    v: NDArray[np.uint16]
    k_steps: NDArray[np.uint16]
    v_steps: NDArray[np.uint16]
    num_blocks: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: int
    recent_k: NDArray[np.uint16] = np.empty(0, np.uint16)
    recent_v: NDArray[np.uint16] = np.empty(0, np.uint16)
    recent: NDArray[np.int32] = np.empty(0, np.int32)
    num_recent: int = 0


@njit(inline="always")
def has_codes(pool):
    """Whether full blocks are read as codes that are made of their exact form."""
    return pool.dtype == _KIVI4


@njit(inline="always")
def written_view(pool):
    """The pool that a token's K and V are written to: of kivi4, its exact blocks."""
    if has_codes(pool):
        return KVPool(
            pool.recent_k, pool.recent_v, pool.k_steps, pool.v_steps, pool.num_recent, pool.kv_heads, pool.head_dim,
            pool.block_size, _BF16, pool.recent_k, pool.recent_v, pool.recent, pool.num_recent,
        )  # fmt: skip
    return pool


@njit(inline="always")
def read_view(pool, start, position):
    """The pool that a row at `position` reads the part that begins at `start` from: of kivi4, its own part exactly."""
    return written_view(pool) if start // PART == position // PART else pool


@njit(inline="always")
def block_at(pool, layer, block):
    """Number through all layers of the block that a table calls `block`, in one of the views of its pool."""
    if pool.dtype == DTYPE_BF16 and pool.recent.size > 0:
        block = pool.recent[block]
    return layer * pool.num_blocks + block
