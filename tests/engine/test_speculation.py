"""Speculation in the engine: whatever is drafted, what comes out is what plain decoding gives, or is distributed so."""

import asyncio
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from distributions import assert_same_distribution

from prolepsis import LLM, AsyncEngine, BeamParams, SamplingParams
from prolepsis.engine import rng, sampler
from prolepsis.engine.completion import Completion
from prolepsis.engine.engine import Engine
from prolepsis.engine.sampler import TokenCounts, target_probabilities
from prolepsis.engine.speculation import Speculation
from prolepsis.errors import InputError, ModelFileError
from prolepsis.kv.stored import arrays_of
from prolepsis.speculate.draft_model import ModelDrafter
from prolepsis.speculate.drafter import Draft, Draftee, Drafter

PAIR = Path(__file__).parents[1] / "data" / "pair"
TEXT = (Path(__file__).parents[2] / "README.md").read_text()
DRAFTS = ("ngram", "twin", f"model:{PAIR / 'draft-F16.gguf'}")
SAMPLES = 3_000
JUDGED = 3  # tokens, of six
GREEDY = SamplingParams(temperature=0, seed=1, max_tokens=24, ignore_eos=True)


class BadOnPurpose:
    """Drafts from made-up logits, always the same, which the chooser draws from as from any others."""

    name = "bad on purpose"

    def propose(self, batch: Many[Draftee]) -> list[Draft]:
        drafts = []
        for draftee in batch:
            logits = np.random.default_rng(len(draftee.tokens)).standard_normal(1024).astype(np.float32) * 4
            choices = [draftee.chooser.choose(logits) for _ in range(draftee.limit)]
            drafts.append(Draft([each.token for each in choices], [each.probabilities for each in choices]))
        return drafts

    def forget(self, key: int) -> None:
        pass


class Failing(BadOnPurpose):
    def propose(self, batch: Many[Draftee]) -> list[Draft]:
        raise ModelFileError("the draft model is damaged")


@pytest.fixture(scope="module")
def plain() -> LLM:
    return new_llm(None)


def new_llm(draft: str | None, draft_tokens: int | None = None) -> LLM:
    return LLM(
        PAIR / "target-Q8_0.gguf", draft=draft, draft_tokens=draft_tokens, kv_memory=16 << 20, threads=2, block_size=16
    )  # fmt: skip


def with_drafter(llm: LLM, drafter: Drafter, tokens: int | None = 3) -> Engine:
    """Another engine over the same model and cache."""
    return Engine(llm.runner, llm.engine.prefix, None, 64, speculation=Speculation(drafter, tokens))


def prompts(llm: LLM, count: int) -> list[list[int]]:
    """Pieces of a text, some of which repeat themselves."""
    tokens = llm.tokenizer.encode(TEXT)
    starts = [37 * i % (len(tokens) - 32) for i in range(count)]
    pieces = [tokens[start : start + 4 + i % 29] for i, start in enumerate(starts)]
    return [piece * 2 if i % 3 == 0 else piece for i, piece in enumerate(pieces)]


@pytest.fixture(scope="module")
def greedy(plain: LLM) -> list[Completion]:
    """What plain decoding gives for 64 prompts."""
    return plain.generate(prompts(plain, 64), GREEDY)


@pytest.mark.parametrize("draft_tokens", [None, 1, 6])
@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_tokens_are_those_of_plain_decoding(
    greedy: list[Completion], draft: str, draft_tokens: int | None
) -> None:
    llm = new_llm(draft, draft_tokens)
    asked, expected = prompts(llm, 64), greedy
    for ours, theirs in zip(llm.generate(asked, GREEDY), expected, strict=True):
        assert ours == theirs
    assert llm.engine.statistics().drafts.rounds > 0
    for prompt, alone in list(zip(asked, expected, strict=True))[::20]:
        assert llm.generate([prompt], GREEDY) == [alone]
        request = llm.new_request(prompt, GREEDY)
        assert [delta.token.token for delta in llm.run(request)] == alone.token_ids
        request.sequence.release()
    llm.kv_cache.pool.check()
    assert llm.kv_cache.pool.num_used == 0


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, seed=1, max_tokens=20, logprobs=3, stop=["the", "e a"]),
        SamplingParams(temperature=0, seed=1, max_tokens=30, repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(temperature=0, seed=1, max_tokens=30, logit_bias={11: 4.0, 30: -100.0}),
        SamplingParams(temperature=1.0, seed=7, max_tokens=20, n=3, logprobs=1),
        SamplingParams(temperature=0.7, seed=8, max_tokens=20, top_p=0.8, presence_penalty=1.0, stop=["."]),
        SamplingParams(temperature=1.5, seed=9, max_tokens=20, top_k=5, min_p=0.1),
    ],
    ids=["stops", "penalties", "bias", "n", "top_p", "top_k"],
)
def test_with_every_parameter(plain: LLM, draft: str, params: SamplingParams) -> None:
    asked = prompts(plain, 24)
    for ours, theirs in zip(new_llm(draft, 4).generate(asked, params), plain.generate(asked, params), strict=True):
        assert ours == theirs


def test_k_and_v_are_those_of_plain_decoding(plain: LLM) -> None:
    """Drafts that were rejected leave nothing behind, whoever wrote it."""
    prompt = prompts(plain, 4)[3]
    caches = []
    for llm in (plain, *(new_llm(draft, 5) for draft in DRAFTS)):
        request = llm.new_request(prompt, replace(GREEDY, max_tokens=60))
        for _ in llm.run(request):
            pass
        count = len(prompt) + 59
        assert request.sequence.num_cached >= count
        caches.append(arrays_of(llm.kv_cache.read(request.sequence.table, 0, count)))
        request.sequence.release()
    for other in caches[1:]:
        for ours, theirs in zip(caches[0], other, strict=True):
            assert np.array_equal(ours, theirs)


def test_an_answer_ends_where_it_would(plain: LLM) -> None:
    llm = new_llm("twin", 8)
    prompt = prompts(plain, 1)[0]
    for max_tokens in range(1, 12):
        assert llm.generate([prompt], replace(GREEDY, max_tokens=max_tokens))[0].token_ids == (
            plain.generate([prompt], replace(GREEDY, max_tokens=max_tokens))[0].token_ids
        )
    long = prompt * 20
    whole = long[: plain.max_context - 9 % plain.max_context]
    assert llm.generate([whole], GREEDY) == plain.generate([whole], GREEDY)


def joint(llm: LLM, prompt: list[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Exact probabilities of the first tokens, together."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(JUDGED):
        longer = {}
        for before, probability in found.items():
            sequence = llm.runner.new_sequence([*prompt, *before])
            logits = llm.runner.prefill(sequence)
            sequence.release()
            counts = TokenCounts(prompt)
            for token in before:
                counts.add(token)
            following = target_probabilities(logits, params, counts)
            longer.update({(*before, int(t)): probability * following[t] for t in np.flatnonzero(following)})
        found = longer
    return found


def check_distribution(llm: LLM, engine: Engine, params: SamplingParams) -> None:
    """Fail unless the outputs of many requests are distributed as the target says."""
    prompt = prompts(llm, 4)[3]
    exact = joint(llm, prompt, params)
    places = {tokens: place for place, tokens in enumerate(exact)}

    def sample(count: int) -> np.ndarray:
        requests = [llm.new_request(prompt, params) for _ in range(count)]
        for request in requests:
            engine.add(request)
        while engine.has_work:
            engine.step()
        return np.array([places.get(tuple(each.completion.token_ids[:JUDGED]), len(exact)) for each in requests])

    assert_same_distribution(sample, np.array([*exact.values(), 0.0]), SAMPLES)


SETTINGS = {
    "top_k": SamplingParams(temperature=1.4, top_k=5, max_tokens=6, ignore_eos=True),
    "top_p": SamplingParams(temperature=0.8, top_p=0.4, presence_penalty=0.8, max_tokens=6, ignore_eos=True),
    "min_p": SamplingParams(
        temperature=1.5, min_p=0.3, repetition_penalty=1.5, max_tokens=6, logit_bias={40: 2.0}, ignore_eos=True
    ),
}


@pytest.fixture
def numbered_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed get 0, 1, 2 ..., so that what is drawn is always the same."""
    seeds = iter(range(10**9))
    monkeypatch.setattr(rng, "fresh_seed", lambda: next(seeds))


@pytest.fixture(scope="module")
def speculating() -> dict[str, LLM]:
    return {draft: new_llm(draft, 3) for draft in DRAFTS}


@pytest.mark.usefixtures("numbered_seeds")
@pytest.mark.parametrize(
    "setting", ["top_k", *(pytest.param(each, marks=pytest.mark.nightly) for each in SETTINGS if each != "top_k")]
)
@pytest.mark.parametrize("drafter", [*DRAFTS, "bad on purpose"])
def test_sampled_tokens_have_the_distribution_of_the_target(
    plain: LLM, speculating: dict[str, LLM], drafter: str, setting: str
) -> None:
    llm = speculating.get(drafter, plain)
    engine = llm.engine if drafter in speculating else with_drafter(plain, BadOnPurpose())
    check_distribution(llm, engine, SETTINGS[setting])
    if drafter in DRAFTS[1:]:
        assert sum(engine.statistics().drafts.accepted_at) > 0


def accept_always(p: object, q: object, draft: int, *_: object) -> int:
    return draft


@pytest.mark.usefixtures("numbered_seeds")
def test_a_verifier_that_is_broken_is_found_out(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "settle", accept_always)
    with pytest.raises(AssertionError, match="p-value"):
        check_distribution(plain, with_drafter(plain, BadOnPurpose()), SETTINGS["top_k"])


def test_what_no_seed_repeats_says_so(plain: LLM) -> None:
    prompt, params = prompts(plain, 1)[0], replace(GREEDY, temperature=1.0, seed=None)
    engine = with_drafter(plain, BadOnPurpose())
    free, seeded = plain.new_request(prompt, params), plain.new_request(prompt, replace(params, seed=3))
    for request in (free, seeded):
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert (free.completion.seed, seeded.completion.seed) == (None, 3)


def test_a_drafter_that_fails_is_left_alone(plain: LLM) -> None:
    engine = with_drafter(plain, Failing())
    prompt = prompts(plain, 1)[0]
    request = plain.new_request(prompt, GREEDY)
    engine.add(request)
    while engine.has_work:
        engine.step()
    assert request.completion == plain.generate([prompt], GREEDY)[0]
    assert engine.speculation is not None
    assert "damaged" in str(engine.speculation.failure)


def test_what_is_counted(plain: LLM) -> None:
    llm = new_llm("twin", 3)
    completion = llm.generate([prompts(plain, 1)[0]], GREEDY)[0]
    told = completion.statistics
    assert len(told.token_times) == 24
    counted = told.drafts
    assert counted.drafted_at[0] == counted.rounds == told.steps - 1
    assert sum(counted.accepted_at) + told.steps == 24
    assert counted.accepted_at == sorted(counted.accepted_at, reverse=True)
    assert llm.engine.statistics().drafts == counted
    summary = told.summary()
    assert summary["spec_decode_num_accepted_tokens"] == sum(counted.accepted_at)
    assert summary["tokens_per_step"] == 24 / told.steps


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("length", [257, 65, 33])
def test_samples_share_a_prompt_whose_last_token_is_run_alone(plain: LLM, draft: str, length: int) -> None:
    prompt = (plain.tokenizer.encode(TEXT) * 2)[:length]
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12, ignore_eos=True)
    asked = [*prompts(plain, 3), prompt]
    llm = new_llm(draft, 4)
    for ours, theirs in zip(llm.generate(asked, params), plain.generate(asked, params), strict=True):
        assert ours == theirs
    assert llm.kv_cache.pool.num_used == 0


def test_streams_end_with_all_their_tokens(plain: LLM) -> None:
    prompt = prompts(plain, 4)[3]
    expected = plain.generate([prompt], replace(GREEDY, max_tokens=40))[0]

    async def stream() -> list[int]:
        async with AsyncEngine(new_llm("twin", 4)) as engine:
            return [d.token.token async for d in engine.generate(prompt, replace(GREEDY, max_tokens=40))]

    assert asyncio.run(asyncio.wait_for(stream(), 60)) == expected.token_ids


def test_a_chat_goes_on_with_what_its_drafter_knows(plain: LLM) -> None:
    """From turn to turn, a draft model reads what is new and no more."""
    llm = new_llm(DRAFTS[2], 3)
    sequence = llm.runner.new_sequence(prompts(llm, 4)[3] * 4)
    assert llm.engine.speculation is not None
    drafter = llm.engine.speculation.drafter
    assert isinstance(drafter, ModelDrafter)
    for _ in range(2):
        for _ in llm.run(llm.new_request(sequence, GREEDY)):
            pass
        held = drafter._readings[sequence.number].tokens
        assert sequence.tokens[: len(held) - 4] == held[: len(sequence.tokens)][: len(held) - 4]
        sequence.tokens += [5, 6, 7]
    assert len(drafter._readings) == 1


def test_beams_are_searched_without_drafts(plain: LLM) -> None:
    llm = new_llm("ngram", 3)
    prompt = prompts(plain, 1)[0]
    params = BeamParams(beam_width=3, max_tokens=8)
    assert llm.generate([prompt], params) == plain.generate([prompt], params)
    assert llm.engine.statistics().drafts.rounds == 0


@pytest.mark.parametrize("draft", ["", "model:", "n-gram", 3])
def test_a_drafter_that_does_not_exist(draft: str) -> None:
    with pytest.raises(InputError, match="draft must be none, ngram, twin or model:PATH"):
        new_llm(draft)


@pytest.mark.parametrize("count", [0, 33, 1.5, True])
def test_numbers_of_drafts_that_cannot_be(count: int) -> None:
    with pytest.raises(InputError, match="draft_tokens must be in 1"):
        new_llm("ngram", count)
