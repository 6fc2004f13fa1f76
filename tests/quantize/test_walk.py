"""The walk, against the engine's own pass and against what quantisers promise."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.model.config import ModelConfig
from prolepsis.model.model_file import ModelFile, open_model
from prolepsis.quant.grid import IntegerGrid
from prolepsis.quant.matrix import HeldMatrix, whole
from prolepsis.quantize.layer import STAGES, Layer
from prolepsis.quantize.methods import Awq, Gptq, Rtn
from prolepsis.quantize.mixed import RECIPES, Measure, Mixed, choose
from prolepsis.quantize.walk import LayerResult, Method, embedded, walk

DATA = Path(__file__).parents[1] / "data" / "gguf"


@pytest.fixture(scope="module")
def source() -> ModelFile:
    return open_model(DATA / "F32.gguf")


@pytest.fixture(scope="module")
def config(source: ModelFile) -> ModelConfig:
    return source.config


@pytest.fixture(scope="module")
def tokens() -> NDArray[np.int64]:
    return np.array(json.loads((DATA / "ids.json").read_text()), np.int64).reshape(1, -1)


class Unchanged:
    """A method that leaves everything as it is."""

    def prepare(self, layer: Layer) -> None:
        pass

    def quantise(self, layer: Layer, stage: int) -> dict[str, HeldMatrix]:
        return {}


def log_probabilities(source: ModelFile, config: ModelConfig, hidden: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of the next token, float64 [tokens, vocabulary]."""
    wide = hidden[0].astype(np.float64)
    wide /= np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + config.norm_eps)
    name = "token_embd.weight" if config.tied_embeddings else "output.weight"
    head = whole(source.matrix(name, (config.vocab_size, config.hidden_size)))
    logits = (wide * source.vector("output_norm.weight", config.hidden_size)) @ head.T
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def last(source: ModelFile, config: ModelConfig, method: Method, tokens: NDArray[np.int64]) -> LayerResult:
    *_, result = walk(source, config, method, embedded(source, config, tokens))
    return result


def lost(source: ModelFile, config: ModelConfig, method: Method, tokens: NDArray[np.int64]) -> float:
    """Mean KL divergence from the model as it is."""
    right, made = (
        log_probabilities(source, config, hidden)
        for each in (Unchanged(), method)
        if (hidden := last(source, config, each, tokens).hidden) is not None
    )
    return float((np.exp(right) * (right - made)).sum(axis=1).mean())


def test_float_pass_is_the_models(source: ModelFile, config: ModelConfig, tokens: NDArray[np.int64]) -> None:
    hidden = last(source, config, Unchanged(), tokens).hidden
    assert hidden is not None
    found = log_probabilities(source, config, hidden)
    # llama.cpp's own, stored as float16.
    expected = np.load(DATA / "F32.npy").astype(np.float64)
    assert np.abs(found - expected).max() < 0.012
    assert np.abs(found - expected).mean() < 2e-3


def test_quality_of_methods(source: ModelFile, config: ModelConfig, tokens: NDArray[np.int64]) -> None:
    grid = IntegerGrid(3, 64, symmetric=False)
    plain = lost(source, config, Rtn(grid), tokens)
    assert lost(source, config, Gptq(grid), tokens) < 0.5 * plain
    assert lost(source, config, Awq(grid, IntegerGrid(3, 64, False, search=True)), tokens) < 0.9 * plain


def test_awq_folding_changes_nothing(source: ModelFile, config: ModelConfig, tokens: NDArray[np.int64]) -> None:
    right = Layer.read(source, config, 0, embedded(source, config, tokens))
    folded = Layer.read(source, config, 0, embedded(source, config, tokens))
    Awq(IntegerGrid(2, 128)).prepare(folded)
    assert max(np.abs(np.log(folded.norms[name] / right.norms[name])).max() for name in right.norms) > 0.1
    for layer in (right, folded):
        layer.attend()
        layer.feed()
    assert right.hidden is not None
    assert folded.hidden is not None
    np.testing.assert_allclose(folded.hidden, right.hidden, atol=1e-4 * np.abs(right.hidden).max())


def test_inputs_together_and_one_by_one(source: ModelFile, config: ModelConfig, tokens: NDArray[np.int64]) -> None:
    layer = Layer.read(source, config, 0, embedded(source, config, tokens.reshape(4, -1)))
    (together,) = layer.all_inputs()
    for stage in range(len(STAGES)):
        (alone,) = layer.inputs(stage)
        np.testing.assert_allclose(alone, together[stage], rtol=1e-4, atol=1e-5)
        if stage == 1:
            layer.attend()


def test_without_calibration(source: ModelFile, config: ModelConfig, tokens: NDArray[np.int64]) -> None:
    (alone,) = walk(source, config, Rtn(IntegerGrid(4, 64)))
    along = last(source, config, Rtn(IntegerGrid(4, 64)), tokens)
    assert alone.hidden is None
    assert alone.matrices.keys() == along.matrices.keys()
    for name, matrix in alone.matrices.items():
        np.testing.assert_array_equal(whole(matrix), whole(along.matrices[name]))


def test_mixed_bits(source: ModelFile, config: ModelConfig, tokens: NDArray[np.int64]) -> None:
    measure = Measure(RECIPES[2:6])
    result = last(source, config, measure, tokens)
    assert not result.matrices
    assert len(measure.errors) == 7
    for errors in measure.errors.values():
        assert errors[0] > errors[2] > 0
    recipes, allocation = choose(config, measure.errors, 4.0, measure.recipes)
    assert allocation.cost < sum(errors[1] for errors in measure.errors.values())
    made = last(source, config, Mixed(recipes), tokens)
    assert made.matrices.keys() == recipes.keys()
    with pytest.raises(InputError, match="budget"):
        choose(config, measure.errors, 2.0, measure.recipes)


def test_bad_tokens(source: ModelFile, config: ModelConfig) -> None:
    with pytest.raises(InputError, match="from 0 to 1023"):
        embedded(source, config, np.array([[5, 1024]]))
