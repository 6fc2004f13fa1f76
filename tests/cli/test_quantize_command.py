"""`quantize` as a user meets it."""

from pathlib import Path

import pytest
from command import assert_refused, call, json_of

OPTIONS = ("--samples", "2", "--length", "48")


@pytest.fixture(scope="module")
def gguf_file(tiny: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model by GPTQ, as a GGUF file."""
    path = tmp_path_factory.mktemp("made") / "q4.gguf"
    record = json_of(
        call(
            "quantize",
            tiny.with_name("F16.gguf"),
            "-o",
            path,
            "--format",
            "gguf",
            "--calibration",
            text,
            *OPTIONS,
            "--json",
        )
    )
    assert (record["path"], record["nbytes"]) == (str(path), path.stat().st_size)
    assert record["layer_bits_per_weight"] == 4.5
    assert {row["part"]: row["kinds"] for row in record["rows"]}["attn_q"] == ["Q4_0"]
    return path


def test_what_was_made_runs_and_is_near_its_reference(gguf_file: Path, tiny: Path, text: Path) -> None:
    reference = tiny.with_name("F16.gguf")
    record = json_of(call("ppl", text, "--model", reference, "--compare", gguf_file, "--compare", reference, "--json"))
    made, itself = record["models"]
    assert 0 < made["kl"] < 0.1
    assert made["bits_per_weight"] < 8 < record["reference"]["bits_per_weight"]
    assert (itself["kl"], itself["same_top"], itself["nats"]) == (0, 1, record["reference"]["nats"])
    shown = call("ppl", text, "--model", reference, "--compare", gguf_file)
    assert f"{made['kl']:.5f}" in shown.out


def test_the_table_tells_where_the_bits_went(tiny: Path, tmp_path: Path) -> None:
    shown = call("quantize", tiny, "-o", tmp_path / "made", "--method", "rtn", "--bits", "8")
    assert shown.code == 0
    for part in ("ffn_down", "INT8", "all of the layers", "token_embd"):
        assert part in shown.out
    assert_refused(call("quantize", tiny, "-o", tmp_path / "made", "--method", "rtn"), "exists", "--force")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--method", "best"], ["--method 'best'", "mixed"]),
        (["--bits", "5", "--method", "rtn"], ["--bits 5", "2, 3, 4, 8"]),
        (["--type", "Q4_0"], ["--type is for --format gguf"]),
        (["--format", "gguf", "--bits", "4"], ["--bits and --group-size are for --format safetensors"]),
        (["--format", "gguf", "--type", "Q9"], ["--type 'Q9'", "Q4_K"]),
        (["--format", "gguf", "--method", "rtn", "--asym"], ["--asym"]),
        (["--format", "gguf", "--type", "Q4_0", "--sym"], ["--asym"]),
        (["--method", "rtn", "--act-order"], ["--act-order", "--method gptq"]),
        (["--method", "rtn", "--imatrix", "nowhere.dat"], ["nowhere.dat: cannot be read"]),
        ([], ["--calibration FILE", "--method rtn"]),
        (["--calibration", "nowhere.txt"], ["cannot read nowhere.txt"]),
    ],
)
def test_misuse_is_told(arguments: list[str], parts: list[str], tiny: Path, tmp_path: Path) -> None:
    assert_refused(call("quantize", tiny, "-o", tmp_path / "made", *arguments), *parts)
    assert_refused(call("quantize", tiny, "-o", tmp_path / "none" / "made", "--method", "rtn"), "no directory")
