"""The decoder in float32 against the engine's own K and V, and what rounding and corrections change in it."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prolepsis import LLM
from prolepsis.bench.float_predictor import FloatPredictor, Precision, closed_loop, open_loop
from prolepsis.coding.cache_dtypes import to_float
from prolepsis.engine.profiles import kv_of_texts
from prolepsis.kernels.forward import Plan

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from decoding import KV_HEADS, LAYERS, VOCAB, TinyModel

TOKENS = 150  # more than attend at a time


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, NDArray[np.uint32], NDArray[np.float32]]:
    """The plan of a model of three layers with every kind of weights, and what its engine caches for some tokens."""
    path = tmp_path_factory.mktemp("float") / "model.gguf"
    TinyModel.random(3, factors=True).write(path)
    llm = LLM(path)
    ids = np.random.default_rng(0).integers(0, VOCAB, TOKENS).tolist()
    window = next(kv_of_texts(llm, [ids], "bf16", TOKENS, TOKENS))
    assert isinstance(window.kv, np.ndarray)
    return llm.runner.decoder.plan, window.ids, to_float(window.kv.astype(np.uint16), "bf16")


def _predicted(engine: Any, closed: bool, precision: Precision = Precision(), gains: Any = None) -> NDArray:  # noqa: B008
    plan, ids, true = engine
    attended = closed_loop(lambda layer: true[layer]) if closed else open_loop("bf16")
    return np.stack(list(FloatPredictor(plan, precision).predict(ids, attended, gains)))


def _error(engine: Any, predicted: NDArray) -> NDArray[np.float64]:
    """Root mean square of each layer, in parts of the values'."""
    true = engine[2].astype(np.float64)
    squares = ((predicted - true) ** 2).mean(axis=(1, 2, 3, 4)) / (true**2).mean(axis=(1, 2, 3, 4))
    return np.sqrt(squares)


@pytest.mark.parametrize("closed", [True, False])
def test_it_predicts_what_the_engine_caches(engine: Any, closed: bool) -> None:
    predicted, true = _predicted(engine, closed), engine[2]
    assert predicted.shape == true.shape == (LAYERS, 2, TOKENS, KV_HEADS, 32)
    # The cache rounds to 8 bits; beside that there is the engine's own rounding of activations, to 16 bits.
    typical = np.abs(true).mean()
    assert (np.abs(predicted - true) <= np.abs(true) * 2.0**-7 + typical * 2.0**-8).all()
    assert (_error(engine, predicted) < 2.0**-9).all()


def test_coarser_activations_and_weights_predict_worse_from_layer_1_on(engine: Any) -> None:
    exact = _error(engine, _predicted(engine, True))
    kinds = [Precision("int16"), Precision("bf16"), Precision("int8"), Precision("int8", "Q4_1", ())]
    int16, bf16, int8, rounded = (_error(engine, _predicted(engine, True, kind)) for kind in kinds)
    assert {errors[0] for errors in (int16, bf16, int8, rounded)} == {exact[0]}  # K and V are projected exactly
    assert (int16[1:] < 1.01 * exact[1:]).all()
    assert (exact[1:] < bf16[1:]).all()
    assert (1.5 * bf16[1:] < int8[1:]).all()
    assert (2 * int8[1:] < rounded[1:]).all()


def test_corrections_across_depth_are_in_units_of_the_hidden_state(engine: Any) -> None:
    """Layer 0 is off by the cache's rounding alone, so that a gain hardly changes layer 1; layer 1 is off by more."""
    plan = engine[0]
    gains = [np.full((2 * KV_HEADS * 32, plan.hidden), 1.0, np.float32) for _ in range(LAYERS)]
    coarse = Precision("int8")
    without, zero, corrected = (
        _predicted(engine, True, coarse, g) for g in (None, [0 * gain for gain in gains], gains)
    )
    np.testing.assert_array_equal(zero, without)
    moved = np.abs(corrected - without).mean(axis=(1, 2, 3, 4))
    assert moved[0] == 0
    assert 0 < moved[1] < moved[2]
