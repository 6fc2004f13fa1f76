"""An engine to test, and the promise that no test leaves anything in its cache."""

from collections.abc import Iterator

import pytest

from prolepsis import LLM

NAN = 0x7FC0  # in bf16


@pytest.fixture
def llm(tiny_llm: LLM) -> Iterator[LLM]:
    """The tiny model with an empty cache, which must be empty and sound again afterwards."""
    assert tiny_llm.engine.prefix is not None
    tiny_llm.engine.prefix.clear()
    tiny_llm.kv_cache.k.fill(NAN)  # so that K and V which were never computed cannot pass for those that were
    tiny_llm.kv_cache.v.fill(NAN)
    yield tiny_llm
    tiny_llm.kv_cache.check([])
    tiny_llm.engine.prefix.check()
    assert not tiny_llm.engine.has_work
    assert tiny_llm.kv_cache.pool.num_used == 0
