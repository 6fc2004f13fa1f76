"""Mixed requests, and what serving them is said to have cost."""

from itertools import islice

import pytest

from prolepsis import LLM
from prolepsis.bench.serving import Serving, serve
from prolepsis.bench.workload import SYSTEM_PROMPTS, Asked, longest, mixed_requests
from prolepsis.errors import ProlepsisError

VOCAB = 1000


def test_requests_are_mixed_and_share_beginnings() -> None:
    asked = list(islice(mixed_requests(VOCAB, 101, 20, seed=1), 500))
    assert asked == list(islice(mixed_requests(VOCAB, 101, 20, seed=1), 500))
    assert asked[:5] != list(islice(mixed_requests(VOCAB, 101, 20, seed=2), 5))
    assert len({tuple(one.prompt[:50]) for one in asked}) == SYSTEM_PROMPTS
    assert {len(one.prompt) for one in asked} <= set(range(51, 152))
    assert {one.new_tokens for one in asked} == set(range(1, 40))
    assert sum(len(one.prompt) for one in asked) / 500 == pytest.approx(101, rel=0.05)
    assert sum(one.new_tokens for one in asked) / 500 == pytest.approx(20, rel=0.1)
    assert max(len(one.prompt) + one.new_tokens for one in asked) <= longest(101, 20) == 151 + 39
    assert all(0 <= token < VOCAB for one in asked for token in one.prompt)


def test_shortest_lengths() -> None:
    assert [len(one.prompt) for one in islice(mixed_requests(VOCAB, 1, 1, seed=0), 20)] == [1] * 20
    assert longest(1, 1) == 2


def test_as_many_at_once_as_asked_for(tiny_llm: LLM) -> None:
    running: list[int] = []
    before = tiny_llm.engine.statistics()
    serving = serve(
        tiny_llm,
        mixed_requests(VOCAB, 64, 8, seed=3),
        10,
        3,
        lambda: running.append(tiny_llm.engine.statistics().running),
    )
    assert len(running) == 10
    assert max(running) == 2  # beside the one that ends
    after = tiny_llm.engine.statistics()
    assert after.finished - before.finished == 10
    assert not tiny_llm.engine.has_work
    assert 0 < serving.ttft_p50_ms <= serving.ttft_p95_ms
    assert 0 < serving.inter_token_p50_ms <= serving.inter_token_p95_ms
    assert 0 < serving.output_tok_s < serving.total_tok_s
    assert 0 < serving.cached_share < 1


def test_figures_are_of_the_tokens_asked_for(tiny_llm: LLM) -> None:
    asked = [Asked([1] * 40, 10), Asked([2] * 50, 20)]
    serving = serve(tiny_llm, iter(asked), 5, 2, lambda: None)
    assert serving.total_tok_s / serving.output_tok_s == pytest.approx((90 + 30) / 30)
    assert (serving.cached_share, serving.preemptions) == (0, 0)


def test_a_request_that_fails_is_an_error(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr("prolepsis.engine.request.Request.advance", fail)
    with pytest.raises(ProlepsisError, match="a request failed: no luck"):
        serve(tiny_llm, mixed_requests(VOCAB, 16, 4, seed=0), 3, 2, lambda: None)
    assert not tiny_llm.engine.has_work


def test_the_median_of_each_figure() -> None:
    runs = [Serving(*map(float, figures)) for figures in ([1] * 8, [3] * 8, [2, 9, 2, 2, 2, 2, 2, 2])]
    assert Serving.median(runs) == Serving(2, 3, 2, 2, 2, 2, 2, 2)
