"""Bad input: exit code 2, one line that names what is wrong, and no file touched."""

import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import assert_refused, call, json_of

from prolepsis.coding import encode


def patched(data: bytes, after: bytes, skip: int, new: bytes) -> bytes:
    """`data` with the bytes that lie `skip` behind `after` replaced."""
    at = data.index(after) + len(after) + skip
    return data[:at] + new + data[at + len(new) :]


# A tensor's record: name, number of dimensions (uint32), dimensions (uint64 each), type (uint32), offset.
BAD_MODELS: dict[str, tuple[Callable[[bytes], bytes], list[str]]] = {
    "empty": (lambda _: b"", ["empty"]),
    "text": (lambda _: b"hello, this is not a model", ["GGUF"]),
    "header only": (lambda data: data[:20], ["truncated"]),
    "truncated": (lambda data: data[: len(data) // 2], ["truncated"]),
    "one byte short": (lambda data: data[:-1], ["truncated"]),
    "big-endian": (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], ["big-endian"]),
    "future version": (lambda data: data[:4] + struct.pack("<I", 99) + data[8:], ["version 99"]),
    "architecture": (lambda data: patched(data, b"general.architecture", 12, b"mamba"), ["mamba", "llama"]),
    "tensor type": (
        lambda data: patched(data, b"token_embd.weight", 4 + 16, struct.pack("<I", 40)),
        ["token_embd.weight", "NVFP4"],
    ),
    "unknown tensor type": (
        lambda data: patched(data, b"token_embd.weight", 4 + 16, struct.pack("<I", 999)),
        ["token_embd.weight", "999"],
    ),
}


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_models(kind: str, tiny: Path, tmp_path: Path) -> None:
    spoil, parts = BAD_MODELS[kind]
    path = tmp_path / "model.gguf"
    path.write_bytes(spoil(tiny.read_bytes()))
    assert_refused(call("generate", "x", "--model", path, "--json"), str(path), *parts)


def test_models_that_are_not_there(tmp_path: Path) -> None:
    assert_refused(call("generate", "x", "--model", tmp_path / "no.gguf"), "no.gguf", "no such file")
    assert_refused(call("chat", tmp_path), str(tmp_path), "is a directory")
    assert_refused(call("bench", "nonsense"), "unknown model 'nonsense'", "smollm2:135m")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["word " * 3000], ["tokens, but the context holds 2048"]),
        (["word " * 30, "--max-context", "20"], ["tokens, but the context holds 20"]),
        ([""], ["the prompt is empty"]),
        (["x", "--max-context", "5000"], ["max_context must be in 2 .. 2048"]),
        (["x", "--kv-memory", "lots"], ["--kv-memory 'lots' is not a size"]),
        (["x", "--kv-memory", "-1MiB"], ["--kv-memory '-1MiB' is not a size"]),
        (["x", "--kv-memory", "nan"], ["--kv-memory 'nan' is not a size"]),
        (["x", "--kv-memory", "1e999GB"], ["--kv-memory '1e999GB' is not a size"]),
        (["x", "--kv-memory", "5 bytes"], ["--kv-memory '5 bytes' is not a size"]),
        (["x", "--kv-memory", "1KiB"], ["1024 bytes holds no block"]),
        (["x", "--kv-memory", "900000TiB"], ["a KV cache of 921600000.00 GiB does not fit", "would hold"]),
        (["x", "--kv-memory", "64KiB", "--max-context", "2000"], ["max_context 2000 needs a KV cache of"]),
        (["x", "--n", "0"], ["n must be an integer in 1 .. 128"]),
        (["x", "--n", "3", "--best-of", "2"], ["best_of must be an integer in n (3) .. 128"]),
        (["x", "--n", "3"], ["--n and --best-of need --temperature above 0"]),
        (["x", "--length-penalty", "2"], ["--early-stopping are for a beam search: add --beam-width"]),
        (["x", "--beam-width", "0"], ["beam_width must be an integer in 1 .. 64"]),
        (["x", "--beam-width", "2", "--n", "3"], ["n must be an integer in 1 .. beam_width (2)"]),
        (["x", "--beam-width", "2", "--seed", "1"], ["--seed is for sampling: leave it out, or --beam-width"]),
        (["x", "--regex", "(("], ["--regex: ", "unclosed group"]),
        (["x", "--regex", "a", "--json-schema", "-"], ["give --json-schema or --regex, not both"]),
        (["x", "--regex", "a", "--ignore-eos"], ["ignore_eos must be False where there is a grammar"]),
        (["x", "--regex", "a", "--beam-width", "2"], ["--regex is for sampling: leave it out, or --beam-width"]),
        (["x", "--json-schema", "/no/such/file"], ["--json-schema", "/no/such/file"]),
        (["x", "--beam-width", "2", "--top-p", "0.5"], ["--top-p is for sampling"]),
        (["x", "--beam-width", "2", "--early-stopping", "soon"], ["--early-stopping", "never"]),
        (["x", "--kv-dtype", "int3"], ["'int3' is not supported", "bf16"]),
        (["x", "--threads", "0"], ["threads must be in 1"]),
        (["x", "--temperature", "-1"], ["temperature must be"]),
        (["x", "--temperature", "nan"], ["temperature must be"]),
        (["x", "--top-p", "0"], ["top_p must be"]),
        (["x", "--max-tokens", "0"], ["max_tokens must be"]),
        (["x", "--seed", "-1"], ["seed must be"]),
        (["x", "--logprobs", "1"], ["--logprobs is reported with --json only"]),
        (["x", "--json", "--logprobs", "99"], ["logprobs must be"]),
        (["x", "--stop", ""], ["stop must hold"]),
        (["x", "--prompt-file", "y"], ["--prompt-file, not both"]),
        (["--prompt-file", "/"], ["--prompt-file: cannot read /", "directory"]),
        (["--prompt-file", "missing.txt"], ["--prompt-file: cannot read missing.txt"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_prompts_and_settings(tiny: Path, arguments: list[str], parts: list[str]) -> None:
    assert_refused(call("generate", *arguments, "--model", tiny), *parts)


def test_text_files(tiny: Path, tmp_path: Path) -> None:
    latin, empty, output = tmp_path / "latin.txt", tmp_path / "empty.txt", tmp_path / "out.pkv"
    latin.write_bytes("naïve".encode("latin-1"))
    empty.write_bytes(b"")
    for command in (["generate", "--prompt-file"], ["ppl"], ["kv", "save", "-o", output]):
        assert_refused(call(*command, latin, "--model", tiny), str(latin), "is not UTF-8 text (byte 2)")
        assert_refused(call(*command, tmp_path, "--model", tiny), str(tmp_path), "directory")
        assert_refused(call(*command, empty, "--model", tiny), "empty" if "ppl" not in command else "at least 2")
        assert_refused(call(*command, "-", "--model", tiny, stdin=b"\xff"), "- is not UTF-8 text (byte 0)")
    assert_refused(call("generate", "--prompt-file", "/dev/zero", "--model", tiny), "is longer than 64 MiB")
    assert not output.exists()


def test_numbers_that_make_no_sense(tiny: Path, text: Path) -> None:
    assert_refused(call("ppl", text, "--model", tiny, "--context", "1"), "--context must be at least 2")
    assert_refused(call("bench", tiny, "--runs", "0"), "--runs must be at least 1")
    assert_refused(call("bench", tiny, "--prompt-tokens", "2048"), "exceed the context of 2048")


BAD_SESSIONS: dict[str, tuple[Callable[[bytes], bytes], list[str]]] = {
    "empty": (lambda _: b"", ["is empty"]),
    "foreign": (lambda _: b"GGUF" + bytes(100), ["is not a Prolepsis session file"]),
    "preamble only": (lambda data: data[:20], ["truncated"]),
    "truncated": (lambda data: data[: len(data) // 2], ["truncated"]),
    "one byte short": (lambda data: data[:-1], ["truncated"]),
    "something appended": (lambda data: data + b"x", ["behind the trailer"]),
    "header": (lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], ["header is damaged"]),
    "payload": (lambda data: data[:-20000] + bytes([data[-20000] ^ 1]) + data[-19999:], ["segment", "checksum"]),
    "future version": (lambda data: data[:8] + b"\x63" + data[9:], ["version 99", "upgrade"]),
}


@pytest.mark.parametrize("kind", BAD_SESSIONS)
def test_sessions(kind: str, saved: Path, tiny: Path, tmp_path: Path) -> None:
    spoil, parts = BAD_SESSIONS[kind]
    path = tmp_path / "chat.pkv"
    path.write_bytes(spoil(saved.read_bytes()))
    before = path.read_bytes()
    for command in (["kv", "load", path, "--model", tiny], ["kv", "verify", path], ["chat", tiny, "--session", path]):
        assert_refused(call(*command, stdin=b"Hello\n"), str(path), *parts)
        assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["chat.pkv"]


def test_sessions_that_do_not_fit(saved: Path, tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    data = bytearray(tiny.read_bytes())
    data[-1000] ^= 1
    other.write_bytes(data)
    load = ["kv", "load", saved, "--model"]
    assert_refused(call(*load, other), str(saved), "was saved with another model: file:")
    assert_refused(call("kv", "verify", saved, "--against", other), "was saved with another model: file:")
    assert_refused(
        call(*load, tiny, "--kv-dtype", "fp16"),
        str(saved),
        "holds a bf16 cache and this one is fp16: use --kv-dtype bf16",
    )
    assert_refused(call(*load, tiny, "--max-context", "100"), str(saved), "but the context holds 100")
    assert_refused(call("chat", tiny, "--session", saved), str(saved), "holds the KV cache of a text, not a chat")
    assert_refused(call("kv", "inspect", tmp_path / "no.pkv"), "no.pkv does not exist")
    assert_refused(call("kv", "verify", tmp_path), str(tmp_path), "Is a directory")


def test_a_session_of_nothing_can_be_looked_into_but_not_continued(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.pkv"
    path.write_bytes(encode(np.zeros((1, 2, 0, 2, 64), np.float16)))
    assert json_of(call("kv", "inspect", path, "--json"))["tokens"] == 0
    assert call("kv", "inspect", path).code == 0
    assert json_of(call("kv", "verify", path, "--json"))["sound"]
    assert_refused(call("kv", "load", path, "--model", tiny), str(path), "was saved with another model")


def test_outputs_that_cannot_be_written(tiny: Path, text: Path, tmp_path: Path) -> None:
    """Said before the model is even loaded."""
    for path, part in (
        (tmp_path, "is a directory"),
        (tmp_path / "no" / "s.pkv", "there is no directory"),
        (Path("/dev/null"), "is not a regular file"),
    ):
        assert_refused(call("kv", "save", text, "-o", path, "--model", "missing.gguf"), str(path), part)
        assert_refused(call("chat", "missing.gguf", "--session", path), str(path), part)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_a_protected_directory_is_refused_at_once(tiny: Path, text: Path, tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert_refused(call("kv", "save", text, "-o", tmp_path / "s.pkv", "--model", tiny), "write-protected")
    finally:
        tmp_path.chmod(stat.S_IRWXU)
