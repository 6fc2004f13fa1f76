"""The whole pass: against plain NumPy, against llama.cpp's own log-probabilities, and bit for bit against itself."""

import json

import numpy as np
import pytest
from decoding import DATA, HEAD_DIM, KV_HEADS, VOCAB, Session, TinyModel, kl_divergence

from prolepsis.coding.cache_dtypes import TOKEN_DTYPES, arrays_of
from prolepsis.coding.target_cache import compute_kv
from prolepsis.coding.twin_network import Target
from prolepsis.model.gguf_file import GGUFFile

TOKENS = np.random.default_rng(1).integers(0, VOCAB, 300)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A model with every supported weight type."""
    return TinyModel.random(0).write(tmp_path_factory.mktemp("model") / "mixed.gguf")


@pytest.fixture(scope="module")
def whole(mixed):
    """What `mixed` computes for TOKENS in chunks of 256: logits, KV."""
    session = Session(mixed)
    return session.in_chunks(TOKENS, [256]), session.kv(len(TOKENS))


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"only": "F32"}, 1e-3),
        ({"only": "F16", "tied": True}, 1e-3),
        ({"only": "BF16", "factors": True}, 1e-3),
        ({}, 0.05),
        ({"only": "Q4_0"}, 0.05),
        ({"only": "Q4_1"}, 0.05),
        ({"only": "Q8_0", "tied": True}, 0.05),
    ],
    ids=["F32", "F16 tied", "BF16 with frequency factors", "all types", "Q4_0", "Q4_1", "Q8_0 tied"],
)
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16"])
def test_logits_against_numpy(tmp_path, options, limit, kv_dtype):
    """Logits have a standard deviation of 1. With quantised weights a value near the middle of two int8 steps may round
    the other way than in the reference, which is the larger limit."""
    model = TinyModel.random(3, **options)
    tokens = TOKENS[:150]
    ours = Session(model.write(tmp_path / "tiny.gguf"), kv_dtype=kv_dtype).in_chunks(tokens, [150])
    exact = model.logits(tokens, kv_dtype)
    assert np.sqrt(np.mean((ours - exact) ** 2)) < limit
    assert kl_divergence(exact, ours).mean() < limit**2


@pytest.mark.parametrize(
    "type_name", ["F32", "F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_1", "IQ4_XS", "Q4_0", "Q3_K_M"]
)
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16"])
def test_log_probabilities_against_llama_cpp(type_name, kv_dtype):
    ids = json.loads((DATA / "ids.json").read_text())
    ours = Session(GGUFFile.open(DATA / f"{type_name}.gguf"), kv_dtype=kv_dtype).in_chunks(ids, [256])
    theirs, unquantised = np.load(DATA / f"{type_name}.npy"), np.load(DATA / "F32.npy")
    distance = kl_divergence(theirs, ours).mean()
    assert distance < (1e-5 if type_name in ("F32", "F16") else 5e-4)
    # The loss of quantisation itself is llama.cpp's, whose activations are rounded more: 0.0155 for Q4_0, say.
    own, reference = kl_divergence(unquantised, ours).mean(), kl_divergence(unquantised, theirs).mean()
    assert 0.6 * reference - 2e-4 < own < 1.02 * reference + 1e-4
    assert (ours.argmax(axis=1) == theirs.argmax(axis=1)).mean() > 0.97


@pytest.mark.parametrize("sizes", [[1], [7], [16], [33], [128], [255, 1, 44], [3, 250, 1]], ids=str)
def test_chunks_do_not_show(mixed, whole, sizes):
    session = Session(mixed, seed=len(sizes))
    assert np.array_equal(session.in_chunks(TOKENS, sizes), whole[0])
    assert np.array_equal(session.kv(len(TOKENS)), whole[1])


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("seed", [0, 1])
def test_blocks_do_not_show(mixed, whole, block_size, seed):
    session = Session(mixed, block_size=block_size, seed=seed)
    assert np.array_equal(session.in_chunks(TOKENS, [100, 156, 44]), whole[0])
    assert np.array_equal(session.kv(len(TOKENS)), whole[1])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_show(mixed, whole, threads):
    session = Session(mixed, threads=threads)
    assert np.array_equal(session.in_chunks(TOKENS, [250, 1]), whole[0])
    assert np.array_equal(session.kv(len(TOKENS)), whole[1])


def test_company_does_not_show(mixed, whole):
    """Prompts and decode steps of five sequences, mixed in every call."""
    session = Session(mixed, sequences=5)
    rng = np.random.default_rng(2)
    prompts = [TOKENS] + [rng.integers(0, VOCAB, 200) for _ in range(4)]
    done, logits = [0] * 5, [[] for _ in range(5)]
    while done[0] < len(TOKENS):
        parts = []
        for s, prompt in enumerate(prompts):
            count = min(int(rng.choice([1, 1, 5, 40])), len(prompt) - done[s])
            if count and (s == 0 or rng.random() < 0.8):
                parts.append((s, prompt[done[s] : done[s] + count], done[s]))
        rng.shuffle(parts)
        out = session.run(parts)
        for s, ids, _ in parts:
            logits[s].append(out[: len(ids)])
            out = out[len(ids) :]
            done[s] += len(ids)
    assert np.array_equal(np.concatenate(logits[0]), whole[0])
    assert np.array_equal(session.kv(len(TOKENS)), whole[1])
    alone = Session(mixed).in_chunks(prompts[3][: done[3]], [256])
    assert np.array_equal(np.concatenate(logits[3]), alone)


def same_kv(one, other):
    return all(map(np.array_equal, arrays_of(one), arrays_of(other)))


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
def test_caches_hold_what_the_codec_computes(mixed, dtype):
    """By the twin's pass over one pool of bf16, whatever the dtype. And what attention reads of a token is the same in
    its own pass and in every later one, so that no cut into chunks shows."""
    logits = None
    for sizes, how in (
        ([256], {}),
        ([1], {"block_size": 16, "seed": 1}),
        ([7, 120, 1, 1, 40], {"threads": 1, "block_size": 64}),
        ([100, 33], {"threads": 3, "block_size": 16}),
    ):
        session = Session(mixed, kv_dtype=dtype, **how)
        out = session.in_chunks(TOKENS, sizes)
        if logits is None:
            logits = out
            target = Target(session.decoder.plan, KV_HEADS, HEAD_DIM, VOCAB)
            expected = compute_kv(target, TOKENS.astype(np.uint32), dtype)
        assert same_kv(session.kv(len(TOKENS)), expected)
        assert np.array_equal(out, logits)


@pytest.mark.parametrize(("dtype", "limit"), [("fp8_e4m3", 0.02), ("fp8_e5m2", 0.06), ("int8", 0.001), ("int4", 0.1)])
def test_narrow_caches_cost_little(mixed, whole, dtype, limit):
    """Mean KL from a bf16 cache's next-token distributions, in nats."""
    ours = Session(mixed, kv_dtype=dtype).in_chunks(TOKENS, [256])
    assert 0 < kl_divergence(whole[0], ours).mean() < limit


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int4"])
def test_company_does_not_show_in_narrow_caches(mixed, dtype):
    """Decode steps of three sequences together, one of them at another place."""
    alone = Session(mixed, kv_dtype=dtype)
    expected = alone.in_chunks(TOKENS[:60], [60])
    session = Session(mixed, kv_dtype=dtype, sequences=3)
    session.run([(0, TOKENS[:50], 0), (1, TOKENS[:20], 0), (2, TOKENS[::-1][:90], 0)])
    for step in range(10):
        parts = [(s, TOKENS[at : at + 1], at) for s, at in ((1, 20 + step), (0, 50 + step), (2, 90 + step))]
        out = session.run(parts)
        assert np.array_equal(out[:2], expected[[20 + step, 50 + step]])
    assert same_kv(session.kv(60), alone.kv(60))


def test_caches_of_codes_depend_on_nothing_but_positions(mixed, whole):
    """Chunks, threads, company and rows run again; the first block is exact, and later rows read it as codes."""
    alone = Session(mixed, block_size=128, kv_dtype="kivi4")
    expected = alone.in_chunks(TOKENS, [256])
    assert np.array_equal(expected[:128], whole[0][:128])
    assert 0 < kl_divergence(whole[0][128:], expected[128:]).mean() < 0.04
    for sizes, threads in (([100, 33], 1), ([127, 1, 1, 40], 3)):
        session = Session(mixed, block_size=128, kv_dtype="kivi4", seed=threads, threads=threads)
        assert np.array_equal(session.in_chunks(TOKENS, sizes), expected)
    together = Session(mixed, block_size=128, kv_dtype="kivi4", sequences=3)
    together.run([(0, TOKENS[:120], 0), (1, TOKENS[:20], 0), (2, TOKENS[::-1][:90], 0)])
    together.run([(0, TOKENS[::-1][:20], 120)])  # drafts that are not taken, over the end of a block
    for at in range(120, 140, 4):
        parts = [(s, TOKENS[at - back : at - back + 4], at - back) for s, back in ((1, 100), (0, 0), (2, 30))]
        assert np.array_equal(together.run(parts)[4:8], expected[at : at + 4])


def test_logits_of_the_last_rows_and_of_none(mixed, whole):
    session = Session(mixed, sequences=2)
    assert session.run([(0, TOKENS[:100], 0)], "none").shape == (0, VOCAB)
    last = session.run([(0, TOKENS[100:150], 100), (1, TOKENS[:1], 0)], "last")
    assert np.array_equal(last, whole[0][[149, 0]])


def test_writing_again_over_used_slots(mixed, whole):
    """What a slot held before, NaN or another sequence's token, has no influence."""
    session = Session(mixed)
    session.in_chunks(TOKENS[::-1], [256])
    assert np.array_equal(session.in_chunks(TOKENS, [256]), whole[0])


def test_too_many_rows_are_refused(mixed):
    with pytest.raises(ValueError, match="257 rows in one call, at most 256"):
        Session(mixed).run([(0, np.zeros(257, np.int64), 0)])


@pytest.mark.parametrize("head", range(KV_HEADS))
def test_a_changed_key_changes_the_result(mixed, whole, head):
    """The cache is what attention reads: nothing keeps K or V elsewhere."""
    session = Session(mixed)
    session.in_chunks(TOKENS[:200], [200])
    block = session.tables[0, 1]
    session.cache.k[0, block, head, 3, 5] ^= 0x100
    out = session.run([(0, TOKENS[200:201], 200)])
    assert not np.array_equal(out[0], whole[0][200])
