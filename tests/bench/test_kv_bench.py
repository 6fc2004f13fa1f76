"""`kv bench`: every predictor and dtype, figures that agree with each other, and what is refused or left out."""

import importlib
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from command import assert_refused, call, json_of

from prolepsis import LLM
from prolepsis.bench import kv_plot
from prolepsis.coding import SessionReader
from prolepsis.coding.twin_network import MIXED
from prolepsis.engine.profiles import PredictorKind
from prolepsis.errors import InputError
from prolepsis.kernels.team import default_threads

DTYPES = ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"]
PREDICTORS = ["marginal", "static", "linear"]
CHOSEN = [word for predictor in PREDICTORS for word in ("--predictor", predictor)]
EVERY = [word for dtype in DTYPES for word in ("--kv-dtype", dtype)]
KEYS = [
    "predictor", "dtype", "threads", "bits_per_scalar", "ideal_bits", "ratio", "encode_mb_s", "decode_mb_s",
    "encode_tok_s", "decode_tok_s", "profile_bytes", "measure_s",
]  # fmt: skip
FLOATS, REFERENCES = DTYPES[:4], ["float, open loop", "float, closed loop"]
SCALARS = 2 * 2 * 64  # of a token of the tiny model: one layer, K and V, 2 heads of 64
TOKEN_BYTES = {"bf16": 512, "fp16": 512, "fp8_e4m3": 256, "fp8_e5m2": 256, "int8": 256 + 8, "int4": 128 + 8}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Letters that repeat no word: several hundred tokens for the last quarter."""
    path = tmp_path_factory.mktemp("kv-bench") / "text.txt"
    path.write_text("".join(np.random.default_rng(0).choice(list("a long text fills several segments"), 2400)))
    return path


@pytest.fixture(scope="module")
def report(text: Path, tiny: Path) -> dict[str, Any]:
    """All dtypes, and the predictors that are no networks."""
    return json_of(call("kv", "bench", tiny, "--text", text, *CHOSEN, *EVERY, "--float", "--runs", "1", "--json"))


def test_every_predictor_and_dtype_on_every_number_of_threads(report: dict[str, Any]) -> None:
    threads = sorted({1, min(2, default_threads())})
    assert all(list(row) == KEYS for row in report["rows"])
    found = [(row["dtype"], row["predictor"], row["threads"]) for row in report["rows"]]
    assert found == [(dtype, predictor, n) for dtype in DTYPES for predictor in PREDICTORS for n in threads]
    assert {left["predictor"] for left in report["left_out"]} == set(REFERENCES)


def test_bits_ratio_and_speeds_agree(report: dict[str, Any]) -> None:
    tokens = report["measured_tokens"]
    for row in report["rows"]:
        stored = tokens * TOKEN_BYTES[row["dtype"]]
        assert 0 < row["ideal_bits"] <= row["bits_per_scalar"] < 8 * TOKEN_BYTES[row["dtype"]] / SCALARS + 1
        beside = stored / row["ratio"] - row["bits_per_scalar"] * tokens * SCALARS / 8
        embedded = 0 if row["predictor"] == "linear" else row["profile_bytes"]
        hashes = 8 * (tokens // 16)
        assert 4 * tokens + hashes < beside - embedded < 4 * tokens + hashes + 1000  # header, segments and trailer
        for kind in ("encode", "decode"):
            assert row[f"{kind}_tok_s"] / row[f"{kind}_mb_s"] == pytest.approx(tokens / (stored / 1e6))
            assert row[f"{kind}_mb_s"] > 0
        assert row["measure_s"] > 0
        assert row["profile_bytes"] > 0


def test_sizes_do_not_depend_on_threads_but_on_predictors(report: dict[str, Any]) -> None:
    sizes = {}
    for row in report["rows"]:
        size = (row["bits_per_scalar"], row["ideal_bits"], row["ratio"])
        assert sizes.setdefault((row["dtype"], row["predictor"]), size) == size
    for dtype in DTYPES:
        marginal, static, linear = (sizes[dtype, predictor] for predictor in PREDICTORS)
        assert linear[0] < static[0]
        assert marginal != static


def test_what_was_calibrated_and_measured_is_told(report: dict[str, Any], text: Path, tiny_llm: LLM) -> None:
    tokens = len(tiny_llm.tokenizer.encode(text.read_text()))
    assert report["calibration_tokens"] == 3 * tokens // 4
    assert report["measured_tokens"] == tokens - report["calibration_tokens"]
    source = f"the first three quarters of {text}"
    assert report["calibrated_on"]["linear"] == dict.fromkeys(DTYPES, source)
    for reference in REFERENCES:
        assert report["calibrated_on"][reference] == dict.fromkeys(FLOATS, source)
    assert report["generated_tokens"] == 0


def test_parts_and_layers_add_up_to_rows(report: dict[str, Any]) -> None:
    parts = {(part["dtype"], part["predictor"]): part for part in report["parts"]}
    assert len(parts) == len(report["parts"]) == len(DTYPES) * len(PREDICTORS) + len(report["references"])
    for row in report["rows"]:
        part = parts[row["dtype"], row["predictor"]]
        assert (part["part"], part["tokens"], len(part["layers"])) == ("prompt", report["measured_tokens"], 1)
        (layer,) = part["layers"]
        assert (layer["k_coded"] + layer["v_coded"]) / 2 == pytest.approx(row["bits_per_scalar"])
        assert (layer["k_ideal"] + layer["v_ideal"]) / 2 == pytest.approx(row["ideal_bits"])
        assert layer["k_ideal"] <= layer["k_coded"]
        assert layer["v_ideal"] <= layer["v_coded"]


def test_references_are_estimated_for_floats(report: dict[str, Any]) -> None:
    """K and V of the only layer follow from the token alone: the float predictor knows them but for rounding."""
    assert [(row["dtype"], row["predictor"]) for row in report["references"]] == [
        (dtype, reference) for dtype in FLOATS for reference in REFERENCES
    ]
    coded = {(row["dtype"], row["predictor"]): row["ideal_bits"] for row in report["rows"]}
    for row in report["references"]:
        assert 0 < row["ideal_bits"] < coded[row["dtype"], "linear"]
        assert row["ideal_bits"] < 1
        bits = 8 * TOKEN_BYTES[row["dtype"]] / SCALARS
        assert row["ideal_ratio"] == pytest.approx(bits / row["ideal_bits"])
    parts = [part for part in report["parts"] if part["predictor"] in REFERENCES]
    assert all(part["bits_per_scalar"] is part["layers"][0]["k_coded"] is None for part in parts)


def test_how_fast_the_engine_computes_the_same(report: dict[str, Any]) -> None:
    assert list(report["recompute"]) == DTYPES
    for dtype, speed in report["recompute"].items():
        assert speed["mb_s"] * 1e6 == pytest.approx(speed["tok_s"] * TOKEN_BYTES[dtype])
        assert speed["tok_s"] > 0


def test_the_other_coders(report: dict[str, Any]) -> None:
    for other in report["others"]:
        assert list(other) == ["coder", "dtype", "ratio", "encode_mb_s", "decode_mb_s"]
        assert min(other["ratio"], other["encode_mb_s"], other["decode_mb_s"]) > 0
    by_dtype = {dtype: [o["coder"] for o in report["others"] if o["dtype"] == dtype] for dtype in DTYPES}
    for dtype, coders in by_dtype.items():
        assert {"zstd-3", "zstd-19 sample"} <= set(coders)
        assert ("zstd-3 byte planes" in coders) == (dtype in ("bf16", "fp16"))


def test_tables_and_a_picture(text: Path, tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    options = ["--text", text, "--runs", "1", "--threads", "1", "--kv-dtype", "int8", "--kv-dtype", "bf16", "--float"]
    options += ["--generate", "40", "--per-layer"]
    outcome = call("kv", "bench", tiny, *CHOSEN, *options, "--plot", path)
    assert outcome.code == 0
    for part in ("bf16", "int8", *PREDICTORS, "zstd-3", "threads: 1", "linear was calibrated on the first three quart"):
        assert part in outcome.out
    for part in (
        "recompute",
        "generated tokens",
        "bf16, prompt",
        "int8, generated",
        "three-part",
        *REFERENCES,
    ):
        assert part in outcome.out
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_picture_shows_every_row_and_names_its_points(report: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    axes = kv_plot.draw(report).axes[0]
    assert [line.get_label() for line in axes.lines] == DTYPES
    for line, dtype in zip(axes.lines, DTYPES, strict=True):
        rows = [row for row in report["rows"] if (row["dtype"], row["threads"]) == (dtype, 1)]
        assert list(line.get_ydata()) == [row["ratio"] for row in rows]
        assert list(line.get_xdata()) == [row["decode_mb_s"] for row in rows]
    coders = [other["coder"] for other in report["others"] if other["dtype"] == "bf16"]
    assert [note.get_text() for note in axes.texts] == PREDICTORS + coders


def test_a_picture_needs_matplotlib(text: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("prolepsis.cli.kv_bench"), "find_spec", lambda _: None)
    outcome = call("kv", "bench", tiny, "--text", text, "--plot", tmp_path / "plot.png")
    assert_refused(outcome, "--plot needs matplotlib", "pip install 'prolepsis[bench]'")


SMALL = ["--runs", "1", "--no-peers", "--json"]


def test_a_small_text(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("A short text, of fifty tokens or so.")
    outcome = call("kv", "bench", tiny, "--text", path, *CHOSEN, *EVERY, *SMALL)
    report = json_of(outcome)
    assert "tokens are few to calibrate on" in outcome.err
    assert 0 < report["calibration_tokens"] < 50
    assert len({(row["dtype"], row["predictor"]) for row in report["rows"]}) == len(DTYPES) * len(PREDICTORS)
    assert report["others"] == []


def test_without_linear_the_whole_text_is_measured(text: Path, tiny: Path, tiny_llm: LLM) -> None:
    tokens = len(tiny_llm.tokenizer.encode(text.read_text()))
    one = ["kv", "bench", tiny, "--text", text, "--predictor", "static", "--kv-dtype", "fp16", "--threads", "1", *SMALL]
    report = json_of(call(*one))
    assert (report["measured_tokens"], report["calibration_tokens"]) == (tokens, 0)
    assert report["calibrated_on"] == {}
    assert [(row["predictor"], row["dtype"], row["threads"]) for row in report["rows"]] == [("static", "fp16", 1)]
    assert json_of(call(*one, "--tokens", "300"))["measured_tokens"] == 300


def test_no_more_is_measured_than_the_context_holds(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("word and another " * 2000)
    outcome = call("kv", "bench", tiny, "--text", path, "--predictor", "marginal", "--kv-dtype", "int4", *SMALL)
    assert json_of(outcome)["measured_tokens"] == 2048
    assert "measuring 2048 of" in outcome.err


def test_generated_tokens_are_coded_and_told_apart(text: Path, tiny: Path) -> None:
    """Generated once, whatever the engine's dtype, and in segments of their own."""
    one = ["kv", "bench", tiny, "--text", text, "--predictor", "static", "--threads", "1", *SMALL, "--tokens", "300"]
    options = ["--kv-dtype", "bf16", "--kv-dtype", "fp16", "--generate", "20"]
    report, alone = json_of(call(*one, *options)), json_of(call(*one, *options[:4]))
    assert (report["measured_tokens"], report["generated_tokens"], alone["measured_tokens"]) == (320, 20, 300)
    parts = [(part["dtype"], part["part"], part["tokens"]) for part in report["parts"]]
    assert parts == [(dtype, *part) for dtype in DTYPES[:2] for part in (("prompt", 300), ("generated", 20))]
    for row, (prompt, generated) in zip(report["rows"], (report["parts"][:2], report["parts"][2:]), strict=True):
        for key in ("bits_per_scalar", "ideal_bits"):
            assert (300 * prompt[key] + 20 * generated[key]) / 320 == pytest.approx(row[key])
    assert json_of(call(*one, *options))["parts"] == report["parts"]


def test_every_twin_and_what_it_is_in_open_loop(text: Path, tiny: Path) -> None:
    twins = [kind for kind in get_args(PredictorKind) if kind.startswith("twin-")]
    options = [word for twin in twins for word in ("--predictor", twin)]
    options += ["--kv-dtype", "bf16", "--threads", "1", "--open-loop", *SMALL]
    report = json_of(call("kv", "bench", tiny, "--text", text, *options))
    # Bits are chosen for closed loop.
    opened = [twin for twin in twins if twin != MIXED]
    expected = [name for twin in twins for name in (twin, *([f"{twin}-open"] if twin in opened else []))]
    assert [row["predictor"] for row in report["rows"]] == expected
    assert [row["predictor"] for row in report["references"]] == [f"{twin}-open, mixture" for twin in opened]
    assert report["left_out"] == []
    # The only layer follows from the token alone, in either loop.
    assert all(row["ideal_bits"] < 1.5 for row in report["rows"] + report["references"])


def test_profiles_and_calibration_texts(text: Path, tiny: Path, tiny_llm: LLM, tmp_path: Path) -> None:
    """Where all that is needed comes from elsewhere, the whole text is measured."""
    profile, other = tmp_path / "bf16.safetensors", tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1])
    json_of(call("calibrate", tiny, "--text", other, "-o", profile, "--json"))
    tokens = len(tiny_llm.tokenizer.encode(text.read_text()))
    options = ["kv", "bench", tiny, "--text", text, "--predictor", "linear", "--threads", "1", *SMALL]
    with_profile = json_of(call(*options, "--kv-dtype", "bf16", "--profile", profile))
    both = json_of(
        call(*options, "--kv-dtype", "bf16", "--kv-dtype", "int8", "--profile", profile, "--calibration", other)
    )
    for report in (with_profile, both):
        assert report["measured_tokens"] == tokens
        row = report["rows"][0]
        assert (row["profile_bytes"], row["measure_s"]) == (profile.stat().st_size, None)
    assert with_profile["calibrated_on"] == {"linear": {"bf16": str(profile)}}
    assert both["calibrated_on"] == {"linear": {"bf16": str(profile), "int8": str(other)}}
    assert both["calibration_tokens"] == len(tiny_llm.tokenizer.encode(other.read_text()))
    assert both["rows"][0]["ratio"] == with_profile["rows"][0]["ratio"]

    options += ["--profile", profile]
    assert_refused(
        call(*options, "--kv-dtype", "bf16", "--calibration", other), "--calibration", "nothing is to be calib"
    )
    assert_refused(
        call(*options, "--kv-dtype", "int8"), "--profile", "for linear and bf16, which are not to be measured"
    )
    assert_refused(call(*options, "--profile", profile), "--profile", f"is for linear and bf16, {profile} is too")
    json_of(call("calibrate", tiny, "--text", other, "-o", profile, "--predictor", "static", "--json"))
    assert_refused(call(*options), "--profile", str(profile), "for static, which is measured on the")


def test_heads_that_linear_cannot_take_are_left_out(text: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise InputError("heads of 20 channels")

    monkeypatch.setattr(importlib.import_module("prolepsis.coding.calibration"), "chain_order", refuse)
    options = ["kv", "bench", tiny, "--text", text, "--kv-dtype", "bf16", *SMALL, "--predictor", "linear"]
    outcome = call(*options, "--predictor", "marginal", "--predictor", "static")
    report = json_of(outcome)
    assert {row["predictor"] for row in report["rows"]} == {"marginal", "static"}
    assert report["left_out"] == [{"predictor": "linear", "dtype": "bf16", "reason": "heads of 20 channels"}]
    assert "bf16, linear: left out: heads of 20 channels" in outcome.err
    refused = call(*options)
    assert (refused.code, refused.out) == (2, "")
    assert "nothing could be measured: heads of 20 channels" in refused.err


def test_more_threads_than_there_are(text: Path, tiny: Path) -> None:
    options = ["--predictor", "marginal", "--kv-dtype", "bf16", "--threads", "1", "--threads", "200"]
    outcome = call("kv", "bench", tiny, "--text", text, *options, *SMALL)
    assert {row["threads"] for row in json_of(outcome)["rows"]} == {1, default_threads()}
    assert "--threads 200: measured with" in outcome.err


def test_a_cache_that_comes_back_different_is_a_failure(
    text: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_all = SessionReader.read_all

    def wrong(reader: SessionReader) -> Any:
        values: Any = read_all(reader)
        values[0, 0, 0, 0, 0] ^= 1
        return values

    monkeypatch.setattr(SessionReader, "read_all", wrong)
    outcome = call("kv", "bench", tiny, "--text", text, "--kv-dtype", "bf16", "--predictor", "static", *SMALL)
    assert (outcome.code, outcome.out) == (1, "")
    assert "static restored a cache that differs" in outcome.err


def test_a_coder_that_fails_is_told_and_left_out(text: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zlib.decompress", lambda _: b"nonsense")
    options = ["--kv-dtype", "fp8_e5m2", "--predictor", "marginal", "--runs", "1", "--json"]
    outcome = call("kv", "bench", tiny, "--text", text, *options)
    coders = [other["coder"] for other in json_of(outcome)["others"]]
    assert "fp8_e5m2: zlib-1 failed: it does not give back what it was given" in outcome.err
    assert "zlib-1" not in coders
    assert "zstd-3" in coders


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--kv-dtype", "int3"], ["KV cache dtype 'int3'", "bf16, fp16"]),
        (["--predictor", "twin"], ["--predictor 'twin'", "marginal, static, linear"]),
        (["--threads", "0"], ["--threads must be at least 1, not 0"]),
        (["--tokens", "1"], ["--tokens must be at least 2, not 1"]),
        (["--generate", "-1"], ["--generate must be at least 0, not -1"]),
        (["--generate", "2048"], ["--generate 2048 leaves no room for the text in a context of 2048"]),
        (["--predictor", "static", "--open-loop"], ["--open-loop is for twins, and none is to be measured"]),
        (["--runs", "0"], ["--runs must be at least 1, not 0"]),
        (["--plot", "plot.bmp"], ["--plot: plot.bmp must end in .png, .svg or .pdf"]),
        (["--profile", "missing.safetensors"], ["missing.safetensors cannot be read"]),
        (["--calibration", "missing.txt"], ["--calibration: cannot read missing.txt"]),
        (["--kv-memory", "lots"], ["--kv-memory 'lots' is not a size"]),
    ],
)
def test_bad_input(options: list[str], parts: list[str], text: Path, tiny: Path) -> None:
    assert_refused(call("kv", "bench", tiny, "--text", text, *options), *parts)


def test_bad_files(text: Path, tiny: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert_refused(call("kv", "bench", tiny), "--text")
    assert_refused(call("kv", "bench", tiny, "--text", tmp_path / "no.txt"), "--text: cannot read", "no.txt")
    assert_refused(call("kv", "bench", tiny, "--text", empty), f"--text: {empty} has too few tokens")
    refused = call("kv", "bench", tiny, "--text", text, "--calibration", empty)
    assert_refused(refused, "--calibration: there are no tokens to calibrate on")


def test_a_picture_that_cannot_be_written(text: Path, tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "no" / "plot.png"
    assert_refused(call("kv", "bench", tiny, "--text", text, "--plot", path), str(path), "there is no directory")
