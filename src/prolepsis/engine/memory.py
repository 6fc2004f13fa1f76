"""How the KV cache is cut to the memory that is free."""

from prolepsis.errors import InputError
from prolepsis.kv.cache import PagedKVCache
from prolepsis.kv.stored import KIVI_BLOCK
from prolepsis.model.config import ModelConfig
from prolepsis.model.memory import free_memory, shown

_SHARE_OF_FREE = 4  # the cache takes at most one part in this of what is free, unless told otherwise
RECENT_IN_PASS = 3
"""Exact blocks of kivi4 beyond one for each sequence: a pass of a long prompt fills or begins three, and another may
have to be copied."""


def new_cache(
    config: ModelConfig,
    *,
    dtype: str,
    block_size: int,
    budget: int | None,
    max_context: int | None,
    longest: int,
    sequences: int,
) -> PagedKVCache:
    """A cache for `config`'s model.

    block_size: of kivi4, which has its own, not looked at. budget: bytes; None for a quarter of free memory, or what
    `sequences` sequences of `longest` tokens take if that is less. Of kivi4, exact blocks take at most half of it, and
    so many that `sequences` can run where they are enough. max_context: tokens it must hold at least; None for what it
    comes to.

    Raises InputError, which says what was needed and what would fit, where the memory or the budget is too small.
    """
    block_size = KIVI_BLOCK if dtype == "kivi4" else block_size
    shape = (config.num_layers, config.num_kv_heads, config.head_dim, block_size)
    free = free_memory()
    if budget is not None and budget > free:
        raise InputError(
            f"a KV cache of {shown(budget)} does not fit into the {shown(free)} of memory that are free; "
            f"lower kv_memory: {shown(free // 2)} would hold {_tokens(free // 2, config, dtype, block_size)} tokens"
        )
    size = free // _SHARE_OF_FREE if budget is None else budget
    recent, exact = 0, PagedKVCache.exact_block_bytes(*shape)
    if dtype == "kivi4":
        recent = min(sequences + RECENT_IN_PASS, size // 2 // exact)
        if recent <= RECENT_IN_PASS:
            raise InputError(
                f"a KV cache of {shown(size)} is too small for kivi4, which keeps {RECENT_IN_PASS + 1} blocks exactly: "
                f"it takes {shown(2 * (RECENT_IN_PASS + 1) * exact)}, or another kv_dtype"
            )
    blocks = PagedKVCache.num_blocks_for(size - recent * exact, *shape, dtype)
    if budget is None:
        blocks = min(blocks, sequences * -(-longest // block_size))
    if max_context is not None and blocks * block_size < max_context:
        needed = size * max_context // (blocks * block_size)
        raise InputError(
            f"max_context {max_context} needs a KV cache of {shown(needed)}, but "
            f"{'a quarter of free memory' if budget is None else 'kv_memory'} is {shown(size)}, enough for "
            f"{blocks * block_size} tokens: lower max_context, raise kv_memory, or choose a smaller kv_dtype"
        )
    return PagedKVCache(*shape, blocks, dtype, recent=recent)


def _tokens(budget: int, config: ModelConfig, dtype: str, block_size: int) -> int:
    shape = (config.num_layers, config.num_kv_heads, config.head_dim, block_size)
    return PagedKVCache.num_blocks_for(budget, *shape, dtype) * block_size
