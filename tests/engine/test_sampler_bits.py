"""Every probability, to the last bit, and every token are those of the plain definition, however they are found."""

import numpy as np
import pytest
import sampling_reference as reference

from prolepsis.engine.sampler import Sampler, target_probabilities
from prolepsis.engine.sampling_params import SamplingParams

PROMPT = [1, 2, 3, 3, 5]  # below the smallest vocabulary

SETTINGS = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 50.0},
    "cold": {"temperature": 1e-3},
    "top_k 1": {"top_k": 1},
    "top_k": {"top_k": 50},
    "top_k as many as blocks": {"top_k": 32},
    "top_k beyond blocks": {"top_k": 300},
    "top_p": {"top_p": 0.9},
    "top_p, where equal weights reach it exactly": {"top_p": 0.25},
    "top_p near 1": {"top_p": 1 - 2**-53},
    "top_p of hot": {"top_p": 0.95, "temperature": 2.0},
    "top_p of next to nothing": {"top_p": 1e-300},
    "min_p": {"min_p": 0.05},
    "min_p 1": {"min_p": 1.0},
    "min_p of all": {"min_p": 1e-300},
    "all three": {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.9},
    "top_p of many": {"top_k": 1500, "top_p": 0.8},
    "min_p within top_p": {"top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 1.5, "frequency_penalty": -0.7},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 0.7, "frequency_penalty": 0.5},
    "all": {"logit_bias": {4: 4.0, 1: -2.0}, "repetition_penalty": 0.8, "frequency_penalty": 0.3, "top_p": 0.9},
}


def rows():
    """Logits of 2048 tokens and of a number that neither blocks nor fours divide."""
    random = np.random.default_rng(0)
    for vocab in (2048, 1003, 7):
        yield random.normal(size=vocab) * 3
        yield random.normal(size=vocab) * 30
        yield random.normal(size=vocab) * 1e-9
        yield random.integers(-6, 6, vocab).astype(float)  # many equal
        yield random.choice([0, -1e-3, -2e-3], size=vocab)  # all in a bin or two
        yield np.zeros(vocab)
        yield np.where(random.random(vocab) < 0.5, -np.inf, random.normal(size=vocab) * 200)
        yield np.sort(random.normal(size=vocab))[::-1] * 8


@pytest.mark.parametrize("fields", SETTINGS.values(), ids=SETTINGS.keys())
def test_bits_are_those_of_the_definition(fields):
    for seed, row in enumerate(rows()):
        logits = row.astype(np.float32)
        params = SamplingParams(seed=seed, **fields)
        sampler, output = Sampler(params, len(logits), PROMPT), []
        for _ in range(3):
            output.append(sampler.sample(logits).token)
            assert output[-1] == reference.token(logits, params, PROMPT, output[:-1])
        if not params.is_greedy and not params.has_penalties:
            expected = reference.probabilities(logits, params, PROMPT, output)
            assert np.array_equal(target_probabilities(logits, params, None), expected)
