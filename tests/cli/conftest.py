"""What all tests of the command line need: compiled kernels, and a saved session to spoil."""

from pathlib import Path

import pytest
from command import call, json_of

TEXT = "A text to read once.\n" * 120


@pytest.fixture(scope="session", autouse=True)
def compiled(tiny: Path) -> None:
    """No command below has to say that it compiles."""
    assert call("warmup", tiny).code == 0


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
