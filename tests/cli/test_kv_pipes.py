"""Session files through pipes, and session files that grow: `kv save -o -`, `kv verify -`, `chat --recompute`."""

import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from command import COMMAND, assert_refused, call, environment, json_of, run
from test_chat_piped import chat, messages_in
from test_interrupts import shell

from prolepsis.store import open_session


def test_saving_into_a_pipe(tiny: Path, text: Path, saved: Path) -> None:
    """The file goes to standard output, and everything that is said to standard error."""
    command = [*COMMAND, "kv", "save", str(text), "-o", "-", "--model", str(tiny)]
    outcome = subprocess.run(command, env=environment(), capture_output=True, timeout=120, check=True)
    assert outcome.stdout == saved.read_bytes()
    assert outcome.stderr.startswith(b"saved ")
    outcome = subprocess.run([*command, "--json"], env=environment(), capture_output=True, timeout=120, check=True)
    assert outcome.stdout == saved.read_bytes()
    assert outcome.stderr.startswith(b"{")


def test_a_pipeline(tiny: Path, text: Path) -> None:
    prolepsis, model = shlex.join(COMMAND), shlex.quote(str(tiny))
    line = f"{prolepsis} kv save {shlex.quote(str(text))} -o - --model {model} | {prolepsis} kv verify - | grep agrees"
    codes, err = shell(line)
    assert codes == [0, 0, 0]
    assert err.startswith("saved ")
    codes, _ = shell(f"{prolepsis} kv save {shlex.quote(str(text))} -o - --model {model} | true")
    assert codes == [1, 0]


def test_verifying_and_inspecting_what_comes_in(saved: Path) -> None:
    data = saved.read_bytes()
    verified = json_of(call("kv", "verify", "-", "--json", stdin=data))
    assert verified == json_of(call("kv", "verify", saved, "--json")) | {"file": "-"}
    assert json_of(call("kv", "inspect", "-", "--json", stdin=data)) == json_of(call("kv", "inspect", saved, "--json"))
    assert "every checksum agrees" in call("kv", "verify", "-", stdin=data).out
    assert_refused(
        call("kv", "verify", "-", stdin=data[:-1]), "standard input is truncated: it ends within the trailer"
    )
    assert_refused(call("kv", "inspect", "-", stdin=data[: len(data) // 2]), "standard input is truncated: segment")
    damaged = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    for command in ("verify", "inspect"):
        assert_refused(call("kv", command, "-", stdin=damaged), "standard input: segment", "checksum differs")
    assert_refused(call("kv", "verify", "-", "--against", "x", stdin=data), "--against needs a file")


def test_saving_again_adds_to_the_file(tiny: Path, text: Path, saved: Path, tmp_path: Path) -> None:
    path, longer = tmp_path / "s.pkv", tmp_path / "longer.txt"
    path.write_bytes(saved.read_bytes())
    longer.write_text(text.read_text() + " And so on.")
    report = json_of(call("kv", "save", longer, "-o", path, "--model", tiny, "--json"))
    assert 0 < report["appended_tokens"] < 20
    assert path.read_bytes().startswith(saved.read_bytes())
    assert report["coded_bytes"] == path.stat().st_size
    inspected = json_of(call("kv", "inspect", path, "--json"))
    assert (inspected["saves"], inspected["tokens"]) == (2, report["tokens"])
    assert json_of(call("kv", "verify", path, "--against", tiny, "--json"))["equal_to_recomputed"]
    assert "0 of them added" in call("kv", "save", longer, "-o", path, "--model", tiny).out
    shorter = json_of(call("kv", "save", text, "-o", path, "--model", tiny, "--json"))
    assert shorter["appended_tokens"] is None
    assert path.read_bytes() == saved.read_bytes()


@pytest.mark.parametrize("rest", [b"SEGM", bytes(1000), "half"])
def test_a_chat_whose_last_save_was_broken_off(tiny: Path, tmp_path: Path, rest: bytes | str) -> None:
    """It says what is whole and how to get it, and grows on from there."""
    path = tmp_path / "chat.pkv"
    chat(tiny, "Hello " * 50 + "\n", "--session", path)
    first = path.read_bytes()
    chat(tiny, "Again\n", "--session", path)
    second = path.read_bytes()
    assert second.startswith(first)
    torn = second[: (len(first) + len(second)) // 2] if rest == "half" else second + rest  # type: ignore[operator]
    whole, turns = (first, 1) if rest == "half" else (second, 2)
    path.write_bytes(torn)
    assert_refused(chat(tiny, "Hi\n", "--session", path), str(path), f"up to byte {len(whole)}", "--recompute")
    assert path.read_bytes() == torn
    outcome = chat(tiny, "Hi\n", "--session", path, "--recompute")
    assert outcome.code == 0
    assert "not restored: " in outcome.err
    assert path.read_bytes().startswith(whole)
    assert len(messages_in(path)) == 2 * turns + 2
    assert json_of(call("kv", "verify", path, "--against", tiny, "--json"))["equal_to_recomputed"]


def test_a_chat_computes_again_what_is_damaged_and_mends_the_file(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.pkv"
    chat(tiny, "Hello " * 100 + "\n", "--session", path)
    with open_session(path) as reader:
        at = reader.segments[-1].offset + 100
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert_refused(chat(tiny, "Hi\n", "--session", path), str(path), "checksum differs")
    assert chat(tiny, "Hi\n", "--session", path, "--recompute").code == 0
    assert json_of(call("kv", "verify", path, "--against", tiny, "--json"))["equal_to_recomputed"]


def test_a_terminal_gets_no_file(tiny: Path, text: Path) -> None:
    command = shlex.join([*COMMAND, "kv", "save", str(text), "-o", "-", "--model", str(tiny)])
    outcome = subprocess.run(
        ["script", "-qec", command, "/dev/null"], env=environment(), capture_output=True, timeout=60, check=False
    )
    assert outcome.returncode == 2
    assert b"redirect standard output" in outcome.stdout


def test_profiles(tiny: Path, text: Path, tmp_path: Path) -> None:
    """A profile that a file does not hold must be given to read it."""
    profile, path = tmp_path / "tiny.safetensors", tmp_path / "s.pkv"
    letters = np.random.default_rng(0).choice(list("a long text fills several segments and grows"), 6000)
    (tmp_path / "calibration.txt").write_text("".join(letters))
    arguments = ["--text", tmp_path / "calibration.txt", "-o", profile, "--window", "1024", "--json"]
    fingerprint = json_of(run("calibrate", tiny, *arguments))["fingerprint"]
    json_of(call("kv", "save", text, "-o", path, "--model", tiny, "--profile", profile, "--json"))
    inspected = json_of(call("kv", "inspect", path, "--json"))
    assert (inspected["profile"], inspected["profile_in_file"]) == (fingerprint, False)
    for command in (["kv", "verify", path], ["kv", "load", path, "--model", tiny]):
        assert_refused(call(*command), str(path), f"needs the profile {fingerprint}", "--profile")
        assert call(*command, "--profile", profile, "--model", tiny).code == 0
    verified = json_of(call("kv", "verify", path, "--profile", profile, "--against", tiny, "--json"))
    assert verified["equal_to_recomputed"]
    longer = tmp_path / "longer.txt"
    longer.write_text(text.read_text() + " And so on.")
    report = json_of(call("kv", "save", longer, "-o", path, "--model", tiny, "--profile", profile, "--json"))
    assert report["appended_tokens"]
    assert json_of(call("kv", "save", longer, "-o", path, "--model", tiny, "--json"))["appended_tokens"] is None
