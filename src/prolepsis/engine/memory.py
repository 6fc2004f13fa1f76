"""How much memory there is, and how the KV cache is cut to it."""

import os
from pathlib import Path

from prolepsis.errors import InputError
from prolepsis.kv.cache import PagedKVCache
from prolepsis.kv.stored import KIVI_BLOCK
from prolepsis.model.config import ModelConfig

_SHARE_OF_FREE = 4  # the cache takes at most one part in this of what is free, unless told otherwise
RECENT_IN_PASS = 3
"""Exact blocks of kivi4 beyond one for each sequence: a pass of a long prompt fills or begins three, and another may
have to be copied."""
_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that this process can take without swapping, as far as the system tells."""
    return min(_free_on_machine(), _free_in_group())


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
            f"a KV cache of {_size(budget)} does not fit into the {_size(free)} of memory that are free; "
            f"lower kv_memory: {_size(free // 2)} would hold {_tokens(free // 2, config, dtype, block_size)} tokens"
        )
    size = free // _SHARE_OF_FREE if budget is None else budget
    recent, exact = 0, PagedKVCache.exact_block_bytes(*shape)
    if dtype == "kivi4":
        recent = min(sequences + RECENT_IN_PASS, size // 2 // exact)
        if recent <= RECENT_IN_PASS:
            raise InputError(
                f"a KV cache of {_size(size)} is too small for kivi4, which keeps {RECENT_IN_PASS + 1} blocks exactly: "
                f"it takes {_size(2 * (RECENT_IN_PASS + 1) * exact)}, or another kv_dtype"
            )
    blocks = PagedKVCache.num_blocks_for(size - recent * exact, *shape, dtype)
    if budget is None:
        blocks = min(blocks, sequences * -(-longest // block_size))
    if max_context is not None and blocks * block_size < max_context:
        needed = size * max_context // (blocks * block_size)
        raise InputError(
            f"max_context {max_context} needs a KV cache of {_size(needed)}, but "
            f"{'a quarter of free memory' if budget is None else 'kv_memory'} is {_size(size)}, enough for "
            f"{blocks * block_size} tokens: lower max_context, raise kv_memory, or choose a smaller kv_dtype"
        )
    return PagedKVCache(*shape, blocks, dtype, recent=recent)


def require_memory(what: str, needed: int) -> None:
    """Raise InputError unless `needed` bytes are free."""
    free = free_memory()
    if needed > free:
        raise InputError(f"{what} needs about {_size(needed)} of memory, but {_size(free)} are free")


def _tokens(budget: int, config: ModelConfig, dtype: str, block_size: int) -> int:
    shape = (config.num_layers, config.num_kv_heads, config.head_dim, block_size)
    return PagedKVCache.num_blocks_for(budget, *shape, dtype) * block_size


def _size(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"


def _free_on_machine() -> int:
    try:
        with open("/proc/meminfo") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _free_in_group() -> int:
    """What the control group of a container leaves; file cache counts as free, since it goes when memory is wanted."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        cache = [
            line.split()[1] for line in (_CGROUP / "memory.stat").read_text().splitlines() if line.startswith("file ")
        ]
        return max(limit - used + sum(map(int, cache)), 0)
    except (OSError, ValueError):
        return 1 << 62
