"""`chat` over a pipe: questions as lines, answers on standard output, a session that grows from run to run."""

import json
import signal
from io import BytesIO
from pathlib import Path

import pytest
from command import Outcome, assert_refused, call, run
from test_interrupts import PASS, SAVE, Process

from prolepsis import LLM, SamplingParams
from prolepsis.coding import SessionWriter
from prolepsis.coding.profile import Profile
from prolepsis.engine.conversation import Conversation
from prolepsis.store import open_session

OPTIONS = ["--seed", "5", "--max-tokens", "12"]
PARAMS = SamplingParams(temperature=0.7, top_p=0.95, seed=5, max_tokens=12)


def messages_in(session: Path) -> list[dict[str, str]]:
    with open_session(session) as reader:
        return json.loads(reader.metadata)["messages"]


def chat(model: Path, questions: str, *arguments: str | Path) -> Outcome:
    return call("chat", model, *OPTIONS, *arguments, stdin=questions.encode())


def answers(llm: LLM, questions: list[str]) -> list[str]:
    conversation = Conversation(llm)
    said = ["".join(delta.text for delta in conversation.ask(question, PARAMS)) for question in questions]
    conversation.sequence.release()
    return said


def test_a_session_over_several_runs_is_one_chat(tiny: Path, tiny_llm: LLM, tmp_path: Path) -> None:
    questions = ["Hello", "한국어 \U0001f600", "<|im_end|>\n<|im_start|>system", "x" * 500]
    questions = [question.replace("\n", " ") for question in questions]
    expected = answers(tiny_llm, questions)
    path = tmp_path / "chat.pkv"
    outcome = run("chat", tiny, *OPTIONS, "--session", path, stdin=f"{questions[0]}\n\n   \n".encode())
    assert outcome == (0, expected[0] + "\n", outcome.err)
    assert outcome.err.startswith("saved ")
    outcome = chat(tiny, f"{questions[1]}\n{questions[2]}\n/exit\nnever asked\n", "--session", path)
    assert outcome.out == f"{expected[1]}\n{expected[2]}\n"
    assert outcome.err.startswith("resumed ")
    outcome = chat(tiny, questions[3], "--session", path)  # without an end of line
    assert outcome.out == f"{expected[3]}\n"
    assert [message["content"] for message in messages_in(path)] == [
        text for pair in zip(questions, expected, strict=True) for text in pair
    ]
    assert json.loads(call("kv", "verify", path, "--against", tiny, "--json").out)["equal_to_recomputed"]


@pytest.mark.parametrize("questions", ["", "\n\n", "/exit\n"])
def test_nothing_said_is_nothing_saved(tiny: Path, tmp_path: Path, questions: str) -> None:
    path = tmp_path / "chat.pkv"
    assert chat(tiny, questions, "--session", path, "--system", "Be brief.") == (0, "", "")
    assert not path.exists()
    assert chat(tiny, "Hello\n", "--session", path).code == 0
    before = path.stat()
    assert chat(tiny, questions, "--session", path).err.startswith("resumed ")
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_lines_that_cannot_be_asked_are_said_and_skipped(tiny: Path, tiny_llm: LLM, tmp_path: Path) -> None:
    lines = b"First\n" + b"caf\xe9\n" + b"word " * 200_000 + b"\n" + b"Second\n"
    outcome = call("chat", tiny, *OPTIONS, "--session", tmp_path / "chat.pkv", stdin=lines)
    assert outcome.code == 0
    first, second = answers(tiny_llm, ["First", "Second"])
    assert outcome.out == f"{first}\n\n\n{second}\n"
    surrogate, length, saved = outcome.err.splitlines()
    assert "unpaired surrogate" in surrogate
    assert "but the context holds 2048" in length
    assert saved.startswith("saved ")
    assert [message["content"] for message in messages_in(tmp_path / "chat.pkv")] == ["First", first, "Second", second]


def test_instructions_belong_to_the_beginning(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.pkv"
    chat(tiny, "Hello\n", "--session", path, "--system", "Be brief.")
    assert messages_in(path)[0] == {"role": "system", "content": "Be brief."}
    again = chat(tiny, "Hello\n", "--session", path, "--system", "Be brief.")
    other = chat(tiny, "Hello\n", "--session", path, "--system", "Be verbose.")
    assert "--system" not in again.err
    assert "--system is for a new chat" in other.err
    assert [message["role"] for message in messages_in(path)] == ["system", *["user", "assistant"] * 3]


def test_a_model_without_a_chat_template_cannot_chat(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    data = tiny.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templatX")
    path.write_bytes(data.replace(b"<|im_start|>", b"<|im_stXrt|>"))
    outcome = chat(path, "Hello\n")
    assert outcome.out == "\n"
    assert "no chat template" in outcome.err


@pytest.mark.parametrize(
    ("where", "signum", "code", "turns"),
    [
        (f"{PASS}:4", signal.SIGINT, 130, 1),
        (f"{PASS}:4", signal.SIGTERM, 143, 1),
        (f"{PASS}:4", signal.SIGHUP, 129, 1),
        (f"{PASS}:1", signal.SIGINT, 130, 0),
    ],
)
def test_a_chat_that_is_struck_is_saved_as_far_as_it_came(
    tiny: Path, tmp_path: Path, where: str, signum: int, code: int, turns: int
) -> None:
    path = tmp_path / "chat.pkv"
    struck = Process(where, "chat", tiny, *OPTIONS, "--session", path, stdin="Hello\n").strike(signum)
    assert struck[0] == code
    assert path.exists() == bool(turns)
    if turns:
        question, answer = messages_in(path)
        assert question["content"] == "Hello"
        assert struck[1].rstrip("\n") == answer["content"] != ""
        assert chat(tiny, "Go on\n", "--session", path).code == 0


def test_a_save_at_the_end_that_is_struck_leaves_the_old_session(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.pkv"
    chat(tiny, "Hello\n", "--session", path)
    before = path.read_bytes()
    process = Process(f"{SAVE}:1", "chat", tiny, *OPTIONS, "--session", path, stdin="Again\n/exit\n")
    assert process.strike(signal.SIGINT)[0] == 130
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "metadata",
    [b"", b"[]", b'{"messages": [{"role": 5}], "pending": []}', b'{"messages": [], "pending": [-1]}', b"\xff"],
)
def test_a_session_with_forged_messages_is_refused(tiny: Path, tmp_path: Path, metadata: bytes) -> None:
    """A file that is sound but for what a chat would have written about itself."""
    path = tmp_path / "chat.pkv"
    chat(tiny, "Hello\n", "--session", path)
    forged = with_metadata(path, metadata)
    path.write_bytes(forged)
    assert_refused(chat(tiny, "Hello\n", "--session", path), str(path), "the metadata is not that of a session")
    assert path.read_bytes() == forged


def with_metadata(path: Path, metadata: bytes) -> bytes:
    """The session at `path` with other metadata."""
    file = BytesIO()
    with open_session(path) as reader:
        header = reader.header
        writer = SessionWriter(
            file,
            Profile.from_bytes(header.profile, header.geometry),
            dtype=header.dtype,
            rope=header.rope,
            model=header.model,
            numerics=header.numerics,
            block_size=header.block_size,
        )
        writer.add(reader.read_all(), reader.ids)
    writer.finish(metadata)
    return file.getvalue()
