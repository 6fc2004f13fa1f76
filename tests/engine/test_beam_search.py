import math
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from prolepsis import LLM
from prolepsis.engine.beam_search import BeamParams, BeamSearch, beam_search, log_probabilities
from prolepsis.errors import CapacityError, InputError, ModelFileError

MODEL_ERROR = 0.002  # between a log-probability of the engine's and one of transformers'
VOCAB = 1024


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def search(llm: LLM, tokens: list[int], params: BeamParams) -> list[tuple[list[int], float, str]]:
    """The outcome as plain values; nothing may be left in the cache."""
    found = beam_search(llm.runner, tokens, params, context=llm.max_context)
    llm.kv_cache.check([])
    assert llm.kv_cache.pool.num_used == 0
    assert all(one.score == one.cumulative_logprob / divisor(one.token_ids, params) for one in found)
    return [(one.token_ids, one.score, one.finish_reason) for one in found]


def divisor(tokens: list[int], params: BeamParams) -> float:
    return float(len(tokens)) ** params.length_penalty


class Plain:
    """The search once more, on lists: every sequence is computed from its first token each time, in blocks of its own.

    `margin` is how far the log-probabilities may be off before another choice could have been made.
    """

    def __init__(self, llm: LLM, tokens: list[int], params: BeamParams) -> None:
        self.llm = llm
        self.prompt = tokens
        self.params = params
        self.margin = math.inf
        self.finished: list[tuple[float, list[int], str]] = []

    def next_logprobs(self, generated: list[int]) -> list[float]:
        sequence = self.llm.runner.new_sequence([*self.prompt, *generated])
        logits = self.llm.runner.prefill(sequence)
        sequence.release()
        return log_probabilities(logits).tolist()

    def run(self) -> list[tuple[list[int], float, str]]:
        running: list[tuple[float, list[int]]] = [(0.0, [])]
        for step in range(1, self.params.max_tokens + 1):
            running = self.step(running, last=step == self.params.max_tokens)
            if not running or self.is_over(running[0][0], step):
                break
        for better, worse in pairwise(self.finished):
            self.margin = min(self.margin, (better[0] - worse[0]) * divisor(better[1], self.params))
        return [(tokens, score, reason) for score, tokens, reason in self.finished[: self.params.n]]

    def step(self, running: list[tuple[float, list[int]]], last: bool) -> list[tuple[float, list[int]]]:
        width, stops = self.params.beam_width, self.params.stop_token_ids
        candidates = sorted(
            (-(logprob + before), beam, token)
            for beam, (before, generated) in enumerate(running)
            for token, logprob in enumerate(self.next_logprobs(generated))
        )
        for minus, beam, token in candidates[:width]:
            if last or token in stops:
                tokens = [*running[beam][1], token]
                reason = "stop" if token in stops else "length"
                self.finished.append((-minus / divisor(tokens, self.params), tokens, reason))
        self.finished = sorted(self.finished, key=lambda one: -one[0])[:width]
        if last or any(token in stops for _, _, token in candidates[: 2 * width]):
            self.margin = min(self.margin, candidates[width][0] - candidates[width - 1][0])
        going_on = [one for one in candidates if one[2] not in stops]
        self.margin = min(self.margin, going_on[width][0] - going_on[width - 1][0])
        return [] if last else [(-minus, [*running[beam][1], token]) for minus, beam, token in going_on[:width]]

    def is_over(self, best_running: float, step: int) -> bool:
        """After step 4 of section "Mechanism" in transformers' `_check_early_stop_heuristic`."""
        params = self.params
        if len(self.finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        at_the_end = params.early_stopping == "never" and params.length_penalty > 0
        scale = (params.max_tokens if at_the_end else step) ** params.length_penalty
        worst = self.finished[-1][0]
        self.margin = min(self.margin, abs(best_running / scale - worst) * scale)
        return best_running / scale <= worst


CASES = [
    # seed, length of the prompt, width, n, tokens, penalty, early stopping, every so manieth token ends
    (1, 1, 1, 1, 8, 1.0, False, 30),
    (0, 30, 4, 4, 10, 1.0, False, 0),
    (8, 31, 4, 4, 12, 1.0, False, 8),
    (2, 32, 3, 2, 12, 1.0, True, 8),
    (40, 45, 3, 3, 12, 2.0, False, 8),
    (0, 45, 3, 3, 7, 2.0, "never", 8),
    (12, 20, 4, 4, 12, 0.0, "never", 15),
    (0, 64, 2, 2, 12, -1.0, False, 8),
    (3, 9, 6, 6, 6, -0.5, "never", 5),
    (1, 27, 4, 4, 12, 0.6, True, 15),
    (9, 29, 4, 1, 12, 1.0, "never", 8),
]


def params_of(case: tuple) -> tuple[list[int], BeamParams]:
    seed, length, width, n, max_tokens, penalty, early, every = case
    params = BeamParams(
        beam_width=width,
        n=n,
        max_tokens=max_tokens,
        length_penalty=penalty,
        early_stopping=early,
        stop_token_ids=range(seed % every, VOCAB, every) if every else (),
    )
    return prompt(seed, length), params


@pytest.mark.parametrize("case", CASES)
def test_equal_to_a_search_that_computes_every_sequence_from_its_beginning(llm: LLM, case: tuple) -> None:
    tokens, params = params_of(case)
    assert search(llm, tokens, params) == Plain(llm, tokens, params).run()
