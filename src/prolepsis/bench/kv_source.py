"""What `kv bench` takes from the engine: the KV, tokens that continue a text, and how fast all is recomputed."""

import statistics
import time
from collections.abc import Callable, Sequence

from prolepsis.bench.kv_bench import Cache
from prolepsis.coding.cache_dtypes import DType
from prolepsis.engine.identity import geometry, identity
from prolepsis.engine.llm import LLM
from prolepsis.engine.profiles import kv_of_texts
from prolepsis.engine.sampling_params import SamplingParams

_SEED = 0


def continued(llm: LLM, ids: Sequence[int], count: int) -> list[int]:
    """`count` tokens that the engine goes on with after `ids`.

    Sampled at temperature 1 with a fixed seed: the most probable ones would soon repeat themselves.
    """
    if count == 0:
        return []
    params = SamplingParams(temperature=1.0, seed=_SEED, max_tokens=count, ignore_eos=True)
    return llm.generate([list(ids)], params)[0].token_ids


def cache_of(llm: LLM, ids: Sequence[int], prompt: int, dtype: DType) -> Cache:
    """The KV of all `ids`, of which the first `prompt` were given. A generated token's KV has the same bits as here,
    where it is computed together with those before it (docs/determinism.md).

    Raises:
        InputError: heads that the dtype cannot store.
    """
    window = next(kv_of_texts(llm, [ids], dtype, len(ids), len(ids)))
    return Cache(window.kv, window.ids, prompt, geometry(llm, dtype), llm.rope, identity(llm))


def prefill_s(llm: LLM, ids: Sequence[int]) -> float:
    """Seconds that the engine takes to compute the KV of `ids`, once."""
    sequence = llm.runner.new_sequence(ids)
    start = time.perf_counter()
    try:
        llm.runner.prefill(sequence)
    finally:
        sequence.release()
    return time.perf_counter() - start


def prefill_speed(llm: LLM, ids: Sequence[int], runs: int, on_run: Callable[[int, int], None]) -> float:
    """Tokens a second at which the engine computes the KV of `ids`: the median of `runs`, after one that is left out.

    on_run(runs done, runs), which counts that one too.
    """
    seconds = []
    for run in range(runs + 1):
        seconds.append(prefill_s(llm, ids))
        on_run(run + 1, runs + 1)
    return len(ids) / statistics.median(seconds[1:])
