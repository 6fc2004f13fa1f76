"""Whole jobs on a small model: what comes out holds what was quantised, however often the work was stopped."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import environment, stalling
from small_model import HIDDEN, LAYERS, write_small_model

from prolepsis.errors import InputError
from prolepsis.model.config import ModelConfig
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.model_file import ModelFile, open_model
from prolepsis.quant.matrix import whole
from prolepsis.quantize.gguf_rounding import rounded_matrix
from prolepsis.quantize.job import quantise
from prolepsis.quantize.layer import NORMS, shapes, tensor_name
from prolepsis.quantize.mixed import RECIPES, choose, require_bits
from prolepsis.quantize.options import Options
from prolepsis.quantize.samples import pieces
from prolepsis.quantize.walk import LayerResult, embedded, walk

TEXT = "The quick brown fox jumps over the lazy dog, and reads what is written in the README of a package. " * 8
CALIBRATION = {"samples": 3, "length": 40}
CHOICES: dict[str, dict[str, Any]] = {
    "gptq": {"method": "gptq"},
    "gptq, in order, zero points": {"method": "gptq", "act_order": False, "symmetric": False},
    "gptq, 3 bits": {"method": "gptq", "bits": 3},
    "gptq, 8 bits, whole rows": {"method": "gptq", "bits": 8, "group": 0},
    "awq": {"method": "awq"},
    "awq, 2 bits": {"method": "awq", "bits": 2},
    "rtn": {"method": "rtn"},
    "gguf rtn": {"method": "rtn", "gguf_type": "Q8_0"},
    "gguf gptq": {"method": "gptq", "gguf_type": "Q4_1"},
    "gguf iq4": {"method": "rtn", "gguf_type": "IQ4_NL"},
    "gguf bf16": {"method": "rtn", "gguf_type": "BF16"},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("small") / "small.gguf")


@pytest.fixture(scope="module")
def small(path: Path) -> ModelFile:
    return open_model(path)


def expected(model: ModelFile, options: Options) -> Iterator[LayerResult]:
    """What the walk makes of it."""
    hidden = None
    if options.needs_texts:
        ids = pieces([model.tokenizer.encode(TEXT)], options.samples, options.length, options.seed)
        hidden = embedded(model, model.config, ids)
    return walk(model, model.config, options.walker(model.config), hidden)


def straightened(values: np.ndarray, part: str, config: ModelConfig) -> np.ndarray:
    """Rows of Q and K in the order of Hugging Face's files, from that of llama.cpp's: even ones of a head first."""
    if part not in ("attn_q", "attn_k"):
        return values
    heads = values.reshape(-1, config.head_dim // 2, 2, values.shape[1])
    return heads.swapaxes(1, 2).reshape(values.shape)


@pytest.mark.parametrize("choice", CHOICES)
def test_an_output_holds_what_the_walk_made(choice: str, small: ModelFile, tmp_path: Path) -> None:
    options = Options(**CHOICES[choice], **CALIBRATION)
    texts = [TEXT] if options.needs_texts else []
    report = quantise(small, options, texts, tmp_path / "made")
    made = open_model(tmp_path / "made")
    config = small.config
    assert made.tokenizer.encode(TEXT) == small.tokenizer.encode(TEXT)
    assert made.tokenizer.eos_ids == small.tokenizer.eos_ids
    for result in expected(small, options):
        for part, shape in shapes(config).items():
            name = tensor_name(result.layer, part)
            values = whole(result.matrices[name])
            if options.gguf_type is None:
                values = straightened(values, part, config)
            np.testing.assert_array_equal(whole(made.matrix(name, shape)), values, err_msg=name)
        for part in NORMS:
            name = tensor_name(result.layer, part)
            gains = result.vectors.get(name, small.vector(name, HIDDEN))
            np.testing.assert_allclose(made.vector(name, HIDDEN), gains, rtol=1e-3)
    embedding = ("token_embd.weight", (config.vocab_size, HIDDEN))
    np.testing.assert_allclose(whole(made.matrix(*embedding)), whole(small.matrix(*embedding)), atol=0.02)
    assert len(report.layers) == LAYERS
    assert not (tmp_path / "made.part").exists()


def test_a_checkpoint_becomes_a_gguf_file_and_back(small: ModelFile, tmp_path: Path) -> None:
    quantise(small, Options(method="rtn", bits=8), [], tmp_path / "hf")
    quantise(open_model(tmp_path / "hf"), Options(method="rtn", gguf_type="F16"), [], tmp_path / "back.gguf")
    back = GGUFFile.open(tmp_path / "back.gguf")
    config = ModelConfig.from_gguf(back)
    same = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rope", "max_context", "norm_eps")
    assert {key: getattr(config, key) for key in same} == {key: getattr(small.config, key) for key in same}
    model = open_model(tmp_path / "back.gguf")
    assert model.tokenizer.encode(TEXT) == small.tokenizer.encode(TEXT)
    assert model.chat_template.source == small.chat_template.source
    for part, shape in shapes(config).items():
        name = tensor_name(1, part)
        np.testing.assert_allclose(whole(model.matrix(name, shape)), whole(small.matrix(name, shape)), atol=0.01)


def stop_after(calls: int) -> Any:
    """A progress that ends the run at its n-th call."""
    left = calls

    def progress(done: int, total: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt

    return progress


def test_mixed_bits_stay_within_the_budget_and_come_back(small: ModelFile, tmp_path: Path) -> None:
    options = Options(method="mixed", bits=4.5, **CALIBRATION)
    report = quantise(small, options, [TEXT], tmp_path / "made")
    assert report.layer_bits <= 4.5
    assert len({kind for row in report.rows for kind in row.kinds if kind.startswith("INT")}) > 1
    made = open_model(tmp_path / "made")
    for part, shape in shapes(small.config).items():
        name = tensor_name(1, part)
        values = straightened(whole(small.matrix(name, shape)), part, small.config)
        missed = whole(made.matrix(name, shape)) - values
        assert np.square(missed).mean() < 0.25 * np.square(values).mean(), name


@pytest.mark.parametrize("method", ["gptq", "mixed"])
def test_a_stopped_job_goes_on_and_makes_the_same_bytes(method: str, small: ModelFile, tmp_path: Path) -> None:
    options = Options(method=method, **CALIBRATION)
    quantise(small, options, [TEXT], tmp_path / "whole")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            quantise(small, options, [TEXT], tmp_path / "parts", progress=stop_after(6))
        assert not (tmp_path / "parts").exists()
    notes: list[str] = []
    quantise(small, options, [TEXT], tmp_path / "parts", note=notes.append)
    assert [note.split()[:3] for note in notes[:2]] == [["120", "tokens", "are"], ["going", "on", "after"]]
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "parts" / file.name).read_bytes(), file.name


def test_a_killed_command_goes_on(path: Path, small: ModelFile, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = ["quantize", path, "-o", tmp_path / "made", "--calibration", text, "--samples", "3", "--length", "40"]
    where = "prolepsis.quantize.layer:Layer:feed:2"
    process = subprocess.Popen(stalling(where, *arguments), env=environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = iter(process.stderr.readline, "")
    assert any("stalled" in line for line in said), "".join(said)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "made").exists()
    notes: list[str] = []
    quantise(small, Options(**CALIBRATION), [TEXT], tmp_path / "made", note=notes.append)
    quantise(small, Options(**CALIBRATION), [TEXT], tmp_path / "whole")
    assert notes[1].startswith("going on after 1 of 3 layers")
    whole_bytes = (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert (tmp_path / "made" / "model.safetensors").read_bytes() == whole_bytes


def test_work_of_another_command_is_refused_until_it_is_thrown_away(small: ModelFile, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantise(small, Options(**CALIBRATION), [TEXT], tmp_path / "made", progress=stop_after(6))
    other = Options(**CALIBRATION, bits=3)
    with pytest.raises(InputError, match=r"differs in bits; .*--restart"):
        quantise(small, other, [TEXT], tmp_path / "made")
    with pytest.raises(InputError, match="differs in calibration"):
        quantise(small, Options(**CALIBRATION), [TEXT[7:]], tmp_path / "made")
    quantise(small, other, [TEXT], tmp_path / "made", restart=True)
    assert (tmp_path / "made" / "config.json").exists()


def test_what_is_there_is_replaced_by_force_only(small: ModelFile, path: Path, tmp_path: Path) -> None:
    rtn = Options(method="rtn")
    quantise(small, rtn, [], tmp_path / "made")
    with pytest.raises(InputError, match="exists; give another place, or --force"):
        quantise(small, rtn, [], tmp_path / "made")
    quantise(small, Options(method="rtn", bits=8), [], tmp_path / "made", force=True)
    assert open_model(tmp_path / "made").matrix(tensor_name(0, "attn_q"), (HIDDEN, HIDDEN)).forms[0].kind == "INT8"
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").touch()
    with pytest.raises(InputError, match=r"holds dear\.txt, which is no file of a model"):
        quantise(small, rtn, [], tmp_path / "letters", force=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["letters", "made"]


def test_force_replaces_nothing_but_a_model(small: ModelFile, path: Path, tmp_path: Path) -> None:
    rtn, to_gguf = Options(method="rtn"), Options(method="rtn", gguf_type="Q8_0")
    quantise(small, rtn, [], tmp_path / "source")
    (tmp_path / "source" / "README.md").touch()
    (tmp_path / "letter.txt").write_text("Dear")
    (tmp_path / "empty").mkdir()
    source = open_model(tmp_path / "source")
    for model, options, output, reason in (
        (small, to_gguf, path, "is the model that is quantised"),
        (small, rtn, path.parent, "holds the model"),
        (source, rtn, tmp_path / "source", "is the model that is quantised"),
        (source, rtn, tmp_path / "source" / "x", "lies in the model"),
        (source, to_gguf, tmp_path / "source" / "model.safetensors", "lies in the model"),
        (source, rtn, tmp_path, "holds the model"),
        (small, rtn, tmp_path / "source", r"holds README\.md"),
        (small, rtn, tmp_path / "letter.txt", "is a file; a directory is made"),
        (small, to_gguf, tmp_path / "empty", "is a directory; a GGUF file is made"),
        (small, to_gguf, tmp_path / "letter.txt", "is no GGUF file"),
    ):
        with pytest.raises(InputError, match=reason):
            quantise(model, options, [], output, force=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["empty", "letter.txt", "source"]
    quantise(small, rtn, [], tmp_path / "empty", force=True)
    assert open_model(tmp_path / "empty").config.num_layers == LAYERS


def test_what_a_link_names_is_replaced(small: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    quantise(small, Options(method="rtn"), [], tmp_path / "link", force=True)
    monkeypatch.chdir(tmp_path / "real")
    quantise(small, Options(method="rtn", bits=8), [], Path("."), force=True)
    assert open_model(tmp_path / "link").matrix(tensor_name(0, "attn_q"), (HIDDEN, HIDDEN)).forms[0].kind == "INT8"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "real"]


def test_what_comes_while_a_job_runs_is_not_replaced(small: ModelFile, tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        (tmp_path / "made").mkdir(exist_ok=True)

    with pytest.raises(InputError, match="exists; give another place"):
        quantise(small, Options(method="rtn"), [], tmp_path / "made", progress=progress)
    (tmp_path / "made").rmdir()
    quantise(small, Options(method="rtn"), [], tmp_path / "made", progress=stop_after(1))  # nothing is left to do


def test_i_matrix(small: ModelFile, tmp_path: Path) -> None:
    """The errors of columns that count are smaller, in layers and in the head."""
    options = Options(method="rtn", gguf_type="Q4_0")
    widths = {part: columns for part, (_, columns) in shapes(small.config).items()}
    importance = {
        tensor_name(i, part): np.ones(columns, np.float32) for i in range(LAYERS) for part, columns in widths.items()
    }
    name, heavy = tensor_name(1, "ffn_down"), slice(0, 8)
    importance |= {"output.weight": np.ones(HIDDEN, np.float32)}
    for each in (name, "output.weight"):
        importance[each][heavy] = 1000
    quantise(small, options, [], tmp_path / "even.gguf")
    with pytest.raises(KeyboardInterrupt):
        quantise(small, options, [], tmp_path / "weighed.gguf", imatrix=importance, progress=stop_after(6))
    with pytest.raises(InputError, match="differs in imatrix"):
        quantise(small, options, [], tmp_path / "weighed.gguf")
    quantise(small, options, [], tmp_path / "weighed.gguf", imatrix=importance)
    for each, shape in ((name, (HIDDEN, widths["ffn_down"])), ("output.weight", (small.config.vocab_size, HIDDEN))):
        missed = [
            np.square(
                whole(open_model(tmp_path / f"{made}.gguf").matrix(each, shape)) - whole(small.matrix(each, shape))
            )
            for made in ("weighed", "even")
        ]
        assert missed[0][:, heavy].sum() < 0.9 * missed[1][:, heavy].sum()
        assert missed[0].sum() > missed[1].sum()
    for wrong, others, reason in (
        ({**importance, "blk.9.attn_q.weight": importance[name]}, options, "has no matrix blk.9.attn_q.weight"),
        ({**importance, name: np.ones(5, np.float32)}, options, "ffn_down.weight has 5 values, and the model 96"),
        ({name: importance[name]}, options, "attn_k.weight of the model is missing"),
        (importance, Options(method="rtn", gguf_type="F16"), "a --type other than F16"),
        (importance, Options(method="rtn"), "--imatrix is for --format gguf"),
    ):
        with pytest.raises(InputError, match=reason):
            quantise(small, others, [], tmp_path / "wrong", imatrix=wrong)


@pytest.mark.parametrize(
    ("options", "texts", "reason"),
    [
        ({"bits": 5}, [TEXT], "--bits 5: .* 2, 3, 4, 8"),
        ({"method": "best"}, [TEXT], "--method 'best'"),
        ({"group": 64}, [TEXT], r"does not divide .* 64 and 96 columns; choose one of 32,"),
        ({"group": 20}, [TEXT], "multiple of 32"),
        ({}, [], r"--calibration FILE .* --method rtn"),
        ({"method": "rtn"}, [TEXT], "does not look at texts"),
        ({}, [""], "give longer ones"),
        ({"gguf_type": "Q4_K"}, [TEXT], r"--method gptq makes .* not Q4_K"),
        ({"gguf_type": "Q4_K", "method": "rtn"}, [], "blocks of 256 columns"),
        ({"method": "mixed", "bits": 9.0}, [TEXT], "2 to 8 on average"),
        ({"method": "mixed", "gguf_type": "Q4_0"}, [TEXT], "chooses groups itself"),
        ({"samples": 0}, [TEXT], "--samples must be from 1"),
        ({"length": 131072}, [TEXT], "--length must be from 2 to 8,192"),
        ({"seed": -1}, [TEXT], "--seed must be from 0"),
        ({"method": "mixed", "bits": 2.0}, [TEXT], r"the least that --method mixed makes .* is [23]\.\d"),
        ({"method": "awq", "act_order": True}, [TEXT], "--act-order and --no-act-order are for --method gptq"),
        ({"method": "rtn", "gguf_type": "Q8_0", "symmetric": True}, [], "Q8_0 says groups and zero points itself"),
        ({"method": "rtn", "gguf_type": "IQ4_XS"}, [], "choose one of Q4_0, .*Q5_1, IQ4_NL, Q8_0, F16, BF16"),
        ({"method": "rtn", "gguf_type": "F16"}, [TEXT], "--method rtn to F16 does not look at texts"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    options: dict[str, Any], texts: list[str], reason: str, small: ModelFile, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=reason):
        quantise(small, Options(**options), texts, tmp_path / "made")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_and_the_work_goes_on_later(
    small: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync
    left = 4

    def full(handle: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="the disk is full"):
        quantise(small, Options(method="rtn"), [], tmp_path / "made")
    monkeypatch.undo()
    quantise(small, Options(method="rtn"), [], tmp_path / "made")
    assert [each.name for each in tmp_path.iterdir()] == ["made"]


@pytest.mark.parametrize(("kind", "bad"), [("F16", 1e5), ("F16", np.nan), ("BF16", np.nan), ("Q4_0", np.inf)])
def test_numbers_beyond_a_type_are_refused_by_name(kind: str, bad: float) -> None:
    values = np.full((2, 32), 0.5, np.float32)
    rounded_matrix("w", kind, values)
    values.view(np.uint32)[1, 3] = 0xFFFFFFFF if np.isnan(bad) else np.float32(bad).view(np.uint32)
    with pytest.raises(InputError, match=rf"^w holds numbers that are not finite .*{kind}"):
        rounded_matrix("w", kind, values)


@pytest.mark.parametrize("options", [{"group": 0}, {}, {"method": "mixed"}])
def test_widths_that_no_form_has(options: dict[str, Any], small: ModelFile) -> None:
    config = replace(small.config, intermediate_size=100)
    with pytest.raises(InputError, match="have 64 and 100 columns, and quantised ones need a multiple of 32"):
        Options(**options).check_model(config)


def test_the_least_bits_can_be_had(small: ModelFile) -> None:
    with pytest.raises(InputError) as refused:
        require_bits(small.config, 1.0)
    least = float(str(refused.value).split()[-1])
    require_bits(small.config, least)
    errors = {tensor_name(i, part): [1.0] * len(RECIPES) for i in range(LAYERS) for part in shapes(small.config)}
    choose(small.config, errors, least)
    with pytest.raises(InputError):
        require_bits(small.config, least - 0.02)
