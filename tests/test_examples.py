"""The examples run as they are, each in a process of its own, and show what they promise."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMISES = {
    "codec_alone.py": ["every bit restored: True"],
    "linear_alone.py": ["every bit restored: True"],
    "generate.py": ["the same tokens alone and together: True"],
    "drafts.py": ["the same answer: True"],
    "many_at_once.py": ["finished 2, cancelled 1, blocks in use 0"],
    "chat_session.py": ["math problem is 4", "restored", "question is 4"],
}

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are not beside the tests")


def output_of(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    outcome = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout


def test_there_are_no_other_examples() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISES)


ALONE = ["codec_alone.py", "linear_alone.py"]


@pytest.mark.parametrize("name", ALONE)
def test_the_codec_works_alone(name: str) -> None:
    assert_promised(name, output_of(name))


@pytest.mark.parametrize("name", sorted(PROMISES.keys() - set(ALONE)))
def test_example(name: str, default_model: Path) -> None:
    assert_promised(name, output_of(name, str(default_model)))


def assert_promised(name: str, output: str) -> None:
    missing = [promise for promise in PROMISES[name] if promise not in output]
    assert not missing, output
