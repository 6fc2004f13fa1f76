"""The promises of the engine on a model of 30 layers that really answers."""

from pathlib import Path

import numpy as np
import pytest
from test_conversation import ask, assert_consistent, kv

from prolepsis import LLM, SamplingParams
from prolepsis.engine.conversation import Conversation
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
