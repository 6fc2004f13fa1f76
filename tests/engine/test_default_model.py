"""The promises of the engine on a model of 30 layers that really answers."""

from pathlib import Path

import numpy as np
import pytest
from test_conversation import ask, assert_consistent, kv

from prolepsis import LLM, SamplingParams
from prolepsis.coding import decode, encode
from prolepsis.engine.conversation import Conversation
from prolepsis.engine.profiles import calibrate, collect, kv_of_texts
from prolepsis.engine.session import load_session, save_session

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=12)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=12)


@pytest.fixture(scope="module", params=["bf16", "fp16"])
def model(request: pytest.FixtureRequest, default_model: Path) -> LLM:
    return LLM(default_model, max_context=512, kv_memory=48 << 20, kv_dtype=request.param)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_alone_and_in_a_batch_the_tokens_are_the_same(model: LLM, params: SamplingParams) -> None:
    prompts = ["Paris is the capital of", "1, 2, 3, 4,", "The KV cache " * 90]
    together = model.generate(prompts, params)
    assert together == [model.generate(prompt, params)[0] for prompt in prompts]
    model.kv_cache.check([])


def test_a_chat_is_answered_saved_and_resumed(model: LLM, tmp_path: Path) -> None:
    chat = Conversation(model)
    assert ask(chat, "What is the capital of France?", GREEDY)
    assert_consistent(chat)
    save_session(tmp_path / "chat.pkv", model, chat.sequence, chat.messages)
    saved = load_session(tmp_path / "chat.pkv", model)
    assert np.array_equal(kv(model, saved.sequence), kv(model, chat.sequence))
    resumed = Conversation(model, saved.messages, saved.sequence)
    assert ask(resumed, "And of Germany?", SEEDED) == ask(chat, "And of Germany?", SEEDED)
    chat.sequence.release()
    assert_consistent(resumed)
    resumed.sequence.release()


def _reference(model: LLM, tokens: int) -> list[int]:
    """Token ids of Python's own language reference, which every CPython carries."""
    from pydoc_data.topics import topics

    return model.tokenizer.encode("\n\n".join(topics.values())[: 8 * tokens])[:tokens]


def test_static_takes_a_third_off(default_model: Path) -> None:
    """Without calibration: at least 1.55 times smaller, statistics and all."""
    llm = LLM(default_model, max_context=1024, kv_memory=48 << 20)
    (window,) = kv_of_texts(llm, [_reference(llm, 1000)], "bf16", 1000, 1000)
    data = encode(window.kv, dtype="bf16", rope=llm.rope)
    assert window.kv.nbytes > 1.55 * len(data)


@pytest.mark.nightly
def test_linear_halves_the_cache_of_text_it_has_not_seen(default_model: Path) -> None:
    """Calibrated on a few thousand tokens: at least 1.80 times smaller."""
    llm = LLM(default_model, max_context=2048, kv_memory=96 << 20)
    ids = _reference(llm, 6000)
    with collect(llm, kv_of_texts(llm, [ids[:4000]], "bf16", 2000, 4000), "bf16", 4000) as sample:
        profile = calibrate(llm, sample, "linear").profile
    (window,) = kv_of_texts(llm, [ids[4000:]], "bf16", 2000, 2000)
    data = encode(window.kv, dtype="bf16", rope=llm.rope, token_ids=window.ids, profile=profile)
    assert np.array_equal(decode(data, profile=profile), window.kv)
    assert window.kv.nbytes > 1.80 * len(data)
