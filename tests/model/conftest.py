"""The tokenizers of the test data, loaded once."""

from pathlib import Path

import pytest

from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def smollm_file() -> GGUFFile:
    """All metadata of the default model, and no tensors."""
    return GGUFFile.open(DATA / "smollm2-vocab.gguf")


@pytest.fixture(scope="session")
def smollm(smollm_file: GGUFFile) -> Tokenizer:
    return Tokenizer.from_gguf(smollm_file)


@pytest.fixture(scope="session")
def small_file() -> GGUFFile:
    """A vocabulary of 1,024 tokens with all 256 bytes, cut like GPT-2."""
    return GGUFFile.open(DATA / "gguf" / "Q4_0.gguf")


@pytest.fixture(scope="session")
def small(small_file: GGUFFile) -> Tokenizer:
    return Tokenizer.from_gguf(small_file)
