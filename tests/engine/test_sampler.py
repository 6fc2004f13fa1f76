import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prolepsis.engine import rng
from prolepsis.engine.sampler import (
    Sampler,
    TokenCounts,
    sample,
    target_probabilities,
    with_logprobs,
)
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.errors import InputError, ProlepsisError


def reference_probabilities(
    logits: np.ndarray, params: SamplingParams, prompt: list[int] = (), output: list[int] = ()
) -> np.ndarray:
    """The documented order of operations, spelled out one token at a time and with full sorts."""
    values = [float(x) for x in logits]
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in set(output):
        values[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    scaled = np.array(values) / params.temperature
    weights = np.exp(scaled - scaled.max())
    order = sorted(range(len(values)), key=lambda token: (-weights[token], token))
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        mass = np.cumsum(weights[order]) / weights[order].sum()
        order = order[: int(np.searchsorted(mass, params.top_p)) + 1]  # rounding may leave all of it short of top_p
    kept = [token for token in order if weights[token] >= params.min_p * weights.max()]
    probabilities = np.zeros(len(values))
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


def random_logits(vocab: int = 1000, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=vocab) * scale).astype(np.float32)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=1),
        SamplingParams(top_k=7),
        SamplingParams(top_k=5000),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.999, temperature=1.7),
        SamplingParams(top_p=1e-6),
        SamplingParams(min_p=0.1),
        SamplingParams(min_p=1.0),
        SamplingParams(top_k=50, top_p=0.8, min_p=0.05, temperature=0.9),
        SamplingParams(logit_bias={3: 5.0, 17: -100.0}, top_k=20),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(presence_penalty=1.5, frequency_penalty=-0.7),
        SamplingParams(
            repetition_penalty=0.8,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            logit_bias={5: 4.0, 9: -2.0},
            top_k=100,
            top_p=0.9,
            min_p=0.01,
        ),
    ],
    ids=repr,
)
def test_probabilities_equal_the_plain_reference(params):
    prompt, output = [1, 2, 3, 3, 5], [5, 5, 9, 700]
    for seed in range(4):
        logits = random_logits(seed=seed)
        before = logits.copy()
        counts = TokenCounts(prompt)
        for token in output:
            counts.add(token)
        expected = reference_probabilities(logits, params, prompt, output)
        actual = target_probabilities(logits, params, counts)
        assert np.array_equal(actual > 0, expected > 0)
        np.testing.assert_allclose(actual, expected, rtol=2e-5)  # adjusted logits are rounded to float32
        assert math.isclose(actual.sum(), 1.0, rel_tol=1e-12)
        assert np.array_equal(logits, before)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=200),
    st.integers(0, 210),
    st.floats(0.01, 1.0),
    st.sampled_from([0.5, 1.0, 1.5]),
)
@example([0, 0, 0, 0, 0, 0, 0, 3], 0, 1 - 2**-53, 0.5)
def test_ties_are_cut_by_the_lowest_id(steps, top_k, top_p, temperature):
    """Logits on a coarse grid: many are equal, and the cuts fall among them."""
    logits = np.array(steps, dtype=np.float32)
    params = SamplingParams(top_k=top_k, top_p=top_p, temperature=temperature)
    kept = target_probabilities(logits, params, None) > 0
    expected = reference_probabilities(logits, params) > 0
    if not np.array_equal(kept, expected):
        # A cumulative probability that equals top_p up to rounding may be counted on either side of it.
        assert abs(int(kept.sum()) - int(expected.sum())) == 1
        smaller, larger = sorted((kept, expected), key=np.sum)
        assert np.all(larger >= smaller)
        full = reference_probabilities(logits, SamplingParams(top_k=top_k, temperature=temperature))
        assert math.isclose(full[smaller].sum(), top_p, rel_tol=1e-12)
    order = np.lexsort((np.arange(len(logits)), -logits))
    assert np.all(kept[order[: kept.sum()]])


def test_equal_logits_keep_the_lowest_ids():
    probabilities = target_probabilities(np.zeros(500, dtype=np.float32), SamplingParams(top_k=3), None)
    assert np.flatnonzero(probabilities).tolist() == [0, 1, 2]
    nucleus = target_probabilities(np.zeros(500, dtype=np.float32), SamplingParams(top_p=0.1), None)
    assert np.flatnonzero(nucleus).tolist() == list(range(50))


def test_ties_inside_one_bin_are_cut_by_the_lowest_id():
    """Three logits so close that their weights share a bin, scattered over many tokens."""
    logits = np.random.default_rng(0).choice(np.array([0, -1e-3, -2e-3], dtype=np.float32), size=3000)
    order = np.lexsort((np.arange(len(logits)), -logits))
    for top_k in (10, 1000, 1500, 2500):
        kept = np.flatnonzero(target_probabilities(logits, SamplingParams(top_k=top_k), None))
        assert kept.tolist() == sorted(order[:top_k].tolist())


def test_very_unlikely_tokens_neither_disturb_nor_survive_a_cut():
    logits = np.array([0.0, -1.0, -50.0, -1000.0, -np.inf], dtype=np.float32)
    plain = target_probabilities(logits, SamplingParams(), None)
    assert plain[2] > 0
    assert plain[3:].tolist() == [0.0, 0.0]
    cut = target_probabilities(logits, SamplingParams(top_k=4), None)
    assert np.flatnonzero(cut).tolist() == [0, 1]
    np.testing.assert_allclose(cut, plain, atol=1e-19)


def test_temperature_zero_takes_the_lowest_of_the_best():
    logits = np.array([1.0, 4.0, 4.0, -np.inf], dtype=np.float32)
    params = SamplingParams(temperature=0)
    assert target_probabilities(logits, params, None).tolist() == [0, 1, 0, 0]
    assert Sampler(params, 4).sample(logits).token == 1


def test_greedy_obeys_bias_and_penalties():
    logits = np.array([1.0, 4.0, 3.0], dtype=np.float32)
    biased = Sampler(SamplingParams(temperature=0, logit_bias={0: 10.0}), 3)
    assert biased.sample(logits).token == 0
    penalised = Sampler(SamplingParams(temperature=0, presence_penalty=2.0), 3)
    assert [penalised.sample(logits).token for _ in range(3)] == [1, 2, 1]


def test_presence_and_frequency_ignore_the_prompt_and_repetition_does_not():
    logits = np.array([2.0, 1.9], dtype=np.float32)
    output_only = Sampler(SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=2.0), 2, prompt=[0])
    assert output_only.sample(logits).token == 0
    both = Sampler(SamplingParams(temperature=0, repetition_penalty=2.0), 2, prompt=[0])
    assert both.sample(logits).token == 1


@pytest.mark.parametrize("position", [0, 5, 63, 64, 999])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0), SamplingParams(presence_penalty=1)]
)
def test_logits_that_are_not_numbers_are_reported(position, bad, params):
    logits = random_logits()
    logits[position] = bad
    with pytest.raises(ProlepsisError, match=f"the logit {bad} for token {position}"):
        Sampler(params, len(logits)).sample(logits)


def test_logits_that_rule_everything_out_are_reported():
    with pytest.raises(ProlepsisError, match="no token can be chosen"):
        Sampler(SamplingParams(), 10).sample(np.full(10, -np.inf, dtype=np.float32))


def test_a_bias_beyond_the_vocabulary_is_refused():
    with pytest.raises(InputError, match="logit_bias names token 10, but the vocabulary has 10"):
        Sampler(SamplingParams(logit_bias={10: 1.0}), 10)


@pytest.mark.parametrize("vocab", [1, 5, 64, 65, 1000])
def test_drawing_inverts_the_cumulative_distribution(vocab):
    probabilities = target_probabilities(random_logits(vocab), SamplingParams(top_k=vocab // 2 + 1), None)
    edges = np.cumsum(probabilities) / probabilities.sum()
    for uniform in [0.0, *np.random.default_rng(1).random(300), 1 - 2**-53]:
        token = sample(probabilities, uniform)
        assert probabilities[token] > 0
        assert (edges[token - 1] if token else 0.0) <= uniform + 1e-12
        assert uniform - 1e-12 <= edges[token]


def test_a_token_of_probability_zero_is_never_drawn():
    probabilities = np.zeros(300)
    probabilities[[70, 130]] = 0.5
    assert {sample(probabilities, u) for u in (0.0, 0.25, 0.4999999)} == {70}
    assert {sample(probabilities, u) for u in (0.5, 0.75, 1 - 2**-53)} == {130}


@pytest.mark.parametrize("params", [{}, {"top_k": 6, "temperature": 1.4}, {"top_p": 0.8}, {"min_p": 0.2}], ids=repr)
def test_the_sampled_frequencies_follow_the_distribution(params):
    logits = random_logits(40, seed=3, scale=1.0)
    params = SamplingParams(seed=11, **params)
    expected = reference_probabilities(logits, params)
    sampler = Sampler(params, len(logits))
    draws = 20_000
    counts = np.bincount([sampler.sample(logits).token for _ in range(draws)], minlength=len(logits))
    assert np.all(counts[expected == 0] == 0)
    support = expected > 0
    statistic = np.sum((counts - draws * expected)[support] ** 2 / (draws * expected[support]))
    freedom = support.sum() - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 10  # p < 1e-5


def test_the_nth_token_depends_on_seed_and_position_alone():
    logits = random_logits()
    params = SamplingParams(seed=5)
    sampler = Sampler(params, len(logits))
    tokens = [sampler.sample(logits).token for _ in range(30)]
    other = Sampler(params, len(logits))
    for _ in range(20):
        other.record(0)
    assert [other.sample(logits).token for _ in range(10)] == tokens[20:]
    assert len(set(tokens)) > 5
    different = Sampler(SamplingParams(seed=6), len(logits))
    assert [different.sample(logits).token for _ in range(30)] != tokens


def test_a_seed_drawn_for_the_request_is_reported_and_replays_it():
    logits = random_logits()
    first = Sampler(SamplingParams(), len(logits))
    tokens = [first.sample(logits).token for _ in range(10)]
    again = Sampler(SamplingParams(seed=first.seed), len(logits))
    assert [again.sample(logits).token for _ in range(10)] == tokens
    assert Sampler(SamplingParams(), len(logits)).seed != first.seed


def test_many_tokens_are_counted():
    prompt, output = [5, 9, 5], [*range(300), 7, 7, 5]
    counts = TokenCounts(prompt)
    for token in output:
        counts.add(token)
    expected = {token: output.count(token) for token in {*prompt, *output}}
    assert dict(zip(counts.tokens.tolist(), counts.output.tolist(), strict=True)) == expected


def test_recording_a_token_counts_for_the_penalties():
    logits = np.array([2.0, 1.0], dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=0, frequency_penalty=0.6), 2)
    sampler.record(0)
    assert sampler.sample(logits).token == 0
    assert sampler.sample(logits).token == 1


def test_logprobs_are_of_the_raw_logits():
    logits = random_logits()
    params = SamplingParams(temperature=0, logit_bias={4: 100.0}, logprobs=5, repetition_penalty=1.5)
    result = Sampler(params, len(logits)).sample(logits)
    values = logits.astype(np.float64)
    expected = values - values.max() - np.log(np.sum(np.exp(values - values.max())))
    assert result.token == 4
    assert result.logprob == pytest.approx(expected[4], abs=1e-12)
    best = np.argsort(-expected, kind="stable")[:5]
    assert [token for token, _ in result.top_logprobs] == best.tolist()
    assert [value for _, value in result.top_logprobs] == pytest.approx(expected[best], abs=1e-12)


def test_top_logprobs_break_ties_by_id_and_reach_into_the_unlikely():
    logits = np.array([0.0, -500.0, 3.0, 3.0, -900.0, -2000.0, 0.0], dtype=np.float32)
    assert [token for token, _ in with_logprobs(logits, 2, 7).top_logprobs] == [2, 3, 0, 6, 1, 4, 5]
    assert [token for token, _ in with_logprobs(logits, 2, 3).top_logprobs] == [2, 3, 0]
    assert len(with_logprobs(logits, 2, 20).top_logprobs) == 7


def test_logprobs_only_where_asked():
    logits = random_logits()
    assert Sampler(SamplingParams(), len(logits)).sample(logits)[1:] == (None, ())
    only_chosen = Sampler(SamplingParams(logprobs=0), len(logits)).sample(logits)
    assert only_chosen.logprob is not None
    assert only_chosen.top_logprobs == ()


def test_position_and_seed_are_all_the_randomness():
    logits = random_logits()
    params = SamplingParams(seed=9, top_k=30)
    sampler = Sampler(params, len(logits))
    for position in range(5):
        expected = sample(target_probabilities(logits, params, None), rng.uniform(9, position))
        assert sampler.sample(logits).token == expected
