"""Matrices whose columns come in orders of their own (GPTQ with act-order), in a whole model."""

import numpy as np
import pytest
from decoding import HIDDEN, LAYERS, VOCAB, Session, TinyModel

from prolepsis.errors import InputError
from prolepsis.kernels.cells import CODES
from prolepsis.kernels.forward import DOWN, GATE_UP, QKV
from prolepsis.kernels.qmatmul import KIND, NATURAL, ORDER
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.weights import load_plan
from prolepsis.quant.matrices import NaturalFloats, unpacked
from prolepsis.quant.matrix import Codes, Form, HeldMatrix, whole
from prolepsis.speculate.twin_weights import twin_plan

GROUP = 64
ORDERS = {"attn_q": 0, "attn_k": 0, "attn_v": 1, "ffn_gate": 2, "ffn_up": None, "ffn_down": 3}


def in_order(matrix, order):
    """Rounded to 8 bits, the columns taken in `order`."""
    values = whole(matrix) if order is None else whole(matrix)[:, order]
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % GROUP)))
    groups = np.abs(padded).reshape(len(values), -1, GROUP).max(axis=2)
    scales = (groups / 127).astype(np.float16)
    steps = np.repeat(scales.astype(np.float32), GROUP, axis=1)[:, : values.shape[1]]
    codes = np.clip(np.rint(values / steps) + 128, 0, 255).astype(np.uint8)
    part = Codes(codes, scales, zeros=np.full(scales.shape, 128, np.uint8))
    return HeldMatrix(matrix.shape, (Form("INT8", matrix.shape[1], GROUP),), (part,), order)


class Reordered(GGUFFile):
    """The model with its matrices in orders."""

    def matrix(self, name, shape):
        """Of 8 bits where ORDERS says so."""
        held, member = super().matrix(name, shape), name.split(".")[-2]
        if member not in ORDERS:
            return held
        which = ORDERS[member]
        rng = np.random.default_rng(which)
        return in_order(held, None if which is None else rng.permutation(shape[1]).astype(np.int32))


class Natural(Reordered):
    """The same numbers in the natural order."""

    def matrix(self, name, shape):
        """As float32."""
        return NaturalFloats(super().matrix(name, shape))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Both."""
    file = TinyModel.random(3, only="BF16", tied=True).write(tmp_path_factory.mktemp("model") / "tiny.gguf")
    return [kind(file.path, file.metadata, file.tensors, file._parts) for kind in (Reordered, Natural)]


@pytest.fixture(scope="module")
def sessions(files):
    """Of both."""
    return [Session(file) for file in files]


def test_logits_are_those_of_the_natural_order(sessions):
    tokens = np.random.default_rng(4).integers(0, VOCAB, 40)
    ordered, natural = (session.in_chunks(tokens, [30, 1]) for session in sessions)
    assert np.abs(ordered - natural).max() < 0.02 * np.abs(natural).max()


def test_a_product_has_one_order(sessions):
    """Matrices of another than the first have become float32."""
    plan = sessions[0].decoder.plan
    table, orders = plan.weights.matrices, plan.groups[:-1, 2].reshape(LAYERS, 4)
    assert (orders[:, [QKV, GATE_UP, DOWN]] != NATURAL).all()
    for layer in range(LAYERS):
        first = plan.groups[4 * layer + QKV, 0]
        assert table[first : first + 3, KIND].tolist() == [CODES["INT8"], CODES["INT8"], CODES["F32"]]
        first = plan.groups[4 * layer + GATE_UP, 0]
        assert table[first : first + 2, KIND].tolist() == [CODES["INT8"], CODES["F32"]]


def test_memory_is_asked_for_all_that_weights_become(files, sessions, monkeypatch):
    decoder, file = sessions[0].decoder, files[0]
    needed = decoder.plan.weights.data.size
    monkeypatch.setattr("prolepsis.model.memory.free_memory", lambda: needed)
    load_plan(file, decoder.config, 64, fast=False)
    monkeypatch.setattr("prolepsis.model.memory.free_memory", lambda: needed - 1)
    with pytest.raises(InputError, match=r"tiny\.gguf: the model needs about .* MiB of memory, but .* are free"):
        load_plan(file, decoder.config, 64, fast=False)


def test_a_drafting_twin_rounds_what_stands_beside_the_rounded(sessions):
    plan = sessions[0].decoder.plan
    twin = twin_plan(plan)
    assert (twin.weights.matrices[:, ORDER] == NATURAL).all()
    assert (twin.groups[:, 2] == NATURAL).all()
    key = plan.groups[QKV, 0] + 1
    assert twin.weights.matrices[key, KIND] == CODES["Q8_0"]
    exact, rounded = unpacked(plan.weights, key), unpacked(twin.weights, key)
    assert exact.shape == rounded.shape == (len(exact), HIDDEN)
    assert np.sqrt(np.mean((rounded - exact) ** 2) / np.mean(exact**2)) < 0.01
