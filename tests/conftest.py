"""Models that tests share: a tiny one that lies beside them, and the default one, fetched if need be."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from prolepsis.errors import ProlepsisError

if TYPE_CHECKING:
    from prolepsis import LLM

TINY = Path(__file__).parent / "data" / "gguf" / "Q4_0.gguf"


@pytest.fixture(scope="session")
def tiny() -> Path:
    """Path of a model of one layer with 1,024 tokens, a chat template and a context of 2,048."""
    return TINY


@pytest.fixture(scope="session")
def tiny_llm(tiny: Path) -> "LLM":
    """The tiny model, loaded. Whoever borrows it gives every block back."""
    from prolepsis import LLM

    return LLM(tiny)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Path of the default model; tests that need it are skipped where it can be neither found nor fetched."""
    from prolepsis.model.pull import DEFAULT_MODEL, resolve

    try:
        return resolve(DEFAULT_MODEL)
    except ProlepsisError as error:
        pytest.skip(f"{DEFAULT_MODEL} cannot be fetched: {error}")
