"""Channels predicted from each other, against the same written plainly in NumPy."""

import numpy as np
import pytest

from prolepsis.kernels.int8_product import pack
from prolepsis.kernels.kv_chain import (
    GROUP,
    PAIRS,
    ChainTables,
    ChainWork,
    add_products,
    learn_group,
    predict_group,
    token_features,
)

f32 = np.float32


def tables_and_work(tokens, groups, turned, units=False, seed=0):
    random = np.random.default_rng(seed)
    channels = GROUP * groups

    def floats(*shape):
        return random.normal(size=shape).astype(f32)

    chain = [random.integers(-127, 128, (GROUP, GROUP * g)).astype(np.int8) for g in range(groups)]
    tables = ChainTables(
        np.arange(channels, dtype=np.int32),
        np.array([PAIRS * g if g < turned else -1 for g in range(groups)], np.int32),
        np.concatenate([pack(c) for c in chain]),
        f32(0.01) * floats(channels),
        floats(channels),
        f32(30) * np.abs(floats(channels)),
        np.abs(floats(channels)),
        random.integers(800, 1100, channels).astype(np.int32),
    )
    angles = random.uniform(0, 6, (tokens, PAIRS * max(1, turned)))
    heads = groups if units else 0
    work = ChainWork(
        floats(tokens, channels),
        np.cos(angles).astype(f32),
        np.sin(angles).astype(f32),
        np.zeros((tokens, channels), np.int8),
        np.zeros(tokens, np.int32),
        np.zeros(tokens, np.int64),
        np.abs(floats(heads, tokens)),
        random.integers(-40, 40, (heads, tokens)).astype(np.int32),
        np.zeros((tokens, GROUP), f32),
        np.zeros((tokens, GROUP), np.int32),
    )
    return chain, tables, work


def turn(x, cos, sin):
    a, b = x[:, :PAIRS], x[:, PAIRS:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=1)


@pytest.mark.parametrize(("tokens", "groups", "turned"), [(1, 1, 0), (7, 3, 2), (33, 4, 4)])
def test_prediction_and_learning(tokens, groups, turned):
    chain, tables, work = tables_and_work(tokens, groups, turned)
    random, features = np.random.default_rng(9), np.zeros((tokens, 0), np.int64)
    energy = np.zeros(tokens, np.int64)
    for g in range(groups):
        part = slice(GROUP * g, GROUP * (g + 1))
        predictions, shifts = np.zeros((tokens, GROUP), f32), np.zeros(tokens, np.int32)
        predict_group(g, tables, work, predictions.reshape(-1), shifts)
        guess = work.base[:, part] + tables.steps[part] * (features @ chain[g].T.astype(np.int64)).astype(f32)
        pair = tables.pairs[g]
        cos, sin = work.cos[:, pair : pair + PAIRS], work.sin[:, pair : pair + PAIRS]
        assert np.array_equal(predictions, turn(guess, cos, sin) if pair >= 0 else guess)
        octaves = np.log2((energy + 256) / (64 * (GROUP * g + 4))) / 2
        assert np.abs(shifts / 8 - octaves).max() < 0.2
        values = (predictions + random.normal(size=predictions.shape)).astype(f32)
        learn_group(g, tables, work, values.reshape(-1).copy())
        plain = turn(values, cos, -sin) if pair >= 0 else values
        learned = np.rint((plain - tables.means[part]) * tables.inverses[part]).clip(-127, 127).astype(np.int64)
        features = np.concatenate([features, learned], axis=1)
        errors = np.rint((plain - guess) * tables.errors[part] * f32(8)).clip(-1023, 1023).astype(np.int64)
        energy += (errors**2).sum(axis=1)
        assert np.array_equal(work.features[:, : part.stop], features)
        assert np.array_equal(work.sums, features.sum(axis=1))
        assert np.array_equal(work.energy, energy)


def test_integer_caches_are_predicted_in_their_steps():
    _, tables, plain = tables_and_work(20, 2, 0)
    _, _, work = tables_and_work(20, 2, 0, units=True)
    work.units[1, 3] = np.inf
    predictions, shifts = np.zeros((20, GROUP), f32), np.zeros(20, np.int32)
    before = np.zeros(20, np.int32)
    predict_group(1, tables, plain._replace(base=work.base), predictions.reshape(-1), before)
    expected = np.clip(predictions / work.units[1][:, None], -512, 512)
    predict_group(1, tables, work, predictions.reshape(-1), shifts)
    assert np.array_equal(predictions, expected)
    assert (predictions[3] == 0).all()
    assert np.array_equal(shifts, before + work.unit_shifts[1])


def test_values_that_are_no_numbers_are_learned_alike_everywhere():
    _, tables, work = tables_and_work(4, 1, 0)
    values = np.zeros((4, GROUP), f32)
    values[0], values[1], values[2], values[3] = np.nan, np.inf, -np.inf, 3e38
    learn_group(0, tables, work, values.reshape(-1))
    bounds = np.where(tables.inverses != 0, 127, 0)
    assert np.array_equal(work.features, np.stack([-bounds, bounds, -bounds, bounds]))
    assert (work.energy[1:] == GROUP * 1023**2).all()


def test_terms_add_up_in_float32():
    random = np.random.default_rng(2)
    x, weights = (random.integers(-127, 128, (rows, 64)).astype(np.int8) for rows in (9, 48))
    steps, out = random.normal(size=48).astype(f32), random.normal(size=(9, 48)).astype(f32)
    expected = out + steps * (x.astype(np.int64) @ weights.T).astype(f32)
    add_products(x, x.sum(axis=1, dtype=np.int32), pack(weights), steps, np.zeros((9, GROUP), np.int32), out)
    assert np.array_equal(out, expected)


def test_token_features_have_16_bits():
    random = np.random.default_rng(3)
    rows = random.normal(size=(5, 24)).astype(f32)
    rows[4] = 0
    means, inverses = random.normal(size=24).astype(f32), np.full(24, 5000, f32)
    high, low = np.zeros((5, 32), np.int8), np.zeros((5, 32), np.int8)
    token_features(rows, means, inverses, f32(1e-5), high, low)
    normed = (rows / np.sqrt((rows.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5)).astype(f32)
    exact = ((normed - means) * inverses).astype(np.float64).clip(-127 * 256, 127 * 256)
    features = 256 * high[:, :24].astype(np.int64) + low[:, :24]
    assert np.abs(features - exact).max() <= 0.51
    assert (high[:, 24:] == 0).all()
