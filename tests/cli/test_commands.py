"""What every command says when all is well; with --json, one object and nothing else."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import Outcome, assert_refused, call, json_of, run

from prolepsis import LLM
from prolepsis.cli.app import app_for
from prolepsis.engine.perplexity import measure_perplexity

COMMANDS = [
    "demo",
    "generate",
    "chat",
    "serve",
    "pull",
    "bench",
    "ppl",
    "quantize",
    "calibrate",
    "warmup",
    "kv save",
    "kv load",
    "kv inspect",
    "kv verify",
    "kv bench",
    "kv plan",
]


@pytest.mark.parametrize("command", ["", "kv", *COMMANDS])
def test_help(command: str) -> None:
    outcome = call(*command.split(), "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert "Usage: prolepsis " + command in outcome.out


def test_help_lists_every_command_and_comes_unasked() -> None:
    for group in ("", "kv"):
        outcome = call(*group.split())
        assert outcome.code == 0
        for command in COMMANDS:
            first, _, rest = command.partition(" ")
            if (first if rest else "") == group:
                assert re.search(rf"^. {rest or first}\b", outcome.out, re.MULTILINE), command


def test_version() -> None:
    outcome = call("--version")
    assert outcome.code == 0
    assert re.fullmatch(r"prolepsis .+\n", outcome.out)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_alone_on_its_command_line(command: str) -> None:
    app = app_for([*command.split(), "--flag"])
    found = [each.name for each in app.registered_commands]
    for group in app.registered_groups:
        assert group.typer_instance is not None
        found += [f"{group.name} {each.name}" for each in group.typer_instance.registered_commands]
    assert found == [command]


def test_a_command_waits_for_no_other() -> None:
    """Their imports would be half of what it takes to start."""
    code = "import sys\nfrom prolepsis.cli.app import app_for\napp_for(['pull', 'x'])\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "prolepsis.cli.models" in loaded
    others = {"generate", "chat", "serve", "bench", "quantize", "calibrate", "kv", "kv_bench", "kv_plan"}
    assert not others & {name.removeprefix("prolepsis.cli.") for name in loaded}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--wrong"], "--wrong"),
        (["kv", "sav"], "'sav'"),
        (["kv", "save"], "(see `prolepsis kv save --help`)"),
        (["generate", "x", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "x", "--seed"], "--seed"),
        (["ppl", "a", "b"], "b"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], part: str) -> None:
    assert_refused(call(*arguments), part, "--help`)")


def test_generate(tiny: Path) -> None:
    arguments = ["generate", "The licence", "--model", tiny, "--max-tokens", "12", "--ignore-eos"]
    shown = call(*arguments)
    record = json_of(call(*arguments, "--json", "--logprobs", "2"))
    assert (shown.code, shown.err) == (0, "")
    assert shown.out == record["text"] + "\n"
    assert record["model"] == str(tiny)
    assert record["finish_reason"] == "length"
    assert len(record["token_ids"]) == len(record["logprobs"]) == 12
    assert "".join(entry["text"] for entry in record["logprobs"]) == record["text"]
    assert all(len(entry["top"]) == 2 for entry in record["logprobs"])


def test_generate_follows_a_grammar(tiny: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [[1], "x"]}')
    assert json.loads(call("generate", "a", "--model", tiny, "--json-schema", schema).out) in ([1], "x")
    assert call("generate", "a", "--model", tiny, "--regex", "[0-9]{5}").out.strip().isdecimal()
    schema.write_text("{")
    assert_refused(call("generate", "a", "--model", tiny, "--json-schema", schema), "--json-schema", "is not JSON")


def test_several_completions_and_beams(tiny: Path) -> None:
    arguments = ["generate", "The licence", "--model", tiny, "--max-tokens", "9", "--ignore-eos"]
    sampled = ["--n", "2", "--best-of", "3", "--temperature", "0.9", "--seed", "4"]
    for flags, scored in ((sampled, False), (["--beam-width", "3", "--n", "2", "--early-stopping", "never"], True)):
        shown = call(*arguments, *flags)
        first, second = json_of(call(*arguments, *flags, "--json"))["completions"]
        assert shown.out == f"--- 1 of 2 ---\n{first['text']}\n--- 2 of 2 ---\n{second['text']}\n"
        assert len(first["token_ids"]) == 9
        assert first["cumulative_logprob"] >= second["cumulative_logprob"]
        assert (first["score"] is not None) == scored
        assert first["statistics"]["ttft_s"] > 0
    best = call(*arguments, "--beam-width", "3", "--early-stopping", "never")
    assert best.out == first["text"] + "\n"


def test_a_prompt_comes_from_an_argument_a_file_or_standard_input(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Grüße, 안녕 \U0001f600", "utf-8")
    options = ["--model", tiny, "--max-tokens", "4", "--seed", "3", "--temperature", "1", "--json"]

    def record(outcome: Outcome) -> dict[str, Any]:
        """What was answered, without how long it took."""
        found = json_of(outcome)
        assert found.pop("statistics")["ttft_s"] > 0
        return found

    by_argument = record(call("generate", file.read_text("utf-8"), *options))
    assert by_argument["prompt_tokens"] > 5
    assert record(call("generate", *options, stdin=file.read_bytes())) == by_argument
    assert record(call("generate", "--prompt-file", file, *options)) == by_argument
    assert record(call("generate", "--prompt-file", "-", *options, stdin=file.read_bytes())) == by_argument
    assert record(run("generate", *options, stdin=file.read_bytes())) == by_argument
    chat = record(call("generate", "--prompt-file", file, "--chat", *options))
    assert chat["prompt_tokens"] > by_argument["prompt_tokens"] + 5


def test_a_locale_without_the_characters_breaks_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    options = ["--model", tiny, "--max-tokens", "200", "--temperature", "50", "--seed", "1", "--ignore-eos"]
    assert run("generate", "x", *options).code == 0
    record = json_of(run("generate", "x", *options, "--json"))
    assert "\ufffd" in record["text"]


def test_saving_loading_inspecting_verifying(tiny: Path, text: Path, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "[" / "red] name.pkv"  # "[/red]" means something to what draws the tables
    path.parent.mkdir()
    report = json_of(call("kv", "save", text, "-o", path, "--model", tiny, "--json"))
    assert path.read_bytes() == saved.read_bytes()
    assert report["tokens"] > 512
    assert report["raw_bytes"] == report["tokens"] * 2 * 2 * 64 * 2
    assert report["coded_bytes"] == path.stat().st_size
    assert report["ratio"] == report["raw_bytes"] / report["coded_bytes"] > 1

    inspected = json_of(call("kv", "inspect", path, "--json"))
    assert inspected["tokens"] == report["tokens"]
    assert inspected["dtype"] == "bf16"
    assert call("kv", "inspect", path).code == 0

    verified = json_of(call("kv", "verify", path, "--against", tiny, "--json"))
    assert verified["sound"] is verified["equal_to_recomputed"] is True
    assert "every bit agrees" in call("kv", "verify", path, "--against", tiny).out

    loaded = json_of(call("kv", "load", path, "--model", tiny, "--max-tokens", "8", "--json"))
    assert loaded["restored_tokens"] == loaded["cached_tokens"] == loaded["prompt_tokens"] == report["tokens"]
    generated = json_of(call("generate", "--prompt-file", text, "--model", tiny, "--max-tokens", "8", "--json"))
    assert (loaded["token_ids"], loaded["text"]) == (generated["token_ids"], generated["text"])
    shown = run("kv", "load", path, "--model", tiny, "--max-tokens", "8", "--prompt", " Then")
    assert shown.code == 0
    assert re.fullmatch(r"restored \d+ of \d+ tokens in [\d.]+ s\n", shown.err)


@pytest.mark.parametrize(
    ("asked", "dtype", "head_bytes"), [("fp8", "fp8_e4m3", 64), ("int4", "int4", 34), ("kivi4", "kivi4", 40)]
)
def test_sessions_of_narrow_caches(
    tiny: Path, text: Path, tmp_path: Path, asked: str, dtype: str, head_bytes: int
) -> None:
    path, options = tmp_path / "s.pkv", ["--model", tiny, "--kv-dtype", asked]
    report = json_of(call("kv", "save", text, "-o", path, *options, "--json"))
    assert report["raw_bytes"] == report["tokens"] * 2 * 2 * head_bytes
    assert (report["pending_tokens"] > 0) == (dtype == "kivi4")  # in a block that is not full
    inspected = json_of(call("kv", "inspect", path, "--json"))
    assert inspected["dtype"] == dtype
    for told in (report, inspected):
        assert told["bf16_bytes"] == told["tokens"] * 2 * 2 * 64 * 2
        assert told["dtype_ratio"] == 128 / head_bytes
    assert json_of(call("kv", "verify", path, "--against", tiny, "--json"))["equal_to_recomputed"] is True
    loaded = json_of(call("kv", "load", path, *options, "--max-tokens", "8", "--json"))
    assert loaded["restored_tokens"] == loaded["cached_tokens"] == report["tokens"]
    assert call("kv", "load", path, "--model", tiny, "--max-tokens", "8").code == 2
    scored = [json_of(call("ppl", text, "--model", tiny, "--kv-dtype", d, "--json"))["nats"] for d in (asked, "bf16")]
    assert 0 < abs(scored[0] - scored[1]) < 0.1


def test_verifying_against_a_model_needs_room_for_one_session_only(tiny: Path, saved: Path) -> None:
    outcome = call("kv", "verify", saved, "--against", tiny, "--max-context", "1200", "--json")
    assert json_of(outcome)["equal_to_recomputed"] is True


def test_a_damaged_middle_is_computed_again_on_request(tiny: Path, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.pkv"
    data = bytearray(saved.read_bytes())
    data[len(data) * 6 // 10] ^= 1
    path.write_bytes(data)
    options = ["--model", tiny, "--max-tokens", "8", "--json"]
    assert_refused(call("kv", "load", path, *options), str(path), "segment", "checksum differs")
    again = json_of(call("kv", "load", path, "--recompute", *options))
    sound = json_of(call("kv", "load", saved, *options))
    assert 0 < again["restored_tokens"] < sound["restored_tokens"]
    assert "segment" in again["refused"]
    assert (again["token_ids"], again["text"]) == (sound["token_ids"], sound["text"])


def test_perplexity(tiny: Path, tiny_llm: LLM, text: Path) -> None:
    record = json_of(call("ppl", text, "--model", tiny, "--context", "200", "--json"))
    expected = measure_perplexity(tiny_llm.runner, tiny_llm.tokenizer.encode(text.read_text()), 200)
    assert record == {"model": str(tiny), "context": 200, "kv_evict": "none", **expected._asdict()}
    shown = call("ppl", "-", "--model", tiny, "--context", "200", stdin=text.read_bytes())
    assert shown.out.startswith(f"perplexity {expected.perplexity:.4f} over {expected.tokens} tokens")


def test_bench(tiny: Path) -> None:
    sizes = ["--prompt-tokens", "20", "--new-tokens", "5", "--runs", "1", "--no-peers"]
    record = json_of(call("bench", tiny, *sizes, "--json"))
    assert (record["prompt_tokens"], record["new_tokens"], record["peers"]) == (20, 5, {})
    assert {"prefill_tok_s", "decode_tok_s", "threads", "rss_mb", "file_mb"} <= record.keys()
    assert min(record["prefill_tok_s"], record["decode_tok_s"], record["rss_mb"]) > 0


def test_pull_prints_the_path(tiny: Path) -> None:
    assert call("pull", tiny) == (0, f"{tiny}\n", "")


def test_everything_said_in_json_is_one_object_in_one_line(tiny: Path) -> None:
    outcome = run("generate", "x", "--model", tiny, "--max-tokens", "2", "--json")
    assert outcome.err == ""
    assert json.loads(outcome.out)
    assert outcome.out.count("\n") == 1
