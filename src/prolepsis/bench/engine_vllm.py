"""vLLM on a directory of safetensors, to be measured; see `measure.Engine` for the methods."""

import itertools
import os
from collections.abc import Sequence

from prolepsis.bench.engines import Setup

_KV_GIB = 2


class VLLM:
    """Its engine in this process, greedy, with prefix caching off, which only other requests could gain from."""

    def __init__(self, setup: Setup) -> None:
        # Read when it is imported or begins to run.
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
            "OMP_NUM_THREADS": str(setup.threads),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: setup.threads])),
        }
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._llm = LLM(
            setup.model,
            skip_tokenizer_init=True,
            max_model_len=setup.context,
            enable_prefix_caching=False,
        )
        self._engine = self._llm.llm_engine
        self._params, self._kind = SamplingParams, RequestOutputKind.DELTA
        self._ids = map(str, itertools.count())
        self._context = setup.context
        self._running: str | None = None

    def prefill(self, tokens: Sequence[int]) -> None:
        self._abandon()
        self._running = self._add(tokens, self._context - len(tokens))
        self.decode(0)

    def decode(self, token: int) -> None:
        while not any(output.outputs[0].token_ids for output in self._engine.step()):
            pass

    def serve(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        self._abandon()
        for prompt in prompts:
            self._add(prompt, new_tokens)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _abandon(self) -> None:
        if self._running is not None:
            self._engine.abort_request([self._running])
            self._running = None

    def _add(self, tokens: Sequence[int], new_tokens: int) -> str:
        asked = self._params(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, output_kind=self._kind
        )
        name = next(self._ids)
        self._engine.add_request(name, {"prompt_token_ids": list(tokens)}, asked)
        return name
