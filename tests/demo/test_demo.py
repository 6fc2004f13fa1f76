"""The demonstration: on the default model as users run it, and in every detail on a tiny one."""

import importlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from command import COMMAND, assert_refused, call, environment, json_of

from prolepsis.demo.calibrated import PREDICTOR
from prolepsis.demo.run import document
from prolepsis.errors import InputError

pytestmark = pytest.mark.usefixtures("profiles")

FIELDS = ["model", "tokens", "raw_bytes", "sessions", "others", "prefill_s", "answer"]


@pytest.fixture
def short_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model cuts text into many tokens: the whole document would not fit its context."""
    text = document()[:1200]
    monkeypatch.setattr(importlib.import_module("prolepsis.demo.run"), "document", lambda: text)


def cannot_take_this_model(*arguments: object) -> None:
    raise InputError("heads of 7")


def assert_sound(record: dict) -> None:
    assert list(record) == FIELDS
    assert [session["predictor"] for session in record["sessions"]] == ["static/1", f"{PREDICTOR}/1"]
    for session in record["sessions"]:
        assert session["bit_identical"] is session["same_continuation"] is True
        assert session["ratio"] == record["raw_bytes"] / session["coded_bytes"] > 1
        assert min(session["save_s"], session["restore_s"], record["prefill_s"]) > 0
    assert min(record["others"].values()) > 0.9
    assert any(name.startswith("zstd") for name in record["others"])


@pytest.mark.nightly  # calibrates a twin of the default model; below, the same is done with a tiny one
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
    static, calibrated = record["sessions"]
    assert calibrated["ratio"] > 1.1 * static["ratio"] > 1.5
    assert "cache" in record["answer"].lower()


@pytest.mark.usefixtures("short_document")
def test_one_json_object_and_nothing_else(tiny: Path) -> None:
    outcome = call("demo", tiny, "--threads", "1", "--json")
    record = json_of(outcome)
    assert_sound(record)
    assert outcome.err == ""
    assert record["model"] == str(tiny)


@pytest.mark.usefixtures("short_document")
def test_the_table_holds_the_figures_where_no_profile_can_be_kept(tiny: Path, profiles: Path) -> None:
    profiles.write_text("in the way")
    outcome = call("demo", tiny)
    assert outcome.code == 0
    for part in (
        "KV cache, raw",
        "ratio of zstd-3",
        "every bit restored",
        "same continuation",
        "prefill instead",
        PREDICTOR,
    ):
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
    monkeypatch.setattr(module, "profile_for", cannot_take_this_model)
    outcome = call("demo", tiny)
    assert outcome.code == 1
    assert "NO" in outcome.out
    assert f"{PREDICTOR} is left out: heads of 7" in outcome.err
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
