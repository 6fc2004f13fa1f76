"""A server of the tiny model for each module of tests, and the official client for it."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from served import Served, serving


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[Served]:
    """The tiny model, for whoever asks."""
    with serving(tiny) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client
