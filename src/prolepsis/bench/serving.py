"""How well the engine serves: many requests kept going at once."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from statistics import median

import numpy as np

from prolepsis.bench.workload import Asked
from prolepsis.engine.completion import Completion
from prolepsis.engine.llm import LLM
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.errors import ProlepsisError


@dataclass(frozen=True)
class Serving:
    """One run of a workload, or the medians of several; times are in milliseconds."""

    output_tok_s: float
    total_tok_s: float
    """Prompts and outputs together, tokens found in the prefix cache among them."""
    ttft_p50_ms: float
    """Time to first token, from a request's arrival."""
    ttft_p95_ms: float
    inter_token_p50_ms: float
    inter_token_p95_ms: float
    cached_share: float
    """Of the prompts' tokens, those that were in the cache already."""
    preemptions: float

    @staticmethod
    def median(runs: Sequence["Serving"]) -> "Serving":
        """The median of each figure."""
        names = [field.name for field in fields(Serving)]
        return Serving(**{name: median(getattr(run, name) for run in runs) for name in names})


def serve(llm: LLM, asked: Iterator[Asked], count: int, concurrency: int, on_done: Callable[[], None]) -> Serving:
    """Keep `concurrency` of the next `count` requests in the engine, greedy, ends of sequence ignored.

    `on_done` is called as each ends. Raises ProlepsisError for one that fails.
    """
    queue = islice(asked, count)
    completions: list[Completion] = []
    start = time.perf_counter()
    for one in islice(queue, concurrency):
        completions.append(_add(llm, one))
    while llm.engine.has_work:
        for _, delta in llm.engine.step():
            if delta is None or delta.finish_reason is not None:
                on_done()
                completions += [_add(llm, one) for one in islice(queue, 1)]
    seconds = time.perf_counter() - start
    for failed in (completion for completion in completions if completion.error is not None):
        raise ProlepsisError(f"a request failed: {failed.error}") from failed.error
    return _summary(completions, seconds)


def _add(llm: LLM, asked: Asked) -> Completion:
    params = SamplingParams(temperature=0, max_tokens=asked.new_tokens, ignore_eos=True)
    request = llm.new_request(asked.prompt, params)
    llm.engine.add(request)
    return request.completion


def _summary(completions: list[Completion], seconds: float) -> Serving:
    statistics = [completion.statistics for completion in completions]
    prompts = sum(completion.prompt_tokens for completion in completions)
    outputs = sum(len(completion.token_ids) for completion in completions)
    ttft = _percentiles([each.ttft_s for each in statistics if each.ttft_s is not None])
    pauses = _percentiles([pause for each in statistics for pause in each.inter_token_s])
    return Serving(
        output_tok_s=outputs / seconds,
        total_tok_s=(prompts + outputs) / seconds,
        ttft_p50_ms=ttft[0],
        ttft_p95_ms=ttft[1],
        inter_token_p50_ms=pauses[0],
        inter_token_p95_ms=pauses[1],
        cached_share=sum(completion.cached_tokens for completion in completions) / prompts,
        preemptions=sum(each.preemptions for each in statistics),
    )


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    """Median and 95th percentile in milliseconds; zeros where there is nothing, as after single tokens."""
    p50, p95 = np.percentile(seconds or [0.0], [50, 95]) * 1e3
    return float(p50), float(p95)
