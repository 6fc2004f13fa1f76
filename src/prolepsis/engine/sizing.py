"""How much memory a KV cache takes for so many users, by the formula every article has."""

from typing import NamedTuple

from prolepsis.engine.memory import RECENT_IN_PASS
from prolepsis.kv.cache import PagedKVCache, token_bytes
from prolepsis.kv.stored import FORMATS, KIVI_BLOCK, DType
from prolepsis.model.config import ModelConfig


class CacheSize(NamedTuple):
    """Of a cache in which every user holds a whole context, in bytes where nothing else is said.

    formula: 2 (K, V) x users x context x layers x KV heads x head dim x bytes a value. stored: the same with the steps
    that int8, int4 and kivi4 keep beside their values. pool: whole blocks, and what kivi4 keeps exactly.
    block_size: tokens in a block.
    """

    dtype: DType
    token: int
    formula: int
    stored: int
    pool: int
    blocks: int
    block_size: int


def cache_size(config: ModelConfig, dtype: DType, context: int, users: int, block_size: int = 32) -> CacheSize:
    """The cache that holds `users` sequences of `context` tokens which share nothing. kivi4 has its own block size."""
    layers, heads, dim = shape = (config.num_layers, config.num_kv_heads, config.head_dim)
    block_size = KIVI_BLOCK if dtype == "kivi4" else block_size
    token, tokens = token_bytes(*shape, dtype), users * context
    blocks = users * -(-context // block_size)
    exact = users + RECENT_IN_PASS if dtype == "kivi4" else 0
    return CacheSize(
        dtype,
        token,
        2 * tokens * layers * heads * dim * FORMATS[dtype].bits // 8,
        tokens * token,
        blocks * block_size * token + exact * PagedKVCache.exact_block_bytes(*shape, block_size),
        blocks,
        block_size,
    )


def users_that_fit(config: ModelConfig, dtype: DType, context: int, budget: int, block_size: int = 32) -> int:
    """How many such users a cache of `budget` bytes holds."""
    none, one = (cache_size(config, dtype, context, users, block_size).pool for users in (0, 1))
    return max(budget - none, 0) // (one - none)
