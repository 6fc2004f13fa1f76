"""OpenVINO GenAI on a GGUF file, to be measured; see `measure.Engine` for the methods."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai

from prolepsis.bench.engines import Setup

_WHOLE_PROMPTS = 1 << 16  # tokens in a step: prompts are never cut, as in its LLMPipeline, which is fastest here


class OpenVINO:
    """Its continuous batching, greedy, with its own defaults for everything else (among them a KV cache of 8 bits)."""

    def __init__(self, setup: Setup) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.max_num_batched_tokens = _WHOLE_PROMPTS
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            setup.model, scheduling, "CPU", {"INFERENCE_NUM_THREADS": setup.threads}
        )
        self._ids = itertools.count()
        self._context = setup.context
        self._running: Any = None

    def prefill(self, tokens: Sequence[int]) -> None:
        self._abandon()
        self._running = self._add(tokens, self._context - len(tokens))
        while not self._running.can_read():
            self._pipeline.step()

    def decode(self, token: int) -> None:
        self._pipeline.step()

    def serve(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        self._abandon()
        handles = [self._add(prompt, new_tokens) for prompt in prompts]  # one that nobody holds is given up
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        assert all(len(output.generated_ids) == new_tokens for each in handles for output in each.read_all())

    def _abandon(self) -> None:
        if self._running is not None:
            self._running.cancel()
            self._pipeline.step()
            self._running = None

    def _add(self, tokens: Sequence[int], new_tokens: int) -> Any:
        asked = openvino_genai.GenerationConfig()
        asked.max_new_tokens, asked.ignore_eos, asked.do_sample = new_tokens, True, False
        ids = openvino.Tensor(np.array([tokens], np.int64))
        return self._pipeline.add_request(next(self._ids), ids, asked)
