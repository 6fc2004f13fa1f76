"""K and V of a pool (`kv_pool.KVPool`) in the 16 bits that attention reads, where it stores fewer."""

from numba import njit

from prolepsis.kernels.kivi import read_keys, read_values
from prolepsis.kernels.narrow_kv import attended, widen_keys, widen_values
from prolepsis.kernels.rows import DTYPE_BF16, DTYPE_FP16, DTYPES

_INT4, _KIVI4 = DTYPES["int4"], DTYPES["kivi4"]


@njit(cache=True)
def is_narrow(dtype):
    """Whether a dtype's values have fewer than 16 bits."""
    return dtype > DTYPE_FP16


@njit(cache=True)
def bytes_of(dtype, channels):
    """Bytes of so many values of a narrow dtype."""
    return channels // 2 if dtype == _INT4 else channels


@njit(cache=True)
def is_brain(dtype):
    """Whether attention reads a dtype as bf16."""
    return dtype == DTYPE_BF16 or (is_narrow(dtype) and attended(dtype) == DTYPE_BF16)


@njit(cache=True)
def widen_unit(pool, first, second, wide):
    """wide[d, :32] = K of two runs of 16 tokens; first, second: where they lie, (block and head, slot) each.

    Called and not inlined, as `widen_block`: compiling it takes a while.
    """
    if pool.dtype == _KIVI4:
        read_keys(pool, first[0], first[1], wide)
        return
    size, head = pool.block_size, pool.head_dim * pool.block_size
    widen_keys(
        pool.dtype, pool.k, bytes_of(pool.dtype, first[0] * head) + first[1],
        bytes_of(pool.dtype, second[0] * head) + second[1], size, pool.head_dim, pool.k_steps,
        first[0] * size + first[1], second[0] * size + second[1], wide,
    )  # fmt: skip


@njit(cache=True)
def widen_block(pool, block, count, wide):
    """wide[t] = V of the first tokens of a block, numbered with the head."""
    if pool.dtype == _KIVI4:
        read_values(pool, block, count, wide)
        return
    at = bytes_of(pool.dtype, block * pool.head_dim * pool.block_size)
    widen_values(pool.dtype, pool.v, at, count, pool.head_dim, pool.v_steps, block * pool.block_size, wide)
