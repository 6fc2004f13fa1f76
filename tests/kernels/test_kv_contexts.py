"""Contexts and centres are those of docs/format.md, for every dtype and whatever is predicted."""

import numpy as np
import pytest
from forms import DTYPES, LETTERS, expected, form_of
from hypothesis import given, settings
from hypothesis import strategies as st

from prolepsis.coding.cache_dtypes import FORMATS, quantise, to_scalars
from prolepsis.kernels import kv_contexts
from prolepsis.kernels.kv_contexts import CONTEXTS, NEVER_NEAR, SLACK


def classified(predictions: np.ndarray, scales: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    n = len(predictions)
    padded = np.concatenate([predictions, np.full(SLACK, np.nan)]).astype(np.float32)
    wide = np.concatenate([scales, np.full(SLACK, 77)]).astype(np.int16)
    contexts, centres = np.zeros(n + SLACK, np.uint8), np.zeros(n + SLACK, np.uint16)
    kv_contexts.classify(padded, wide, n, form_of(dtype), contexts, centres)
    return contexts[:n], centres[:n]


@pytest.mark.parametrize("dtype", DTYPES)
def test_forms(dtype: str) -> None:
    assert tuple(form_of(dtype)[:6]) == LETTERS[dtype]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 2**32), st.sampled_from([1, 31, 32, 33, 200]))
def test_contexts_and_centres(dtype: str, seed: int, n: int) -> None:
    random = np.random.default_rng(seed)
    scales = np.where(random.random(n) < 0.1, NEVER_NEAR, random.integers(1, 2040, n))
    octave = np.where(random.random(n) < 0.7, scales / 8 - 127 + random.normal(0, 3, n), random.uniform(-140, 127, n))
    signs = random.choice([-1, 1], n)
    predictions = (signs * 2.0 ** np.clip(octave, -149, 127) * random.uniform(1, 2, n)).astype(np.float32)
    predictions[random.random(n) < 0.1] = 0
    predictions[random.random(n) < 0.05] = -0.0
    contexts, centres = classified(predictions, scales, dtype)
    pairs = [expected(p, int(s), dtype) for p, s in zip(predictions, scales, strict=True)]
    assert list(zip(contexts.tolist(), centres.tolist(), strict=True)) == pairs
    assert contexts.max() < CONTEXTS


@pytest.mark.parametrize("dtype", [d for d in DTYPES if not FORMATS[d].limit])
def test_far_centres_are_the_rounded_predictions(dtype: str) -> None:
    """As the cache itself would round them, up to the largest number or infinity; ties and subnormals too."""
    random = np.random.default_rng(0)
    m, e, largest, _, _, _ = LETTERS[dtype]
    smallest = 2.0 ** (e - 126 - m)
    special = [0.0, smallest / 2, smallest * 1.5, smallest * 2.5, smallest * 2**m, 1 + 2.0 ** -(m + 1), 65519, 65520]
    spread = random.normal(size=20_000) * 2.0 ** random.integers(e - 130, e - 90, 20_000).clip(-120, 100)
    predictions = np.concatenate([special, np.negative(special), [3e38, -3e38], spread]).astype(np.float32)
    _, centres = classified(predictions, np.full(len(predictions), NEVER_NEAR), dtype)
    scalars = to_scalars(quantise(predictions[None, None, :, None, None], dtype), dtype).ravel()
    assert np.array_equal(centres, np.minimum(scalars & 0x7FFF, largest) | scalars & 0x8000)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integers_are_centred_on_the_nearest(dtype: str) -> None:
    """A residual of 0, below or above zero alike, is the integer nearest to the prediction."""
    limit = FORMATS[dtype].limit
    predictions = np.concatenate([np.arange(-limit - 2, limit + 3, 0.25), [1e9, -1e9, 512, -512]]).astype(np.float32)
    contexts, centres = classified(predictions, np.full(len(predictions), 1016), dtype)
    ordinals = (centres & 0x7FFF).astype(np.int64)
    nearest = np.where(centres >> 15, -1 - ordinals, ordinals)
    halves_away = np.trunc(predictions.astype(np.float64) + np.copysign(0.5, predictions))
    assert np.array_equal(nearest, np.clip(halves_away, -limit, limit))
    assert (contexts == 60).all()  # of scale 1 = ulp


def test_narrow_integers_tell_the_quarter_of_the_prediction() -> None:
    """Seen from the side that ordinals are mirrored to, so that a curve and its mirror image share a context."""
    predictions = np.array([2.5, 2.8, 3.0, 3.3, 0.1, 0.3, -0.1, -0.3, -2.5, -2.8, -3.0, -3.3], np.float32)
    contexts, centres = classified(predictions, np.full(len(predictions), 1016 - 8), "int8")
    assert (contexts - 40 - 4 * 3).tolist() == [0, 1, 2, 3, 2, 3, 1, 0, 0, 1, 2, 3]
    assert (centres & 0x7FFF).tolist() == [3, 3, 3, 3, 0, 0, 0, 0, 2, 2, 2, 2]
    assert (centres >> 15).tolist() == [0] * 8 + [1] * 4
    narrowest, _ = classified(predictions, np.full(len(predictions), NEVER_NEAR), "int8")
    assert (narrowest - 40).max() == 3


def test_shifted_scales() -> None:
    codes, shifts = np.arange(2040)[:, None], np.array([-1024, -5, 0, 3, 1024])
    for code, row in zip(codes.ravel().tolist(), codes + shifts, strict=True):
        moved = [NEVER_NEAR] * len(row) if code == 0 else np.clip(row, 1, 2039).tolist()
        assert [kv_contexts.scale_of.py_func(code, s) for s in shifts.tolist()] == moved
