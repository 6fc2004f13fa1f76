"""Loading: what must be there, and where each row goes."""

import numpy as np
import pytest
from decoding import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, MLP, VOCAB, TinyModel, gguf_values

from prolepsis.errors import ModelFileError
from prolepsis.kernels.qmatmul import COLUMNS, NATURAL, OUT_COLUMN
from prolepsis.kernels.unpacking import unpack_row
from prolepsis.model.config import ModelConfig
from prolepsis.model.weights import load_plan


def plan_of(file):
    return load_plan(file, ModelConfig.from_gguf(file), 64, fast=False)


def rows_of(plan, matrix, count):
    columns = int(plan.weights.matrices[matrix, COLUMNS])
    out = np.zeros((count, columns), np.float32)
    for row in range(count):
        unpack_row(plan.weights, matrix, row, out.reshape(-1), row * columns)
    return out


@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_is_where_the_decoder_reads_it(tmp_path, tied):
    model = TinyModel.random(1, tied=tied)
    plan = plan_of(model.write(tmp_path / "tiny.gguf"))
    names = (("attn_q", "attn_k", "attn_v"), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",))
    halves = np.concatenate([np.arange(0, HEAD_DIM, 2), np.arange(1, HEAD_DIM, 2)])
    for layer in range(LAYERS):
        for group, members in enumerate(names):
            first, count, order = plan.groups[4 * layer + group]
            assert (count, order) == (len(members), NATURAL)
            column = 0
            for i, name in enumerate(members):
                expected = gguf_values(*model.tensors[f"blk.{layer}.{name}"])
                if name in ("attn_q", "attn_k"):  # neighbours become halves, head by head
                    expected = expected.reshape(-1, HEAD_DIM, HIDDEN)[:, halves].reshape(expected.shape)
                assert np.array_equal(rows_of(plan, first + i, len(expected)), expected)
                assert plan.weights.matrices[first + i, OUT_COLUMN] == column
                column += len(expected)
    head, count, _ = plan.groups[4 * LAYERS]
    assert count == 1
    assert np.array_equal(rows_of(plan, plan.embedding, VOCAB), gguf_values(*model.tensors["token_embd"]))
    assert np.array_equal(rows_of(plan, head, VOCAB), gguf_values(*model.tensors["token_embd" if tied else "output"]))
    assert (head == plan.embedding) == tied
    gains = [f"blk.{layer}.{name}_norm" for layer in range(LAYERS) for name in ("attn", "ffn")] + ["output_norm"]
    assert np.array_equal(plan.norms, np.concatenate([model.norms[name] for name in gains]))
    assert (plan.heads, plan.hidden, plan.intermediate, plan.layers) == (HEADS, HIDDEN, MLP, LAYERS)


@pytest.mark.parametrize(
    "name", ["token_embd", "blk.0.attn_q", "blk.1.attn_output", "blk.2.ffn_down", "blk.1.attn_norm", "output_norm"]
)
def test_a_missing_tensor_is_named(tmp_path, name):
    model = TinyModel.random(1)
    (model.norms if name.endswith("norm") else model.tensors).pop(name)
    path = tmp_path / "tiny.gguf"
    with pytest.raises(ModelFileError, match=rf"tiny\.gguf: tensor '{name}\.weight' is missing"):
        plan_of(model.write(path))


@pytest.mark.parametrize("name", ["output", "blk.0.attn_k", "blk.2.ffn_up", "blk.1.ffn_norm"])
def test_a_tensor_of_the_wrong_shape_is_named(tmp_path, name):
    model = TinyModel.random(1)
    if name.endswith("norm"):
        model.norms[name] = model.norms[name][:-32]
    else:
        kind, raw = model.tensors[name]
        model.tensors[name] = (kind, raw[:-1])
    with pytest.raises(ModelFileError, match=rf"tensor '{name}\.weight' has shape \(.*\), expected \("):
        plan_of(model.write(tmp_path / "tiny.gguf"))


def test_a_norm_that_is_not_finite_is_named(tmp_path):
    model = TinyModel.random(1)
    model.norms["blk.1.ffn_norm"][3] = np.nan
    with pytest.raises(ModelFileError, match=r"tensor 'blk\.1\.ffn_norm\.weight' holds a value that is not a finite"):
        plan_of(model.write(tmp_path / "tiny.gguf"))


def test_an_unsupported_type_is_named_with_those_that_are(tmp_path):
    model = TinyModel.random(1)
    rows, blocks = KV_HEADS * HEAD_DIM, HIDDEN // 32
    model.tensors["blk.1.attn_v"] = ("Q8_1", np.zeros((rows, blocks * 40), np.uint8))
    with pytest.raises(ModelFileError, match=r"'blk\.1\.attn_v\.weight': is of type Q8_1.*supported here: Q4_0, Q4_1"):
        plan_of(model.write(tmp_path / "tiny.gguf"))


def test_a_norm_of_16_bits(tmp_path):
    model = TinyModel.random(1)
    model.norms["output_norm"] = model.norms["output_norm"].astype(np.float16)
    plan = plan_of(model.write(tmp_path / "tiny.gguf"))
    assert np.array_equal(plan.norms[-HIDDEN:], model.norms["output_norm"])
