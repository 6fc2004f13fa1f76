"""The demonstration: on the default model as users run it, and in every detail on a tiny one."""

import importlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from command import COMMAND, assert_refused, call, environment, json_of

from prolepsis.demo.run import document

FIELDS = [
    "model", "tokens", "predictor", "raw_bytes", "coded_bytes", "ratio", "others", "bit_identical",
    "same_continuation", "save_s", "restore_s", "prefill_s", "answer",
]  # fmt: skip


@pytest.fixture
def short_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model cuts text into many tokens: the whole document would not fit its context."""
    text = document()[:1200]
    monkeypatch.setattr(importlib.import_module("prolepsis.demo.run"), "document", lambda: text)


def assert_sound(record: dict) -> None:
    assert list(record) == FIELDS
    assert record["bit_identical"] is record["same_continuation"] is True
    assert record["ratio"] == record["raw_bytes"] / record["coded_bytes"] > 1
    assert min(record["save_s"], record["restore_s"], record["prefill_s"]) > 0
    assert min(record["others"].values()) > 0.9
    assert any(name.startswith("zstd") for name in record["others"])


@pytest.mark.usefixtures("default_model")
def test_the_default_model_once_it_is_fetched_needs_no_network() -> None:
    offline = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1"}
    outcome = subprocess.run(
        [*COMMAND, "demo", "--json"], env=environment() | offline, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    record = json.loads(outcome.stdout)
    assert_sound(record)
    assert record["model"] == "smollm2:135m"
    assert 1200 < record["tokens"] < 2000
    assert record["raw_bytes"] == record["tokens"] * 30 * 2 * 3 * 64 * 2
    assert record["ratio"] > 1.5
    assert "cache" in record["answer"].lower()


@pytest.mark.usefixtures("short_document")
def test_one_json_object_and_nothing_else(tiny: Path) -> None:
    outcome = call("demo", tiny, "--threads", "1", "--json")
    record = json_of(outcome)
    assert_sound(record)
    assert outcome.err == ""
    assert record["model"] == str(tiny)


@pytest.mark.usefixtures("short_document")
def test_the_table_holds_the_figures(tiny: Path) -> None:
    outcome = call("demo", tiny)
    assert outcome.code == 0
    for part in ("KV cache, raw", "ratio of zstd-3", "every bit restored", "same continuation", "prefill instead"):
        assert part in outcome.out
    assert "NO" not in outcome.out
    assert "restoring it in a new process" in outcome.err


def test_a_model_whose_context_is_too_small_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = document() * 2
    monkeypatch.setattr(importlib.import_module("prolepsis.demo.run"), "document", lambda: text)
    assert_refused(call("demo", tiny, "--json"), "tokens, but the context holds 2048")


@pytest.mark.usefixtures("short_document")
@pytest.mark.parametrize("lie", ["bit_identical", "continuation"])
def test_a_difference_is_shown_and_is_a_failure(tiny: Path, monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    module = importlib.import_module("prolepsis.demo.run")
    restore = module._restore_apart
    monkeypatch.setattr(module, "_restore_apart", lambda *arguments: restore(*arguments) | {lie: []})
    outcome = call("demo", tiny)
    assert outcome.code == 1
    assert "NO" in outcome.out
    assert "the restored session differs from the original" in outcome.err


@pytest.mark.usefixtures("short_document")
def test_a_new_process_that_fails_is_reported(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", os.path.join(os.sep, "bin", "false"))
    outcome = call("demo", tiny, "--json")
    assert (outcome.code, outcome.out) == (1, "")
    assert "restoring in a new process failed" in outcome.err


def test_the_document_is_about_1500_tokens_and_speaks_of_what_is_asked() -> None:
    text = document()
    assert 800 < len(text.split()) < 1500
    assert "smaller" in text
