"""Beam search against transformers' own, and against a plain one that shares no block."""

import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prolepsis import LLM
from prolepsis.engine.beam_search import BeamParams, BeamSearch, beam_search, log_probabilities
from prolepsis.engine.runner import Runner
from prolepsis.engine.sequence import Sequence
from prolepsis.errors import CapacityError, InputError, ModelFileError
from prolepsis.kv.block_pool import BlockPool
from prolepsis.kv.block_table import BlockTable
from prolepsis.kv.cache import PagedKVCache
from prolepsis.kv.prefix_index import PrefixIndex

MODEL_ERROR = 0.003  # between the log-probability of a few tokens by the engine and by transformers; 0.0021 was seen
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
    (40, 45, 3, 3, 7, 2.0, "never", 8),
    (12, 20, 4, 4, 12, 0.0, "never", 15),
    (0, 64, 2, 2, 12, -1.0, False, 8),
    (3, 9, 6, 6, 6, -0.5, "never", 5),
    (286, 9, 3, 3, 12, -0.5, "never", 8),
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


@pytest.fixture(scope="module")
def transformers_model(tiny: Path) -> Any:
    pytest.importorskip("transformers", reason="the reference needs torch and transformers: pip install '.[test]'")
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import reference

    model = reference.load_reference(tiny)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def precise_llm(tiny: Path) -> LLM:
    """The cache dtype that is nearest to transformers' float32."""
    return LLM(tiny, kv_dtype="fp16")


@pytest.mark.parametrize("case", CASES)
def test_equal_to_transformers(transformers_model: Any, precise_llm: LLM, case: tuple) -> None:
    import torch

    tokens, params = params_of(case)
    plain = Plain(precise_llm, tokens, params)
    plain.run()
    assert plain.margin > 2 * MODEL_ERROR, "a prompt that leaves more doubt than the model's error allows"
    theirs = transformers_model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones((1, len(tokens)), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(params.stop_token_ids) or None,
        pad_token_id=VOCAB - 1,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ours = search(precise_llm, tokens, params)
    assert len(theirs.sequences) == len(ours)
    for sequence, (generated, _, _) in zip(theirs.sequences.tolist(), ours, strict=True):
        answer = sequence[len(tokens) :]
        assert answer[: len(generated)] == generated
        assert set(answer[len(generated) :]) <= {VOCAB - 1}
    if params.beam_width > 1:
        for their_score, (generated, score, _) in zip(theirs.sequences_scores.tolist(), ours, strict=True):
            assert abs(their_score - score) * divisor(generated, params) < MODEL_ERROR


def drive(runner: Runner, *searches: BeamSearch) -> None:
    """Run several searches together, in the same passes."""
    logits = [runner.prefill(one.sequences[0])[None] for one in searches]
    while True:
        going_on = [one for one, rows in zip(searches, logits, strict=True) if not one.advance(rows)]
        if not going_on:
            return
        together = runner.step([sequence for one in going_on for sequence in one.sequences])
        ends = np.cumsum([len(one.sequences) for one in going_on])
        searches, logits = tuple(going_on), np.split(together, ends[:-1])


def new_search(runner: Runner, tokens: list[int], params: BeamParams) -> BeamSearch:
    return BeamSearch(runner.new_sequence(tokens), params, VOCAB, (), 2048)


def test_company_changes_nothing(llm: LLM) -> None:
    some = [params_of(case) for case in CASES]
    searches = [new_search(llm.runner, *one) for one in some]
    drive(llm.runner, *searches)
    llm.kv_cache.check([sequence.table for one in searches for sequence in one.sequences])
    for one in searches:
        one.release()
    for one, (tokens, params) in zip(searches, some, strict=True):
        assert [(h.token_ids, h.score, h.finish_reason) for h in one.best(params.n)] == search(llm, tokens, params)


def test_each_rule_searches_longer_than_the_one_before(llm: LLM) -> None:
    tokens, params = params_of((8, 30, 3, 3, 12, 0.7, True, 8))
    searches = [
        new_search(llm.runner, tokens, replace(params, early_stopping=early)) for early in (True, False, "never")
    ]
    drive(llm.runner, *searches)
    for one in searches:
        one.release()
    steps = [one.num_tokens for one in searches]
    assert steps[0] < steps[1] < steps[2] < params.max_tokens


def test_beams_share_the_blocks_of_what_they_have_in_common(llm: LLM) -> None:
    one = new_search(llm.runner, prompt(0, 70), BeamParams(beam_width=8, max_tokens=8))
    drive(llm.runner, one)
    assert len(one.sequences) == 8
    assert llm.kv_cache.pool.num_used == 2 + 8
    one.release()


def test_beams_in_a_cache_whose_blocks_are_registered(llm: LLM) -> None:
    """Every step is registered, and the end too; a second search then finds its prompt, and blocks that are equal."""
    config = llm.config
    shape = (config.num_layers, config.num_kv_heads, config.head_dim)
    cache = PagedKVCache(*shape, block_size=16, num_blocks=14)
    index = PrefixIndex(cache.pool, 16)
    runner = Runner(llm.runner.decoder, cache)
    tokens, params = prompt(0, 70), BeamParams(beam_width=4, n=4, max_tokens=14)
    expected = search(llm, tokens, params)
    for found in (0, 69, 69):
        one = new_search(runner, tokens, params)
        assert index.match(one.sequences[0].table, tokens) == found
        logits = runner.prefill(one.sequences[0])[None]
        while not one.advance(logits):
            logits = runner.step(one.sequences)
            for sequence in one.sequences:
                index.register(sequence.table, sequence.tokens)
            cache.check([sequence.table for sequence in one.sequences])
            index.check()
        assert [(h.token_ids, h.score, h.finish_reason) for h in one.best(4)] == expected
        for sequence in one.sequences:
            index.register(sequence.table, sequence.tokens, tail=True)
        one.release()
        cache.check([])
        index.check()


def test_a_full_cache_ends_the_search_and_leaves_nothing(llm: LLM) -> None:
    hog = llm.kv_cache.new_table()
    hog.reserve((llm.kv_cache.pool.num_free - 4) * llm.kv_cache.block_size)
    with pytest.raises(CapacityError):
        beam_search(llm.runner, prompt(0, 60), BeamParams(beam_width=8), context=2048)
    llm.kv_cache.check([hog])
    hog.release()


def test_the_context_ends_what_max_tokens_does_not(llm: LLM) -> None:
    found = beam_search(llm.runner, prompt(0, 30), BeamParams(beam_width=2, n=2, max_tokens=50), context=35)
    assert [(len(one.token_ids), one.finish_reason) for one in found] == [(5, "length")] * 2


def made_up(params: BeamParams, vocab_size: int, eos_ids: tuple[int, ...] = ()) -> BeamSearch:
    """A search whose logits the test makes up, so that its tokens need no cache."""
    return BeamSearch(Sequence(BlockTable(BlockPool(1), 4), [1]), params, vocab_size, eos_ids, 100)


def test_equal_scores_rank_by_beam_and_then_by_token() -> None:
    one = made_up(BeamParams(beam_width=3), 200)
    one.advance(np.zeros((1, 200), np.float32))
    assert [sequence.tokens for sequence in one.sequences] == [[1, 0], [1, 1], [1, 2]]
    logits = np.zeros((3, 200), np.float32)
    logits[:, 7] = logits[:, 130] = 1
    one.advance(logits)
    assert [sequence.tokens for sequence in one.sequences] == [[1, 0, 7], [1, 0, 130], [1, 1, 7]]


def test_a_vocabulary_smaller_than_the_width_and_tokens_that_are_ruled_out() -> None:
    one = made_up(BeamParams(beam_width=5), 3)
    logits = np.array([[0, -np.inf, 1]], np.float32)
    one.advance(logits)
    assert [sequence.tokens for sequence in one.sequences] == [[1, 2], [1, 0]]
    one.advance(np.repeat(logits, 2, axis=0))
    assert [sequence.tokens for sequence in one.sequences] == [[1, 2, 2], [1, 2, 0], [1, 0, 2], [1, 0, 0]]


@pytest.mark.parametrize(("ignore_eos", "reason"), [(False, "stop"), (True, "length")])
def test_the_models_own_end_tokens_are_obeyed_unless_told_otherwise(ignore_eos: bool, reason: str) -> None:
    one = made_up(BeamParams(beam_width=1, max_tokens=1, ignore_eos=ignore_eos), 8, eos_ids=(5,))
    assert one.advance(np.eye(8, dtype=np.float32)[5:6])
    assert [(h.token_ids, h.finish_reason) for h in one.best(1)] == [([5], reason)]


def test_a_row_without_a_finite_maximum_is_refused() -> None:
    for value in (np.nan, np.inf, -np.inf):
        with pytest.raises(ModelFileError, match="no token can be chosen"):
            made_up(BeamParams(), 8).advance(np.full((1, 8), value, np.float32))


def test_log_probabilities_are_those_of_the_softmax() -> None:
    logits = np.random.default_rng(0).normal(0, 8, 5000).astype(np.float32)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.sum(np.exp(wide - wide.max()))) - wide.max()
    assert np.abs(log_probabilities(logits) - expected).max() < 1e-12


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 65),
        ("beam_width", 2.0),
        ("beam_width", True),
        ("n", 5),
        ("n", 0),
        ("max_tokens", 0),
        ("length_penalty", math.nan),
        ("length_penalty", 11),
        ("length_penalty", "1"),
        ("early_stopping", "always"),
        ("early_stopping", None),
        ("early_stopping", 1),
        ("stop_token_ids", [-1]),
    ],
)
def test_parameters_that_make_no_sense_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"^{field} must .*not "):
        BeamParams(**{field: value})


def test_stop_tokens_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(InputError, match="stop_token_ids names token 8, but the vocabulary has 8"):
        made_up(BeamParams(stop_token_ids=[3, 8]), 8)
