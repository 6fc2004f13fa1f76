"""Models that tests share: a tiny one that lies beside them, and the default one, fetched if need be."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from prolepsis.errors import ProlepsisError

if TYPE_CHECKING:
    from prolepsis import LLM

LONGEST = ("test_coding_across_cpus.py", "test_instruction_sets.py", "test_project.py", "test_examples.py")
"""Files of few tests that take long: at the end, one process would run them while the other has nothing to do."""

TINY = Path(__file__).parent / "data" / "gguf" / "Q4_0.gguf"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; else as they were found."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def _use_cache(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """A cache directory with the models and compiled kernels that are there already, and no profile."""
    from prolepsis.model.pull import cache_directory

    for name in ("models", "kernels"):
        there = cache_directory() / name
        there.mkdir(parents=True, exist_ok=True)
        os.symlink(there.resolve(), directory / name)
    patch.setenv("PROLEPSIS_CACHE", str(directory))


@pytest.fixture(scope="session", autouse=True)
def short_comparisons() -> Iterator[None]:
    """Where it sees a CI, pytest looks for every difference of what an assertion compares: minutes, if that is long."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CI", "BUILD_NUMBER"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is calibrated on this machine changes no test."""
    with pytest.MonkeyPatch.context() as patch:
        _use_cache(patch, tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture
def profiles(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where one test, and no other, keeps profiles."""
    cache = tmp_path_factory.mktemp("cache")
    _use_cache(monkeypatch, cache)
    return cache / "profiles"


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
