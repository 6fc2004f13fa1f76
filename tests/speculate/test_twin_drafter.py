"""The twin that reads the target's cache: what it says, what it leaves behind, and which weights it has."""

import sys
from pathlib import Path

import numpy as np
import pytest
from drafting import Target

from prolepsis.kernels.cells import CODES
from prolepsis.kernels.qmatmul import KIND
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.quant.matrices import unpacked
from prolepsis.speculate.twin import TwinDrafter
from prolepsis.speculate.twin_weights import twin_plan

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from decoding import VOCAB, TinyModel

DATA = Path(__file__).parents[1] / "data" / "gguf"
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, 20 + 30 * n).tolist() for n in range(3)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model of three layers with 16 bits a weight."""
    path = tmp_path_factory.mktemp("model") / "wide.gguf"
    return Target(TinyModel.random(1, only="BF16", tied=True).write(path))


def test_the_target_itself_drafts_what_it_says(target):
    itself = TwinDrafter(target.decoder, target.cache, target.decoder.plan)
    for key, prompt in enumerate(PROMPTS):
        draft = itself.propose([target.draftee(key, prompt, 7)])[0]
        assert draft.tokens == target.greedy(prompt, 7)
        assert draft.probabilities == [None] * 7


def test_nothing_of_the_twin_survives_a_pass_of_the_target(target):
    """K and V after rounds of drafts, of which some are taken and some are not, against those never drafted for."""
    twin, agreed = TwinDrafter(target.decoder, target.cache), 0
    draftee = target.draftee(0, PROMPTS[0], 4)
    untouched = target.draftee(1, PROMPTS[0], 0)
    for _ in range(12):
        drafts = twin.propose([draftee])[0].tokens
        came = target.verify(draftee, drafts)
        agreed += len(came) - 1
        for _ in came:
            target.verify(untouched, [])
        assert draftee.tokens == untouched.tokens
        assert np.array_equal(target.kv(draftee), target.kv(untouched))
    assert 12 < agreed < 48, "drafts must be refused and taken for this to prove anything"


def test_company_does_not_show(target):
    limits = (1, 0, 6)
    twin = TwinDrafter(target.decoder, target.cache)
    batch = [target.draftee(key, PROMPTS[key], limit) for key, limit in enumerate(limits)]
    drafts = twin.propose(batch)
    assert [len(draft.tokens) for draft in drafts] == list(limits)
    assert [twin.propose([draftee])[0] for draftee in batch] == drafts


def test_no_more_than_there_is_room_for(target):
    draftee = target.draftee(0, PROMPTS[0][:14], 2)  # in one block of 16
    assert len(TwinDrafter(target.decoder, target.cache).propose([draftee._replace(limit=9)])[0].tokens) == 3


def test_wide_weights_are_rounded(target):
    """Most to 4 bits, the projections to K and V and the embedding, which is the head, to 8."""
    plan = target.decoder.plan
    twin = twin_plan(plan)
    kinds = [name for kind in twin.weights.matrices[:, KIND] for name, code in CODES.items() if code == kind]
    assert kinds == ["Q4_1", "Q8_0", "Q8_0", "Q4_1", "Q4_1", "Q4_1", "Q4_1"] * 3 + ["Q8_0"]
    assert (twin.fast, twin.embedding) == (True, twin.groups[-1, 0])
    for matrix, kind in enumerate(kinds):
        exact, rounded = unpacked(plan.weights, matrix), unpacked(twin.weights, matrix)
        limit = {"Q4_1": 0.12, "Q8_0": 0.01}[kind]
        assert limit / 4 < np.sqrt(np.mean((rounded - exact) ** 2) / np.mean(exact**2)) < limit


def test_small_weights_are_shared():
    plan = Target(GGUFFile.open(DATA / "Q4_0.gguf")).decoder.plan
    assert twin_plan(plan).weights is plan.weights


def test_small_weights_beside_wide_ones_are_kept(tmp_path):
    plan = Target(TinyModel.random(2).write(tmp_path / "mixed.gguf")).decoder.plan
    twin = twin_plan(plan)
    same = plan.weights.matrices[:, KIND] == twin.weights.matrices[:, KIND]
    assert 0 < same.sum() < len(same)
    for matrix in np.nonzero(same)[0]:
        assert np.array_equal(unpacked(plan.weights, matrix), unpacked(twin.weights, matrix))
