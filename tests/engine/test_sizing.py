"""The memory that is planned is the memory that a cache takes."""

import pytest

from prolepsis import LLM
from prolepsis.engine.memory import RECENT_IN_PASS
from prolepsis.engine.sizing import cache_size, users_that_fit
from prolepsis.kv.cache import PagedKVCache
from prolepsis.kv.stored import DTYPES, DType


def taken(cache: PagedKVCache) -> int:
    arrays = (cache.k, cache.v, cache.k_steps, cache.v_steps, cache.recent_k, cache.recent_v)
    return sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("context", "users"), [(1, 1), (200, 3)])
def test_a_cache_takes_what_was_planned(tiny_llm: LLM, dtype: DType, context: int, users: int) -> None:
    config = tiny_llm.config
    size = cache_size(config, dtype, context, users)
    exact = users + RECENT_IN_PASS if dtype == "kivi4" else None
    shape = (config.num_layers, config.num_kv_heads, config.head_dim, size.block_size)
    # More blocks than exact ones, as kivi4 has no more of these than of those.
    spare = RECENT_IN_PASS if dtype == "kivi4" else 0
    cache = PagedKVCache(*shape, size.blocks + spare, dtype, recent=exact)
    assert taken(cache) == size.pool + spare * size.block_size * size.token
    assert cache.bytes_per_token == size.token
    assert size.formula <= size.stored == users * context * size.token <= size.pool


def test_the_formula_of_the_article(tiny_llm: LLM) -> None:
    config = tiny_llm.config
    values = 2 * 20 * 32768 * config.num_layers * config.num_kv_heads * config.head_dim
    assert [cache_size(config, dtype, 32768, 20).formula for dtype in ("bf16", "fp8_e4m3", "int4")] == [
        2 * values,
        values,
        values // 2,
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_many_users_fit_as_are_said_to(tiny_llm: LLM, dtype: DType) -> None:
    for budget in (0, 1 << 20, 100_000_000):
        users = users_that_fit(tiny_llm.config, dtype, 300, budget)
        assert users == 0 or cache_size(tiny_llm.config, dtype, 300, users).pool <= budget
        assert cache_size(tiny_llm.config, dtype, 300, users + 1).pool > budget
