"""Decoding: all implementations agree, on what an encoder wrote and on anything else."""

import numpy as np
import pytest
from forms import DTYPES, form_of
from hypothesis import given, settings
from hypothesis import strategies as st
from token_cases import READERS, scene

from prolepsis.kernels import kv_tokens, kv_values, rans, simd
from prolepsis.kernels.kv_contexts import SLACK

DECODERS = [kv_values.decode_scalar] + [kv_values.decode_avx512] * simd.AVX512


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_readers_agree_on_anything(dtype: str) -> None:
    random = np.random.default_rng(1)
    bins = kv_tokens.token_bins(int(form_of(dtype)[0]))
    for n in (1, 31, 32, 33, 1000):
        tokens = random.integers(0, 128, n + SLACK).astype(np.uint8)
        contexts, centres, _ = scene(random, n)
        bits = np.frombuffer(random.bytes(2 * n + 5 + rans.READ_AHEAD), np.uint8).copy()
        results = []
        for reader in READERS:
            values = np.zeros(n + SLACK, np.uint16)
            position = reader(tokens, contexts, centres, n, bins, bits, 3, 0, 16 * n, values)
            results.append((position, values[:n].tolist()))
        assert all(r == results[0] for r in results)
        for reader in READERS:
            if n > 64:
                assert reader(tokens, contexts, centres, n, bins, bits, 3, 0, 100, np.zeros(n + SLACK, np.uint16)) == -1


def frequencies(random: np.random.Generator) -> np.ndarray:
    """Random rows that sum to 4096, from flat to nearly certain."""
    weights = random.random((72, rans.ALPHABET)) ** random.integers(1, 60, (72, 1))
    rows = np.floor(weights / weights.sum(axis=1, keepdims=True) * 3900).astype(np.int64) + 1
    rows[np.arange(72), rows.argmax(axis=1)] += 4096 - rows.sum(axis=1)
    return rows.astype(np.uint16)


def decode_all(
    decoder, data: np.ndarray, bits: int, end: int, lanes: int, scene_: tuple, n: int, dtype: str, table, cut: int
):  # type: ignore[no-untyped-def]
    """(positions, scalars, states) after two calls, the first of which decodes `cut` scalars."""
    contexts, centres, _ = scene_
    bins = kv_tokens.token_bins(int(form_of(dtype)[0]))
    states, tokens, values = np.zeros(32, np.uint32), np.zeros(n + SLACK, np.uint8), np.zeros(n + SLACK, np.uint16)
    p, position = rans.read_states(data, 0, states, lanes), 0
    for first, last in ((0, cut), (cut, n)):
        if p >= 0:
            p, position = decoder(
                data, p, bits, position, end, states, lanes, contexts[first:], centres[first:], last - first,
                rans.decode_table(table), bins, tokens, values[first:],
            )  # fmt: skip
    return (p, position if p >= 0 else None), values[:n] if p >= 0 else None, states if p >= 0 else None


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES), st.integers(0, 2**32), st.sampled_from([0, 1, 31, 32, 33, 1000]), st.sampled_from([4, 32])
)
def test_what_was_encoded_is_decoded(dtype: str, seed: int, n: int, lanes: int) -> None:
    random = np.random.default_rng(seed)
    table, case = frequencies(random), scene(random, n)
    contexts, centres, scalars = case
    mantissa = int(form_of(dtype)[0])
    entries, raw = np.zeros(n + SLACK, np.uint32), np.zeros(2 * n + 200, np.uint8)
    p, held, filled = kv_tokens.write(
        scalars, contexts, centres, n, kv_tokens.octave_starts(mantissa), mantissa, rans.encode_table(table), entries,
        raw, 0, np.uint64(0), np.uint64(0),
    )  # fmt: skip
    raw[p] = held
    buffer = np.zeros(2 * n + 4 * lanes + 64, np.uint8)
    words = buffer[rans.encode(entries, n, lanes, buffer, buffer.size) :]
    data = np.concatenate([words, raw[: p + 1], np.full(rans.READ_AHEAD, 0xAA, np.uint8)])
    for decoder in DECODERS:
        ends, values, states = decode_all(
            decoder, data, len(words), 8 * p + int(filled), lanes, case, n, dtype, table, n // 2 // 32 * 32
        )
        assert ends == (len(words), 8 * p + int(filled))
        assert np.array_equal(values, scalars[:n])
        assert (states[:lanes] == 1 << 16).all()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 2**32), st.integers(0, 900), st.sampled_from([4, 32]))
def test_all_decoders_agree_on_noise(dtype: str, seed: int, words: int, lanes: int) -> None:
    """Also that words or raw bits have run out."""
    random = np.random.default_rng(seed)
    table, case, n = frequencies(random), scene(random, 500), 500
    data = np.frombuffer(random.bytes(4 * lanes + 2 * words + 200 + rans.READ_AHEAD), np.uint8).copy()
    results = [decode_all(d, data, 4 * lanes + 2 * words, 1600, lanes, case, n, dtype, table, 256) for d in DECODERS]
    for ends, values, states in results:
        assert ends == results[0][0]
        assert np.array_equal(values, results[0][1])
        assert np.array_equal(states, results[0][2])
