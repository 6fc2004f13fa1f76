"""rANS: what is encoded, by either implementation, is decoded, and hostile words do no harm.

`test_kv_values.py` is about the other decoder.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prolepsis.kernels import rans, simd

ENCODERS = [rans.encode_scalar] + [rans.encode_avx512] * simd.AVX512


def frequencies(random: np.random.Generator, contexts: int) -> np.ndarray:
    """Random rows that sum to 4096, from flat to nearly certain."""
    weights = random.random((contexts, rans.ALPHABET)) ** random.integers(1, 60, (contexts, 1))
    rows = np.floor(weights / weights.sum(axis=1, keepdims=True) * 4000).astype(np.int64)
    rows[np.arange(contexts), rows.argmax(axis=1)] += 4096 - rows.sum(axis=1)
    return rows.astype(np.uint16)


def sample(random: np.random.Generator, table: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, contexts) drawn from the table."""
    contexts = random.integers(0, len(table), n).astype(np.uint8)
    draws = random.integers(0, 4096, n)
    tokens = (np.cumsum(table, axis=1, dtype=np.int64)[contexts] <= draws[:, None]).sum(axis=1)
    return tokens.astype(np.uint8), contexts


def encoded(encoder, tokens: np.ndarray, contexts: np.ndarray, lanes: int, table: np.ndarray) -> np.ndarray:  # type: ignore[no-untyped-def]
    entries = rans.encode_table(table).reshape(-1, rans.ALPHABET)[contexts, tokens]
    buffer = np.zeros(2 * len(tokens) + 4 * lanes + 64, np.uint8)
    begin = encoder(entries, len(tokens), lanes, buffer, buffer.size)
    return buffer[begin:]


def decoded(
    words: np.ndarray, contexts: np.ndarray, lanes: int, table: np.ndarray
) -> tuple[np.ndarray, int, np.ndarray]:
    padded = np.concatenate([words, np.full(rans.READ_AHEAD, 0xAA, np.uint8)])
    states, tokens = np.zeros(rans.MAX_LANES, np.uint32), np.zeros(len(contexts), np.uint8)
    p = rans.read_states(padded, 0, states, lanes)
    end = len(words)
    p = rans.decode(padded, p, end, states, lanes, contexts, len(contexts), rans.decode_table(table), tokens)
    return tokens, p, states[:lanes]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0, 1, 3, 31, 32, 33, 100, 1000, 9000]), st.sampled_from([1, 4, 32]))
def test_round_trip(seed: int, n: int, lanes: int) -> None:
    random = np.random.default_rng(seed)
    table = frequencies(random, int(random.integers(1, 73)))
    tokens, contexts = sample(random, table, n)
    streams = [encoded(encoder, tokens, contexts, lanes, table) for encoder in ENCODERS]
    for words in streams:
        assert np.array_equal(words, streams[0])
    back, p, states = decoded(streams[0], contexts, lanes, table)
    assert np.array_equal(back, tokens)
    assert p == len(streams[0])
    assert (states == 1 << 16).all()


@pytest.mark.parametrize("low", [1, 2, 2047, 4095, 4096])
def test_extreme_frequencies(low: int) -> None:
    """Where one token has nearly all the probability, quotients are as large as they get."""
    table = np.zeros((1, rans.ALPHABET), np.uint16)
    table[0, 3], table[0, 90] = low, 4096 - low
    tokens, contexts = sample(np.random.default_rng(3), table, 200_000)
    streams = [encoded(encoder, tokens, contexts, 32, table) for encoder in ENCODERS]
    assert all(np.array_equal(words, streams[0]) for words in streams)
    assert np.array_equal(decoded(streams[0], contexts, 32, table)[0], tokens)


def test_certain_tokens_cost_nothing() -> None:
    table = np.zeros((1, rans.ALPHABET), np.uint16)
    table[0, 5] = 4096
    tokens, contexts = np.full(1000, 5, np.uint8), np.zeros(1000, np.uint8)
    for encoder in ENCODERS:
        assert len(encoded(encoder, tokens, contexts, 32, table)) == 4 * 32


def test_near_the_entropy() -> None:
    random = np.random.default_rng(1)
    table = frequencies(random, 8)
    tokens, contexts = sample(random, table, 200_000)
    ideal = (12 - np.log2(table[contexts, tokens])).sum() / 8
    assert ideal < len(encoded(rans.encode, tokens, contexts, 32, table)) < 1.002 * ideal + 4 * 32


@pytest.mark.parametrize("lanes", [4, 32])
def test_words_that_run_out_are_noticed(lanes: int) -> None:
    random = np.random.default_rng(2)
    table = frequencies(random, 8)
    tokens, contexts = sample(random, table, 20_000)
    words = encoded(rans.encode, tokens, contexts, lanes, table)
    for length in (4 * lanes, len(words) // 2, len(words) - 2):
        _, p, states = decoded(words[:length], contexts, lanes, table)
        assert p == -1 or p != length or (states != 1 << 16).any()
    _, p, _ = decoded(np.zeros(4 * lanes, np.uint8), contexts, lanes, table)  # states no encoder leaves
    assert p == -1
