"""`kv plan`: figures that follow from the model, ratios that were measured, and decisions that are the planner's."""

import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CONFIG, write_checkpoint, write_tokenizer
from command import assert_refused, call, json_of

from prolepsis import LLM
from prolepsis.bench.kv_plan import ON_DEFAULT_MODEL, CodedSize, decide
from prolepsis.cli.console import parse_tokens
from prolepsis.cli.kv_plan import _Measured, _restores
from prolepsis.engine.planner import Planner
from prolepsis.engine.profile_store import keep
from prolepsis.engine.profiles import calibrate, collect, kv_of_texts
from prolepsis.errors import InputError

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def report(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of two tiers that are measured."""
    stores = ["--store", "memory:64MiB", "--store", f"disk:{tmp_path_factory.mktemp('tier')}:64MiB"]
    return json_of(call("kv", "plan", tiny, "--context", "2k", "--users", "3", *stores, "--json"))


def test_memory_follows_from_the_model(report: dict[str, Any], tiny_llm: LLM) -> None:
    assert (report["context"], report["users"]) == (2048, 3)
    assert report["weights_bytes"] == tiny_llm.model_bytes
    caches = {cache["dtype"]: cache for cache in report["caches"]}
    assert list(caches) == ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "kivi4"]
    assert caches["bf16"]["formula"] == 2 * 3 * 2048 * report["layers"] * report["kv_heads"] * report["head_dim"] * 2
    assert caches["bf16"]["token"] == tiny_llm.kv_cache.bytes_per_token
    assert all(cache["fits"] == (cache["users_that_fit"] >= 3) for cache in caches.values())


def test_every_ratio_was_measured_or_is_told_apart(report: dict[str, Any]) -> None:
    for cache in report["caches"]:
        assert [each["predictor"] for each in cache["coded"]] == ["static"] * (cache["dtype"] != "kivi4")
        for each in cache["coded"]:
            assert 1 < each["ratio"] < 2.5
            assert each["bytes"] == int(cache["stored"] / each["ratio"])
        assert cache["reference_ratios"].keys() == {kind for kind, dtype in ON_DEFAULT_MODEL if dtype == cache["dtype"]}


def test_tiers_are_measured_and_left_as_they_were(report: dict[str, Any]) -> None:
    assert [each["kind"] for each in report["restores"]] == ["memory", "disk"]
    for each in report["restores"]:
        assert each["measured"]
        assert each["bytes_per_s"] is None if each["kind"] == "memory" else each["bytes_per_s"] > 1e6
        faster = "restore" if each["restore_s"] < each["recompute_s"] else "recompute"
        assert each["reason"] == f"{faster}_is_faster"


def test_without_a_store_tiers_are_the_planners_guesses(tiny: Path, tiny_llm: LLM) -> None:
    record = json_of(call("kv", "plan", tiny, "--json"))
    assert record["context"] == tiny_llm.config.max_context
    planner = Planner(1, 1)
    speeds = {each["tier"]: (each["latency_s"], each["bytes_per_s"]) for each in record["restores"]}
    assert speeds == {kind: planner.tier_speed(kind, kind) for kind in ("memory", "disk", "redis", "remote")}
    assert not any(each["measured"] for each in record["restores"])


def test_a_checkpoint_of_a_short_context(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    write_tokenizer(tmp_path)
    record = json_of(call("kv", "plan", tmp_path, "--users", "2", "--json"))
    assert (record["context"], record["measured_tokens"]) == (CONFIG["max_position_embeddings"], 256)
    assert record["caches"][0]["coded"][0]["ratio"] > 1


def test_a_cache_of_kivi4_is_measured_where_it_is_the_one_asked_for(tiny: Path) -> None:
    record = json_of(call("kv", "plan", tiny, "--kv-dtype", "kivi4", "--json"))
    (coded,) = record["caches"][-1]["coded"]
    assert (coded["dtype"], coded["predictor"]) == ("kivi4", "static")
    assert coded["ratio"] > 1
    assert record["restores"][0]["predictor"] == "static"


def test_the_planner_decides_by_what_was_measured() -> None:
    coded = [CodedSize("static", "bf16", 1.6, 1e4, 1e4, None), CodedSize("twin-int8", "bf16", 4.8, 500, 400, None)]
    found = decide(coded, 500.0, [], context=1000, token_size=23_040, model_size=98_000_000)
    decisions = {(each.tier, each.predictor): each.plan for each in found}
    assert decisions["memory", "static"].reason == "restore_is_faster"
    assert decisions["memory", "twin-int8"].reason == "recompute_is_faster"
    assert decisions["memory", "twin-int8"].stored_tokens == 1000
    assert decisions["memory", "twin-int8"].recompute_s == pytest.approx(2.0)
    assert decisions["memory", "twin-int8"].restore_s == pytest.approx(2.5, rel=0.01)


def test_kept_profiles_are_measured_too(tiny: Path, tiny_llm: LLM, text: Path, profiles: Path) -> None:
    ids = tiny_llm.encode(text.read_text("utf-8"))
    with collect(tiny_llm, kv_of_texts(tiny_llm, [ids], "int8", 512, 512), "int8", 512) as sample:
        path = keep(calibrate(tiny_llm, sample, "linear"))
    assert path.is_relative_to(profiles)
    caches = json_of(call("kv", "plan", tiny, "--kv-dtype", "int8", "--text", text, "--json"))["caches"]
    found = {cache["dtype"]: cache for cache in caches}
    assert [(each["predictor"], each["profile"]) for each in found["int8"]["coded"]] == [
        ("static", None),
        ("linear", str(path)),
    ]
    assert "linear" not in found["int8"]["reference_ratios"]
    shown = call("kv", "plan", tiny, "--kv-dtype", "int8", "--text", text, "--users", "1000000")
    assert shown.code == 0
    for part in ("1,000,000 users", "Losslessly coded", "measured here", "linear", " users ", "restore is faster"):
        assert part in shown.out


def test_tables_are_whole_on_a_narrow_terminal(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    directory = tmp_path / "a-name-that-is-not-short" / "tier"
    stores = ["--store", "memory:64MiB", "--store", f"disk:{directory}:64MiB"]
    shown = call("kv", "plan", tiny, "--context", "1", *stores)
    assert shown.code == 0, shown.err
    (row,) = (line for line in shown.out.splitlines() if f"disk:{directory}" in line)
    assert re.search(r"\| static +\| (restore|recompute) is faster .* ms .* s \|", row)
    assert re.search(r"\| memory +\| static +\| (restore|recompute) is faster +\| +- \|", shown.out)
    assert "file cache" in shown.out  # whence files come
    assert "…" not in shown.out
    assert "1 user x 1 token x" in shown.out
    assert list(tmp_path.iterdir()) == []  # what was made to be measured


def test_what_a_store_refuses_is_not_offered(tiny_llm: LLM) -> None:
    coded = [CodedSize(kind, "bf16", 1.6, 1e4, 1e4, None) for kind in ("static", "twin-int8", "linear")]
    restores = _restores(_Measured(512, 500.0, coded, []), "bf16", tiny_llm.config, 1000, tiny_llm.model_bytes)
    assert {each["predictor"] for each in restores} == {"static", "linear"}


@pytest.mark.parametrize(("text", "tokens"), [("4k", 4096), ("32K", 32768), ("1m", 1 << 20), (" 100000 ", 100_000)])
def test_numbers_of_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text, "--context") == tokens


@pytest.mark.parametrize("text", ["", "k", "0", "0k", "-1", "4.5k", "4kk", "4 GiB", "9" * 30, "999999999m", "٣k"])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(InputError, match=r"--context .*32k"):
        parse_tokens(text, "--context")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--context", "many"], "--context"),
        (["--users", "0"], "--users"),
        (["--kv-dtype", "bf17"], "bf17"),
        (["--store", "floppy:1MiB"], "floppy"),
        (["--text", "no such file"], "--text"),
        (["--precision", "low"], "--precision"),
    ],
)
def test_what_cannot_be_is_refused(tiny: Path, arguments: list[str], part: str) -> None:
    assert_refused(call("kv", "plan", tiny, *arguments), part)


def test_the_figures_of_the_default_model_are_those_of_the_readme() -> None:
    table = README.read_text("utf-8").partition("| stored bytes per coded byte |")[2]
    dtypes = ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"]
    for kind in {kind for kind, _ in ON_DEFAULT_MODEL}:
        row = re.search(rf"^\| `{kind}`[^|]*\|(.*)\|$", table, re.MULTILINE)
        assert row is not None
        cells = [cell.strip(" *") for cell in row[1].split("|")]
        told = {(kind, dtype): float(cell) for dtype, cell in zip(dtypes, cells, strict=True) if cell}
        assert told == {key: ratio for key, ratio in ON_DEFAULT_MODEL.items() if key[0] == kind}
