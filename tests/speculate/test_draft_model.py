"""Drafts of a second model: what it would say itself, whatever was rolled back, and never an error for want of room."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drafting import CONTEXT, Target

from prolepsis.errors import InputError
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.model_file import GGUFModel
from prolepsis.model.tokenizer import Tokenizer
from prolepsis.speculate.draft_model import ModelDrafter

DATA = Path(__file__).parents[1] / "data" / "gguf"
WIDE, COARSE = DATA / "F32.gguf", DATA / "Q4_0.gguf"
PAIR = DATA.parent / "pair"
PROMPTS = [np.random.default_rng(n).integers(2, 1024, 20 + 30 * n).tolist() for n in range(3)]
BLOCK_BYTES = 2 * 2 * 64 * 32 * 2  # K and V of 32 tokens, 2 heads of 64 channels, in bf16


@pytest.fixture(scope="module")
def target():
    return Target(GGUFFile.open(WIDE))


def drafter(target, path=COARSE, blocks=64, **options):
    options = {"memory": blocks * BLOCK_BYTES, "max_context": CONTEXT, "threads": 1, **options}
    return ModelDrafter(path, GGUFModel(target.file), **options)


def held(drafter):
    """Blocks in use."""
    return drafter._cache.pool.num_used


def test_the_target_itself_drafts_what_it_says(target):
    itself = drafter(target, WIDE, precision="high")
    draftee = target.draftee(1, PROMPTS[0], 6)
    expected = target.greedy(PROMPTS[0], 14)
    assert itself.propose([draftee])[0].tokens == expected[:6]
    assert target.verify(draftee, expected[:6]) == expected[:7]
    assert itself.propose([draftee])[0].tokens == expected[7:13]


def test_rolled_back_is_as_never_drafted(target):
    """Rounds of which most drafts are refused, each compared with a drafter that reads all anew."""
    draftee, one = target.draftee(1, PROMPTS[1], 5), drafter(target)
    refused = 0
    for _ in range(12):
        drafts = one.propose([draftee])
        assert drafts == drafter(target).propose([draftee])
        came = target.verify(draftee, drafts[0].tokens)
        refused += len(drafts[0].tokens) - (len(came) - 1)
    assert refused > 5, "drafts must be refused for this to prove anything"
    one.forget(1)
    assert held(one) == 0


def test_a_pair_of_models():
    """A draft model of another shape than the target's, whose drafts are often right."""
    target = Target(GGUFFile.open(PAIR / "target-Q8_0.gguf"))
    tokens = Tokenizer.from_gguf(target.file).encode("def main():\n    return")
    one, accepted = drafter(target, PAIR / "draft-F16.gguf"), 0
    draftee, expected = target.draftee(1, tokens, 3), target.greedy(tokens, 40)
    for _ in range(10):
        drafts = one.propose([draftee])[0].tokens
        accepted += len(target.verify(draftee, drafts)) - 1
    came = draftee.tokens[len(tokens) :]
    assert came == expected[: len(came)]
    assert accepted > 5


def test_company_does_not_show(target):
    """Three sequences with limits and lengths of their own, over some rounds."""
    limits = (1, 4, 6)
    together, alone = drafter(target), [drafter(target) for _ in PROMPTS]
    batch = [target.draftee(key, PROMPTS[key], limit) for key, limit in enumerate(limits)]
    for _ in range(4):
        drafts = together.propose(batch)
        assert [len(draft.tokens) for draft in drafts] == list(limits)
        for draftee, draft, by_itself in zip(batch, drafts, alone, strict=True):
            assert by_itself.propose([draftee]) == [draft]
            target.verify(draftee, draft.tokens)


def test_prompts_of_more_than_one_pass(target, monkeypatch):
    whole = drafter(target).propose([target.draftee(key, PROMPTS[key], 3) for key in range(3)])
    monkeypatch.setattr("prolepsis.speculate.draft_model._MAX_ROWS", 7)
    few, drafts = drafter(target), []
    batch = [target.draftee(key, PROMPTS[key], 3) for key in range(3)]
    for _ in range(sum(map(len, PROMPTS[:3])) // 7 + 2):
        drafts = few.propose(batch)
    assert drafts == whole


def test_room_comes_from_whoever_was_not_continued_for_longest(target):
    small = drafter(target, blocks=5)  # of 1, 2 and 3 blocks, two fit
    batch = [target.draftee(key, PROMPTS[key], 4) for key in range(3)]
    for key in (0, 1, 0, 2):  # the last one needs the room of 1
        assert small.propose([batch[key]]) == drafter(target).propose([batch[key]])
    assert list(small._readings) == [0, 2]
    assert small.propose([batch[1]]) == drafter(target).propose([batch[1]])


def test_without_room_nothing_is_drafted(target):
    small = drafter(target, blocks=3)
    batch = [target.draftee(key, PROMPTS[key], 4) for key in range(3)]
    drafts = small.propose(batch)
    assert [len(draft.tokens) for draft in drafts] == [4, 4, 0]
    assert small.propose(batch) == drafts
    assert len(small.propose([batch[2]])[0].tokens) == 4, "alone it fits"


def test_its_own_context_bounds_it(target):
    short = drafter(target, max_context=22)
    drafts = short.propose([target.draftee(key, PROMPTS[key], 6) for key in range(2)])
    assert drafts[0].tokens == drafter(target).propose([target.draftee(0, PROMPTS[0], 3)])[0].tokens
    assert drafts[1].tokens == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'gpt2' there and 'llama' here"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is a list of 765 there and missing here"),
    ],
)
def test_other_tokenizers_are_refused(target, change, told):
    other = replace(target.file, path=Path("other.gguf"), metadata=target.file.metadata | change)
    with pytest.raises(InputError, match=r"Q4_0\.gguf cannot draft for other\.gguf.*" + told):
        ModelDrafter(COARSE, GGUFModel(other), memory=1 << 20, max_context=CONTEXT, threads=1)


def test_the_first_other_token_is_named(target):
    tokens = target.file.metadata["tokenizer.ggml.tokens"]
    for others, told in (
        ([*tokens[:300], "?!", *tokens[301:]], rf"entry 300 of tokenizer\.ggml\.tokens is {tokens[300]!r} there"),
        (tokens[:-1], r"tokenizer\.ggml\.tokens has 1024 entries there and 1023 here"),
    ):
        other = replace(target.file, metadata=target.file.metadata | {"tokenizer.ggml.tokens": others})
        with pytest.raises(InputError, match=told):
            ModelDrafter(COARSE, GGUFModel(other), memory=1 << 20, max_context=CONTEXT, threads=1)


def test_without_a_tokenizer_sizes_are_compared(target):
    embedding = target.file.tensors["token_embd.weight"]
    smaller = replace(embedding, shape=(1000, embedding.shape[1]))
    bare = replace(target.file, metadata={k: v for k, v in target.file.metadata.items() if "tokens" not in k})
    drafter(Target(bare))
    other = replace(bare, tensors=bare.tensors | {"token_embd.weight": smaller})
    with pytest.raises(InputError, match="it knows 1024 tokens and the other 1000"):
        ModelDrafter(COARSE, GGUFModel(other), memory=1 << 20, max_context=CONTEXT, threads=1)
