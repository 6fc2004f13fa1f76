"""Hugging Face checkpoints in the engine: what they compute, and that all that a GGUF file can do works with them."""

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import METHODS, write_checkpoint, write_tensors, write_tokenizer
from safetensors.numpy import load_file

from prolepsis import LLM, SamplingParams
from prolepsis.engine.conversation import Conversation
from prolepsis.engine.session import load_session, save_session
from prolepsis.errors import InputError, SegmentError

CASES = Path(__file__).parents[3] / "shared" / "cases"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FEW = {"kv_memory": 1 << 22, "threads": 1}
# Kinds of weights are compiled when a model has them; two will do where time matters.
QUICK = ("gptq-act", "exl2")


def log_probs(llm: LLM, ids: list[int]) -> np.ndarray:
    """float64 [tokens, vocabulary] for a text."""
    sequence = llm.runner.new_sequence(ids)
    logits: list[np.ndarray] = []
    while sequence.num_cached < len(ids):
        logits.append(llm.runner.all_logits(sequence).astype(np.float64))
    sequence.release()
    rows = np.concatenate(logits)
    rows -= rows.max(axis=1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


def kl(reference: np.ndarray, model: np.ndarray) -> float:
    """Mean KL(reference || model) in nats."""
    return float((np.exp(reference) * (reference - model)).sum(axis=1).mean())


@pytest.mark.parametrize(("name", "said"), [("target-bf16", None), ("gptq4-g64-act", 0.00023), ("awq4-g128", 0.0018)])
def test_predictions_are_those_of_the_tool_that_made_the_model(name, said):
    directory = CASES / "hf" / name
    if not directory.exists():
        pytest.skip(f"{directory} is not on this machine")
    ids = json.loads((CASES / "gguf" / "ids.json").read_text())
    exact = np.load(CASES / "hf" / "target-fp32-logprobs.npy").astype(np.float64)
    ours = log_probs(LLM(directory, **FEW), ids)
    if said is None:
        assert kl(exact, ours) < 1e-5
        return
    assert kl(exact, ours) < 1.1 * said
    assert kl(np.load(directory / "logprobs.npy").astype(np.float64), ours) < 1e-3


@pytest.mark.parametrize(
    "method", [each if each in QUICK else pytest.param(each, marks=pytest.mark.nightly) for each in METHODS]
)
def test_packed_weights_compute_what_the_same_floats_do(method, tmp_path):
    values = write_checkpoint(tmp_path / "packed", method)
    write_checkpoint(tmp_path / "floats")
    file = tmp_path / "floats" / "model.safetensors"
    plain = {f"{module}.weight": matrix for module, matrix in values.items()}
    write_tensors(file.parent, load_file(file) | plain)
    ids = np.random.default_rng(5).integers(0, 288, 70).tolist()
    packed, floats = (log_probs(LLM(tmp_path / name, **FEW), ids) for name in ("packed", "floats"))
    # Activations are rounded for codes, and not for floats; these weights let little things grow.
    assert kl(floats, packed) < 1e-4
    assert floats.std(axis=1).min() > 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, shards=2)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, **FEW)


def test_text_and_chat(llm):
    (completion,) = llm.generate(["Some text"], GREEDY)
    assert len(completion.token_ids) == 24
    assert llm.tokenizer.decode(completion.token_ids) == completion.text
    conversation = Conversation(llm)
    for _ in conversation.ask("Hello", GREEDY):
        pass
    ids = conversation.sequence.tokens
    assert ids[: len("user: Hello") + 2] == [258, *llm.tokenizer.encode("user: Hello"), 257]
    conversation.sequence.release()


def test_sessions_come_back_for_the_same_weights_alone(llm, checkpoint, tmp_path):
    path = tmp_path / "session.pkv"
    sequence = llm.runner.new_sequence(llm.encode("A text that is kept with its cache. " * 4))
    llm.runner.prefill(sequence)
    save_session(path, llm, sequence)
    saved = load_session(path, llm)
    assert saved.sequence.tokens == sequence.tokens
    assert saved.sequence.num_cached == sequence.num_cached
    saved.sequence.release()
    sequence.release()
    write_checkpoint(tmp_path / "other", "bf16", rms_norm_eps=2e-5)
    write_tokenizer(tmp_path / "other")
    with pytest.raises(SegmentError):
        load_session(path, LLM(tmp_path / "other", **FEW))


def test_a_checkpoint_drafts_for_a_checkpoint(llm, checkpoint, tmp_path):
    drafting = LLM(checkpoint, draft=f"model:{checkpoint}", draft_tokens=3, **FEW)
    prompt = ["Drafted text"]
    drafted, plain = (each.generate(prompt, GREEDY)[0].token_ids for each in (drafting, llm))
    assert drafted == plain
    write_checkpoint(tmp_path, vocab_size=288)
    write_tokenizer(tmp_path)
    other = json.loads((tmp_path / "tokenizer.json").read_text())
    other["model"]["vocab"] = dict(zip(other["model"]["vocab"], reversed(range(256)), strict=True))
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(InputError, match=r"entry 0 of tokenizer.ggml.tokens is 'Ń' there and '!' here"):
        LLM(checkpoint, draft=f"model:{tmp_path}", **FEW)
