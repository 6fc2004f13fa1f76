"""Completions: a function of model, prompt, parameters and seed, and of nothing else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prolepsis import LLM, SamplingParams
from prolepsis.errors import CapacityError, InputError
from prolepsis.kv.block_pool import BlockPool

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.2, top_p=0.95, min_p=0.01, seed=11, max_tokens=24, ignore_eos=True)
PENALISED = replace(SEEDED, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, top_k=40)
PROMPTS = ["The KV cache", [5], "def main(", list(range(3, 300)), "#", [7] * 256]


def logits_after(llm: LLM, tokens: list[int]) -> np.ndarray:
    """Logits after every token, float64 [tokens, vocab], from one pass over all."""
    sequence = llm.runner.new_sequence(tokens)
    rows = []
    while sequence.num_cached < len(tokens):
        rows.append(llm.runner.all_logits(sequence))
    sequence.release()
    return np.concatenate(rows).astype(np.float64)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("params", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
def test_alone_in_a_batch_and_in_another_order_the_tokens_are_the_same(llm: LLM, params: SamplingParams) -> None:
    alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    together = llm.generate(PROMPTS, params)
    backwards = llm.generate(PROMPTS[::-1], params)[::-1]
    assert alone == together == backwards
    assert all(len(completion.token_ids) == 24 for completion in together)


def test_a_batch_larger_than_the_cache_runs_in_parts(llm: LLM, tiny: Path) -> None:
    small = LLM(tiny, kv_memory=12 * 32 * llm.kv_cache.bytes_per_token, max_context=340)
    assert small.kv_cache.pool.num_blocks == 12
    assert small.generate(PROMPTS, SEEDED) == llm.generate(PROMPTS, SEEDED)
    small.kv_cache.check([])


def test_more_requests_than_rows_in_a_pass(llm: LLM) -> None:
    prompts = [[token] for token in range(300)]
    params = replace(GREEDY, max_tokens=3)
    together = llm.generate(prompts, params)
    for index in (0, 255, 256, 299):
        assert together[index] == llm.generate([prompts[index]], params)[0]


def test_seeds_decide_and_a_drawn_seed_can_be_repeated(llm: LLM) -> None:
    free = replace(SEEDED, seed=None)
    first, second = llm.generate([[5], [5]], free)
    assert first.token_ids != second.token_ids
    assert llm.generate([[5]], replace(SEEDED, seed=first.seed))[0] == first


def test_the_nth_token_does_not_depend_on_how_many_follow(llm: LLM) -> None:
    (longest,) = llm.generate([[5, 6]], SEEDED)
    for count in (1, 2, 23):
        (shorter,) = llm.generate([[5, 6]], replace(SEEDED, max_tokens=count))
        assert shorter.token_ids == longest.token_ids[:count]


def test_the_nth_random_number_is_spent_on_the_nth_token(llm: LLM) -> None:
    """With a near-uniform distribution, seeds that differ agree nowhere, and a longer prompt shifts nothing."""
    flat = SamplingParams(temperature=1e6, seed=3, max_tokens=16, ignore_eos=True)
    first, second = (llm.generate([prompt], flat)[0].token_ids for prompt in ([5], [9, 9, 9]))
    assert sum(abs(a - b) <= 2 for a, b in zip(first, second, strict=True)) >= 14
    other = llm.generate([[5]], replace(flat, seed=4))[0].token_ids
    assert sum(abs(a - b) <= 2 for a, b in zip(first, other, strict=True)) <= 2


def test_greedy_tokens_are_the_most_probable_ones(llm: LLM) -> None:
    prompt = llm.encode("The licence")
    (completion,) = llm.generate(prompt, GREEDY)
    logits = logits_after(llm, prompt + completion.token_ids[:-1])[len(prompt) - 1 :]
    assert logits.argmax(axis=1).tolist() == completion.token_ids


def test_logprobs_are_those_of_the_raw_logits(llm: LLM) -> None:
    prompt = llm.encode("Copyright")
    (completion,) = llm.generate(prompt, replace(PENALISED, logprobs=5))
    expected = log_softmax(logits_after(llm, prompt + completion.token_ids[:-1])[len(prompt) - 1 :])
    assert [sampled.token for sampled in completion.logprobs] == completion.token_ids
    for row, sampled in zip(expected, completion.logprobs, strict=True):
        assert sampled.logprob == pytest.approx(row[sampled.token], abs=1e-9)
        top = np.argsort(-row, kind="stable")[:5].tolist()
        assert [token for token, _ in sampled.top_logprobs] == top
        assert [value for _, value in sampled.top_logprobs] == pytest.approx(row[top].tolist(), abs=1e-9)


def test_a_stop_text_is_left_out_and_so_is_what_follows(llm: LLM) -> None:
    (whole,) = llm.generate(["The licence"], replace(GREEDY, max_tokens=60))
    stop = whole.text[20:24]
    (cut,) = llm.generate(["The licence"], replace(GREEDY, max_tokens=60, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_a_stop_token_is_reported_and_has_no_text(llm: LLM) -> None:
    (whole,) = llm.generate(["The licence"], GREEDY)
    stop = whole.token_ids[9]
    first = whole.token_ids.index(stop)
    (cut,) = llm.generate(["The licence"], replace(GREEDY, stop_token_ids=(stop,)))
    assert cut.token_ids == whole.token_ids[: first + 1]
    assert cut.text == llm.tokenizer.decode(whole.token_ids[:first])
    assert cut.finish_reason == "stop"


def test_the_models_own_end_token_ends_unless_ignored(llm: LLM) -> None:
    (end,) = llm.tokenizer.eos_ids - {2}
    forced = SamplingParams(temperature=0, max_tokens=3, logit_bias={end: 100})
    assert llm.generate([[5]], forced)[0].token_ids == [end]
    assert llm.generate([[5]], replace(forced, ignore_eos=True))[0].token_ids == [end] * 3


def test_text_is_that_of_the_tokens(llm: LLM) -> None:
    """Near-random bytes: characters that never become whole appear as U+FFFD, as they do when all is decoded."""
    params = replace(SEEDED, temperature=50.0, top_p=1.0, min_p=0.0, max_tokens=200)
    (completion,) = llm.generate([[5]], params)
    assert completion.text == llm.tokenizer.decode(completion.token_ids)


def test_usage_is_counted(llm: LLM) -> None:
    (completion,) = llm.generate([[5, 6, 7]], replace(GREEDY, max_tokens=2))
    assert (completion.prompt_tokens, completion.cached_tokens, completion.finish_reason) == (3, 0, "length")


@pytest.mark.parametrize("length", [1, 31, 32, 33, 255, 256, 257, 2046, 2047])
def test_prompts_of_any_length_that_leaves_room(llm: LLM, length: int) -> None:
    prompt = [(11 * i) % 1024 for i in range(length)]
    (completion,) = llm.generate([prompt], replace(GREEDY, max_tokens=2))
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == min(2, 2048 - length)


def test_generation_ends_where_the_context_does(tiny: Path) -> None:
    llm = LLM(tiny, max_context=16)
    (completion,) = llm.generate([[5] * 10], replace(GREEDY, max_tokens=100))
    assert len(completion.token_ids) == 6
    assert completion.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([5] * 2048, "the prompt has 2048 tokens, but the context holds 2048"),
        ("x " * 5000, "tokens, but the context holds 2048"),
        ([5, 1024], "token id 1024 is outside the vocabulary of 1024"),
        ([5, -1], "token id -1 is outside"),
        ([5, "a"], "a text or a list of token ids"),
        ([5, 1.0], "a text or a list of token ids"),
        ("\udcff", "unpaired surrogate"),
    ],
    ids=["empty", "whole context", "too long", "beyond", "negative", "text among ids", "number", "surrogate"],
)
def test_prompts_that_cannot_be_continued(llm: LLM, prompt: str | list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        llm.generate(prompt)
    with pytest.raises(InputError, match=message):
        llm.generate(["fine", prompt])


def test_no_prompts_and_an_empty_list_of_ids(llm: LLM) -> None:
    assert llm.generate([]) == []
    with pytest.raises(InputError, match="the prompt is empty"):
        llm.generate([[]])


def test_ids_may_come_from_numpy(llm: LLM) -> None:
    ids = np.array([5, 6, 7])
    assert llm.generate(ids, GREEDY) == llm.generate([ids], GREEDY) == llm.generate([[5, 6, 7]], GREEDY)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_context": 1}, "max_context must be in 2 .. 2048"),
        ({"max_context": 2049}, "max_context must be in 2 .. 2048"),
        ({"kv_memory": 1}, "a KV cache budget of 1 bytes holds no block"),
        ({"kv_memory": 0}, "holds no block"),
        ({"kv_dtype": "int9"}, "'int9' is not supported"),
        ({"block_size": 24}, "block_size must be one of 16, 32, not 24"),
        ({"max_running": 0}, "max_running must be in 1 .. 224"),
        ({"max_running": 225}, "max_running must be in 1 .. 224"),
        ({"max_running": "many"}, "max_running must be in 1 .. 224, .* not 'many'"),
        ({"swap_disk": -1}, "swap_disk must be a whole number of bytes, or None, not -1"),
        ({"kv_memory": "2GiB"}, "kv_memory must be a whole number of bytes, or None, not '2GiB'"),
        ({"preemption": "kill"}, "preemption must be one of swap, recompute, not 'kill'"),
        ({"kv_memory": 1 << 50}, "does not fit into the .* of memory that are free; lower kv_memory: .* would hold"),
        ({"kv_memory": 1 << 14, "max_context": 2048}, "max_context 2048 needs a KV cache of .*, enough for"),
        ({"threads": 0}, "threads must be in 1"),
        ({"threads": 100_000}, "threads must be in 1"),
    ],
)
def test_settings_that_cannot_be_used(tiny: Path, settings: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        LLM(tiny, **settings)


def test_an_exhausted_cache_is_an_error_and_nothing_leaks(tiny: Path, tiny_llm: LLM) -> None:
    llm = LLM(tiny, kv_memory=4 * 32 * tiny_llm.kv_cache.bytes_per_token)
    held = llm.runner.new_sequence([5] * 65)
    llm.runner.prefill(held)
    grown, refused, fits = llm.generate([[6] * 10, [6] * 40, [7]], [replace(GREEDY, max_tokens=60), GREEDY, GREEDY])
    for failed, tokens in ((grown, 23), (refused, 0)):
        assert isinstance(failed.error, CapacityError)
        assert "more block(s) but only" in str(failed.error)
        assert (failed.finish_reason, len(failed.token_ids)) == (None, tokens)
    assert (fits.error, len(fits.token_ids)) == (None, 24)
    llm.kv_cache.check([held.table])
    held.release()
    (completion,) = llm.generate([[6] * 10], replace(GREEDY, max_tokens=60))
    assert len(completion.token_ids) == 60
    llm.kv_cache.check([])


def test_an_interrupted_batch_gives_its_blocks_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a step, wherever it strikes between two allocations."""
    allocate, calls = BlockPool.allocate, 0

    def interrupted(pool: BlockPool) -> int:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise KeyboardInterrupt
        return allocate(pool)

    monkeypatch.setattr(BlockPool, "allocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5] * 30, [6] * 90, [7] * 60], GREEDY)
    monkeypatch.undo()
    assert llm.kv_cache.pool.num_used == 0


def test_more_prompts_than_rows_in_a_pass_are_all_finished(tiny: Path) -> None:
    llm = LLM(tiny, kv_memory=64 << 20)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    many = llm.generate([[token] for token in range(300)], params)
    assert {(len(c.token_ids), c.finish_reason) for c in many} == {(4, "length")}
    assert many[299].token_ids == llm.generate([299], params)[0].token_ids
    llm.kv_cache.check([])


def test_names_of_control_tokens_are_shown_where_they_are_asked_for(llm):
    for skip, text in ((True, ""), (False, "<|im_start|><|im_start|>")):
        params = SamplingParams(temperature=0, max_tokens=2, logit_bias={1: 100}, skip_special_tokens=skip)
        assert llm.generate("a", params)[0].text == text
