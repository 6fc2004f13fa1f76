"""Ctrl-C, kill, closed pipes and full disks: exit codes, and files that are whole."""

import os
import resource
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from command import COMMAND, call, environment, json_of, stalling

PASS = "prolepsis.model.decoder:Decoder:forward"
SAVE = "prolepsis.coding.writer:SessionWriter:finish"
LOAD = "prolepsis.engine.llm:LLM:_check_context"
OLD = b"an older file"


class Process:
    """A command that stands still somewhere, to be struck there."""

    def __init__(self, where: str, *arguments: str | Path, stdin: str = "") -> None:
        self._process = subprocess.Popen(
            stalling(where, *arguments),
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(stdin)
        self._process.stdin.flush()

    def strike(self, signum: int) -> tuple[int, str, str]:
        """Send a signal where the command stands still; exit code, output and errors after that."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line == "stalled\n":
                break
        self._process.send_signal(signum)
        out, err = self._process.communicate(timeout=60)
        return self._process.returncode, out, err


@pytest.mark.parametrize("where", [f"{LOAD}:1", f"{PASS}:2", f"{PASS}:6"], ids=["loading", "prefill", "decode"])
def test_interrupted_generation(tiny: Path, text: Path, where: str) -> None:
    process = Process(where, "generate", "--prompt-file", text, "--model", tiny)
    code, out, err = process.strike(signal.SIGINT)
    assert (code, err) == (130, "")
    assert bool(out) == (where == f"{PASS}:6")


@pytest.mark.parametrize(
    ("where", "signum", "code"),
    [
        (f"{PASS}:2", signal.SIGINT, 130),
        (f"{SAVE}:1", signal.SIGINT, 130),
        (f"{SAVE}:1", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_save_that_is_struck_leaves_the_old_file(
    tiny: Path, text: Path, tmp_path: Path, where: str, signum: int, code: int
) -> None:
    path = tmp_path / "s.pkv"
    path.write_bytes(OLD)
    process = Process(where, "kv", "save", text, "-o", path, "--model", tiny)
    assert process.strike(signum) == (code, "", "")
    assert path.read_bytes() == OLD
    left = [name for name in os.listdir(tmp_path) if name != "s.pkv"]
    assert len(left) == (1 if signum == signal.SIGKILL else 0)
    path.unlink()
    json_of(call("kv", "save", text, "-o", path, "--model", tiny, "--json"))
    assert json_of(call("kv", "verify", path, "--json"))["sound"]


def limited_files() -> None:
    """In a new process: files end at 20,000 bytes, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_a_full_disk_leaves_the_old_file(tiny: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.pkv"
    path.write_bytes(OLD)
    outcome = subprocess.run(
        [*COMMAND, "kv", "save", str(text), "-o", str(path), "--model", str(tiny), "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        preexec_fn=limited_files,
        check=False,
    )
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert outcome.stderr == (
        f"prolepsis: error: {path} cannot be saved: File too large; an older file of that name is unchanged\n"
    )
    assert path.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["s.pkv"]


def shell(line: str) -> tuple[list[int], str]:
    """Run a pipeline in bash: the exit code of each part, and what all of them said on standard error."""
    outcome = subprocess.run(
        ["bash", "-c", line + "; echo ${PIPESTATUS[*]}"], env=environment(), capture_output=True, text=True, check=True
    )
    return [int(code) for code in outcome.stdout.splitlines()[-1].split()], outcome.stderr


def test_a_closed_pipe_is_no_trouble(tiny: Path, saved: Path) -> None:
    prolepsis, model = shlex.join(COMMAND), shlex.quote(str(tiny))
    generate = f"{prolepsis} generate x --model {model} --ignore-eos --max-tokens 1500"
    codes, err = shell(f"{generate} | head -c 1 >/dev/null")
    assert (codes, err) == ([1, 0], "")
    for option in ("", " --json"):
        codes, err = shell(f"{prolepsis} kv inspect {shlex.quote(str(saved))}{option} | true")
        assert (codes, err) == ([1, 0], "")


def test_closed_streams_are_no_trouble(tiny: Path) -> None:
    line = f"{shlex.join(COMMAND)} generate --model {shlex.quote(str(tiny))} --max-tokens 3"
    assert shell(f"{line} x <&- >&- 2>&-") == ([0], "")
    codes, err = shell(f"{line} <&-")
    assert (codes, err) == ([2], "prolepsis: error: the prompt is empty\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_an_error(tiny: Path) -> None:
    line = f"{shlex.join(COMMAND)} generate x --model {shlex.quote(str(tiny))} --max-tokens 3"
    for option in ("", " --json"):
        codes, err = shell(f"{line}{option} >/dev/full")
        assert codes == [1]
        assert err == "prolepsis: error: [Errno 28] No space left on device\n"
