"""An engine to test, and the promise that no test leaves anything in its cache."""

from collections.abc import Iterator

import pytest

from prolepsis import LLM


@pytest.fixture
def llm(tiny_llm: LLM) -> Iterator[LLM]:
    """The tiny model with an empty cache, which must be empty and sound again afterwards."""
    yield tiny_llm
    tiny_llm.kv_cache.check([])
    assert tiny_llm.kv_cache.pool.num_used == 0
