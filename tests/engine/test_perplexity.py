"""Perplexity in windows against the same sum in float64 over all logits."""

from pathlib import Path

import numpy as np
import pytest
from test_generate import log_softmax, logits_after

from prolepsis import LLM
from prolepsis.engine.perplexity import compare, measure_perplexity
from prolepsis.errors import InputError


@pytest.mark.parametrize(("count", "context"), [(2, 64), (64, 64), (65, 64), (66, 64), (700, 300), (700, 2048)])
def test_windows_are_scored_from_their_second_token(llm: LLM, count: int, context: int) -> None:
    tokens = [(37 * i + i * i) % 1024 for i in range(count)]
    terms = []
    for start in range(0, count, context):
        window = tokens[start : start + context]
        log_probabilities = log_softmax(logits_after(llm, window))
        terms += [log_probabilities[i, token] for i, token in enumerate(window[1:])]
    outcome = measure_perplexity(llm.runner, tokens, context)
    assert outcome.tokens == len(terms)
    assert outcome.nats == pytest.approx(-np.mean(terms), rel=1e-12)
    assert outcome.perplexity == pytest.approx(np.exp(-np.mean(terms)), rel=1e-12)


def test_a_comparison_is_that_of_all_log_probabilities(llm: LLM, tiny: Path) -> None:
    other = LLM(tiny.with_name("F16.gguf"), max_context=512)
    tokens = [(37 * i + i * i) % 1024 for i in range(300)]
    p, q = (log_softmax(logits_after(each, tokens))[:-1] for each in (llm, other))
    outcome = compare(llm.runner, other.runner, tokens, 300)
    assert outcome.kl == pytest.approx((np.exp(p) * (p - q)).sum(axis=1).mean(), rel=1e-9)
    assert outcome.same_top == (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    assert outcome.reference == measure_perplexity(llm.runner, tokens, 300)
    assert outcome.model == measure_perplexity(other.runner, tokens, 300)
    assert compare(llm.runner, llm.runner, tokens, 64).kl == 0


def test_progress_reaches_the_end(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    measure_perplexity(llm.runner, [5] * 600, 300, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (600, 600)


@pytest.mark.parametrize("tokens", [[], [5]])
def test_a_text_needs_two_tokens(llm: LLM, tokens: list[int]) -> None:
    with pytest.raises(InputError, match="perplexity needs at least 2"):
        measure_perplexity(llm.runner, tokens, 64)
