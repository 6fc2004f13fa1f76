"""`chat` and `generate` at a terminal: keys are typed into a pseudo-terminal, and what it shows is read."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command import COMMAND, environment, stalling
from test_chat_piped import messages_in
from test_interrupts import PASS

pytestmark = pytest.mark.skipif(shutil.which("setsid") is None, reason="needs setsid (util-linux)")

CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """A command whose standard streams are a terminal of its own."""

    def __init__(self, command: list[str]) -> None:
        self._screen, self._end = pty.openpty()
        self._before = termios.tcgetattr(self._end)
        self._process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *command],
            env={**environment(), "TERM": "xterm"},
            stdin=self._end,
            stdout=self._end,
            stderr=self._end,
        )
        self.shown = ""

    def type(self, keys: str | bytes) -> None:
        """Press keys."""
        os.write(self._screen, keys.encode() if isinstance(keys, str) else keys)

    def wait_for(self, text: str, pressing: bytes = b"") -> None:
        """Read until `text` is shown that has not been waited for yet.

        pressing: keys to press now, and again whenever nothing is shown for a while. Between showing its prompt and
        waiting for keys, Python's `input` misses a Ctrl-C until the next key; nobody types that fast.
        """
        self.type(pressing)
        deadline = time.monotonic() + 60
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} does not come, only {self.shown!r}"
            if select.select([self._screen], [], [], 5)[0]:
                self.shown += os.read(self._screen, 4096).decode("utf-8", "replace")
            else:
                self.type(pressing)
        self.shown = self.shown.partition(text)[2]

    def exit_code(self) -> int:
        """Wait for the end; the terminal must then be set as it was."""
        deadline = time.monotonic() + 60
        while self._process.poll() is None:
            assert time.monotonic() < deadline, self.shown
            self._drain()
        self._drain()
        assert termios.tcgetattr(self._end) == self._before
        return self._process.returncode

    def _drain(self) -> None:
        while select.select([self._screen], [], [], 0.05)[0]:
            self.shown += os.read(self._screen, 4096).decode("utf-8", "replace")

    def close(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._screen)
        os.close(self._end)


@contextmanager
def terminal(command: list[str]) -> Iterator[Terminal]:
    opened = Terminal(command)
    try:
        yield opened
    finally:
        opened.close()


def test_a_chat_at_a_terminal(tiny: Path, tmp_path: Path) -> None:
    """Questions, a stopped answer after which the chat goes on, and Ctrl-D."""
    path = tmp_path / "chat.pkv"
    arguments = ["chat", str(tiny), "--session", str(path), "--seed", "5", "--max-tokens", "8"]
    with terminal(stalling(f"{PASS}:12", *arguments)) as chat:
        chat.wait_for("> ")
        chat.type("Hello\n")
        chat.wait_for("> ")
        chat.type("Stop me\n")
        chat.wait_for("stalled")
        chat.type(CTRL_C)
        chat.wait_for("(stopped)")
        chat.wait_for("> ")
        chat.type("Hellp\x7fo again\n")
        chat.wait_for("> ")
        chat.type(CTRL_D)
        chat.wait_for("saved ")
        assert chat.exit_code() == 0
        assert "Traceback" not in chat.shown
    questions = [message["content"] for message in messages_in(path) if message["role"] == "user"]
    assert questions == ["Hello", "Stop me", "Hello again"]


def test_ctrl_c_between_answers_ends_and_saves(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.pkv"
    arguments = ["chat", str(tiny), "--session", str(path), "--seed", "5", "--max-tokens", "4"]
    with terminal([*COMMAND, *arguments]) as chat:
        chat.wait_for("> ")
        chat.type("Hello\n")
        chat.wait_for("> ")
        chat.wait_for("saved ", pressing=CTRL_C)
        assert chat.exit_code() == 128 + signal.SIGINT
    assert len(messages_in(path)) == 2


def test_ctrl_c_during_generation(tiny: Path, text: Path) -> None:
    with terminal(stalling(f"{PASS}:3", "generate", "--model", str(tiny), "--prompt-file", str(text))) as generation:
        generation.wait_for("stalled")
        generation.type(CTRL_C)
        assert generation.exit_code() == 130
        assert "Traceback" not in generation.shown


def test_a_missing_prompt_at_a_terminal_is_an_error(tiny: Path) -> None:
    with terminal([*COMMAND, "generate", "--model", str(tiny)]) as generation:
        generation.wait_for("prolepsis: error: no prompt; give it as an argument")
        assert generation.exit_code() == 2


def test_json_at_a_terminal_is_json(tiny: Path, text: Path, tmp_path: Path) -> None:
    """The progress bar is on the terminal, the object in the file."""
    out = tmp_path / "out.json"
    line = 'f="$1"; shift; "$@" > "$f"'
    arguments = ["kv", "save", str(text), "-o", str(tmp_path / "s.pkv"), "--model", str(tiny), "--json"]
    with terminal(["bash", "-c", line, "bash", str(out), *COMMAND, *arguments]) as saving:
        assert saving.exit_code() == 0
    assert json.loads(out.read_text())["tokens"] > 512
