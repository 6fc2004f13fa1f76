"""`kv_evict`: what attention is paid, the same tokens however they are run, bounded memory, and what it excludes."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from prolepsis import LLM, BeamParams, SamplingParams
from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.engine.conversation import Conversation
from prolepsis.engine.session import load_session, save_session
from prolepsis.errors import InputError
from prolepsis.kernels.attention_mass import MASS
from prolepsis.kv.eviction import UNIT

BUDGET = 192
GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=160, ignore_eos=True)
rng = np.random.default_rng(7)
PROMPTS = [rng.integers(3, 1000, size).tolist() for size in (611, 60, 420, 45)]


@pytest.fixture(scope="module")
def forgetful(tiny: Path) -> LLM:
    return LLM(tiny, kv_evict=f"h2o:{BUDGET}")


@pytest.fixture(scope="module")
def alone(forgetful: LLM) -> list[list[int]]:
    """Each prompt's answer, run by itself."""
    answers = []
    for prompt in PROMPTS:
        request = forgetful.new_request(prompt, GREEDY)
        list(forgetful.run(request))
        assert request.completion.evicted_tokens == (len(prompt) + 159 - BUDGET) // UNIT * UNIT + UNIT
        answers.append(request.completion.token_ids)
        request.release()
    return answers


@pytest.mark.parametrize("kv_dtype", ["bf16", "int4"])
def test_mass_is_the_attention_of_the_rows(tiny: Path, kv_dtype: str) -> None:
    llm = LLM(tiny, kv_evict="h2o:100%", kv_dtype=kv_dtype, max_context=512)
    decoder, config = llm.runner.decoder, llm.config
    group, dim = config.num_heads // config.num_kv_heads, config.head_dim
    sequences = [llm.runner.new_sequence(PROMPTS[0][:size]) for size in (170, 33)]
    rows = (45, 33)
    for sequence, count in zip(sequences, rows, strict=True):
        if len(sequence.tokens) > count:
            llm.runner.run([(sequence, len(sequence.tokens) - count, "none")])
    llm.runner.run([(sequence, count, "none") for sequence, count in zip(sequences, rows, strict=True)])
    query = decoder._scratch.query[: sum(rows) * config.num_heads * dim].reshape(config.num_kv_heads, -1, group, dim)
    seen = [140, 0]
    mass = decoder.attention_mass(seen)
    for index, sequence in enumerate(sequences):
        length = len(sequence.tokens)
        keys = llm.kv_cache.k[0, sequence.table.blocks].astype(np.uint32)  # [blocks, heads, dim, slot]
        if kv_dtype == "bf16":
            keys = (keys << 16).view(np.float32)
        else:
            codes = keys.repeat(2, axis=2) >> np.tile([0, 4], dim // 2)[:, None] & 15
            steps = llm.kv_cache.k_steps[0, sequence.table.blocks].view(np.float16)
            signed = (codes.astype(np.int32) ^ 8) - 8
            keys = signed * steps[:, :, None].astype(np.float32)
        keys = keys.transpose(1, 2, 0, 3).reshape(config.num_kv_heads, dim, -1)[:, :, :length]
        first = length - rows[index]
        scores = np.einsum("hrgd,hdt->rhgt", query[:, rows[0] * index :][:, : rows[index]], keys, dtype=np.float64)
        unseen = np.arange(length) > first + np.arange(rows[index])[:, None, None, None]
        scores = np.where(unseen, -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        expected = weights[max(seen[index] - first, 0) :].sum((0, 1, 2)) * MASS
        units = np.add.reduceat(expected, range(0, length, UNIT))
        counted = rows[index] - max(seen[index] - first, 0)
        assert np.abs(mass[index, : len(units)] - units).max() < counted * config.num_heads * (
            3 if kv_dtype == "bf16" else MASS / 50
        )
        assert (mass[index, len(units) :] == 0).all()
        sequence.release()


def test_a_budget_that_is_never_reached_changes_no_bit(tiny: Path, tiny_llm: LLM) -> None:
    llm = LLM(tiny, kv_evict="h2o:100%")
    for plain, forgets in zip(*(each.generate(PROMPTS, GREEDY) for each in (tiny_llm, llm)), strict=True):
        assert plain == forgets
        assert forgets.evicted_tokens == 0


def test_a_full_cache_differs(tiny_llm: LLM, alone: list[list[int]]) -> None:
    full = [completion.token_ids for completion in tiny_llm.generate(PROMPTS, GREEDY)]
    assert full != alone


@pytest.mark.parametrize(
    "how",
    [{}, {"block_size": 16, "threads": 1}, {"tokens": BUDGET + BUDGET // 2}, {"tokens": 3 * BUDGET, "max_running": 3}],
    ids=["batch", "blocks", "small pool", "few at once"],
)
def test_tokens_do_not_depend_on_how_they_are_run(
    tiny: Path, forgetful: LLM, alone: list[list[int]], how: dict[str, int]
) -> None:
    memory = how.pop("tokens", 4096) * forgetful.kv_cache.bytes_per_token
    llm = LLM(tiny, kv_evict=f"h2o:{BUDGET}", kv_memory=memory, **how)
    assert [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)] == alone
    assert (llm.engine.statistics().preemptions > 0) == (memory < 2 * BUDGET * llm.kv_cache.bytes_per_token)
    assert llm.engine.statistics().evicted_tokens > 0
    assert llm.kv_cache.pool.num_used == 0


@pytest.mark.parametrize("size", [1, 17, 256])
def test_chunks_do_not_show(forgetful: LLM, size: int) -> None:
    whole, cut = (forgetful.runner.new_sequence(PROMPTS[0]) for _ in range(2))
    expected = forgetful.runner.prefill(whole)
    while cut.num_pending:
        count = min(size, cut.num_pending, cut.table.room)
        found = forgetful.runner.run([(cut, count, "last")])[0]
    assert found.tobytes() == expected.tobytes()
    again = forgetful.runner.prefill(cut)  # the last token once more
    assert again.tobytes() == expected.tobytes()
    for sequence in (whole, cut):
        sequence.release()


def test_memory_is_bounded_and_contexts_are_longer_than_the_pool(
    tiny: Path, forgetful: LLM, alone: list[list[int]]
) -> None:
    llm = LLM(tiny, kv_evict=f"h2o:{BUDGET}", kv_memory=BUDGET * forgetful.kv_cache.bytes_per_token)
    assert llm.kv_cache.pool.num_blocks * 32 == BUDGET
    request = llm.new_request(PROMPTS[0], GREEDY)
    llm.engine.add(request)
    while llm.engine.has_work:
        llm.engine.step()
        assert llm.kv_cache.pool.num_used * 32 <= BUDGET
    assert request.completion.token_ids == alone[0]


def test_samples_and_beams(forgetful: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=150, ignore_eos=True)
    samples = forgetful.generate([PROMPTS[1]], params)
    assert all(one.evicted_tokens > 0 for one in samples)
    for sample in samples:
        single = SamplingParams(temperature=1.0, seed=sample.seed, max_tokens=150, ignore_eos=True)
        assert forgetful.generate([PROMPTS[1]], single) == [sample]
    beams = BeamParams(beam_width=3, n=2, max_tokens=150, ignore_eos=True)
    found = forgetful.generate([PROMPTS[1], PROMPTS[2]], beams)
    assert found[:2] == forgetful.generate([PROMPTS[1]], beams)
    assert found[0].evicted_tokens == 32


def test_streams(forgetful: LLM, alone: list[list[int]]) -> None:
    async def answer() -> list[int]:
        async with AsyncEngine(forgetful) as engine:
            return [delta.token.token async for delta in engine.generate(PROMPTS[3], GREEDY)]

    assert asyncio.run(answer()) == alone[3]


def test_a_chat_goes_on_beyond_the_budget(forgetful: LLM) -> None:
    conversation = Conversation(forgetful)
    for _ in range(4):
        list(
            conversation.ask(
                "What is a cache, and what are its blocks?" * 2, SamplingParams(temperature=0, max_tokens=40)
            )
        )
    sequence = conversation.sequence
    assert sequence.table.evicted > 0
    fresh = forgetful.runner.new_sequence(sequence.tokens)
    assert forgetful.runner.prefill(fresh).tobytes() == forgetful.runner.prefill(sequence).tobytes()
    sequence.truncate(len(sequence.tokens) - 40)
    fresh.replace(sequence.tokens)
    assert forgetful.runner.prefill(fresh).tobytes() == forgetful.runner.prefill(sequence).tobytes()
    for each in (fresh, sequence):
        each.release()


def test_what_it_excludes(tiny: Path, forgetful: LLM, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="kv_evict and draft exclude each other"):
        LLM(tiny, kv_evict="h2o:512", draft="ngram")
    with pytest.raises(InputError, match="kv_evict must be none, or tokens or a share"):
        LLM(tiny, kv_evict="lru:512")
    sequence = forgetful.runner.new_sequence(PROMPTS[0])
    forgetful.runner.prefill(sequence)
    with pytest.raises(InputError, match="sessions hold K and V of every token, and kv_evict drops some"):
        save_session(tmp_path / "session.pkv", forgetful, sequence)
    sequence.release()
    with pytest.raises(InputError, match="sessions hold K and V of every token"):
        load_session(tmp_path / "session.pkv", forgetful)
