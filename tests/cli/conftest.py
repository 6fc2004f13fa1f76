"""What all tests of the command line need: compiled kernels, and a saved session to spoil."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import call, json_of

TEXT = "A text to read once.\n" * 120


@pytest.fixture(scope="session", autouse=True)
def compiled(tiny: Path) -> None:
    """No command below has to say that it compiles."""
    assert call("warmup", tiny).code == 0


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """Shells start what runs in the background deaf to Ctrl-C, and so would be all processes that tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of several segments."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def saved(text: Path, tiny: Path) -> Path:
    """The session of that text; not to be changed."""
    path = text.with_name("saved.pkv")
    json_of(call("kv", "save", text, "-o", path, "--model", tiny, "--json"))
    return path
