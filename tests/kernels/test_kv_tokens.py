"""Tokens of scalars: scalar and vector code agree, and the layouts cover what they must."""

import numpy as np
import pytest
from forms import DTYPES, form_of
from token_cases import READERS, scene

from prolepsis.coding.cache_dtypes import FORMATS, to_float
from prolepsis.kernels import kv_tokens, rans, simd
from prolepsis.kernels.kv_contexts import SLACK
from prolepsis.kernels.rans import ALPHABET

WRITERS = [kv_tokens.write_scalar] + [kv_tokens.write_avx512] * simd.AVX512


@pytest.mark.parametrize("dtype", [d for d in DTYPES if FORMATS[d].bits == 16])
def test_ordinals_are_in_the_order_of_the_values(dtype: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    ordinals = np.array([kv_tokens.ordinal_of(u) for u in patterns])
    assert np.array_equal(np.sort(ordinals), np.arange(-(1 << 15), 1 << 15))
    assert kv_tokens.ordinal_of(np.uint16(0x8000)) == -1
    values = to_float(patterns, dtype)[np.argsort(ordinals)]
    numbers = values[~np.isnan(values)]
    assert numbers[0] == -np.inf
    assert numbers[-1] == np.inf
    assert (np.diff(numbers[1:-1]) >= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bin_is_one_range_of_ordinals(dtype: str) -> None:
    """The near layout's bins are disjoint and cover 14 octaves; the far layout's cover 0 ... 65535."""
    mantissa = int(form_of(dtype)[0])
    bins = kv_tokens.token_bins(mantissa).astype(np.int64)
    octaves = [1] * 6 + [min(n, 2**mantissa) for n in (2, 2, 4, 8, 8, 8, 4, 2)]
    for part, count, low, high in (
        (bins[:64], 64, 0, 1 << 16),
        (bins[64:], sum(octaves), -10 << mantissa, 4 << mantissa),
    ):
        reached = low
        for entry in part[:count].tolist():
            assert entry >> 5 << (entry & 31) == reached
            reached += 1 << (entry & 31)
        assert reached == high
    raw = kv_tokens.raw_bits(kv_tokens.token_bins(mantissa))
    assert (raw[:, kv_tokens.ESCAPE] == 16).all()
    assert np.array_equal(raw[3, :127], (bins[64:].repeat(2) & 31)[:127])
    assert np.array_equal(raw[40, :127], (bins[:64].repeat(2) & 31)[:127])


def encode_table(random: np.random.Generator) -> np.ndarray:
    """Of frequencies where a third of the tokens is impossible."""
    frequencies = np.full((72, ALPHABET), 32, np.uint16)
    frequencies[random.random(frequencies.shape) < 0.3] = 0
    frequencies[:, kv_tokens.ESCAPE] = 1
    return rans.encode_table(frequencies)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 1000])
def test_what_is_written_is_read(dtype: str, n: int) -> None:
    random = np.random.default_rng(n)
    mantissa = int(form_of(dtype)[0])
    octaves, bins, table = kv_tokens.octave_starts(mantissa), kv_tokens.token_bins(mantissa), encode_table(random)
    contexts, centres, scalars = scene(random, n)
    written = []
    for writer in WRITERS:
        entries, bits = np.zeros(n + SLACK, np.uint32), np.zeros(2 * n + 200, np.uint8)
        p, held, filled = writer(
            scalars, contexts, centres, n, octaves, mantissa, table, entries, bits, 3, np.uint64(5), np.uint64(3)
        )
        bits[p] = held
        written.append((entries[:n].tolist(), bits[: p + 1].tobytes(), int(filled)))
        assert (entries[:n] >> 16 > 0).all()
    assert all(w == written[0] for w in written)
    counts = np.zeros((72, ALPHABET), np.int64)
    kv_tokens.count_tokens(scalars, contexts, centres, n, octaves, mantissa, counts)
    assert counts.sum() == n

    rows = table.reshape(72, ALPHABET)
    tokens = np.array([np.flatnonzero(rows[c] == e)[-1] for c, e in zip(contexts, entries[:n], strict=False)], np.uint8)
    for reader in READERS:
        values = np.zeros(n + SLACK, np.uint16)
        padded = np.concatenate([tokens, np.zeros(SLACK, np.uint8)])
        end = 8 * (p - 3) + int(filled)
        assert reader(padded, contexts, centres, n, bins, bits, 3, 3, end, values) == end
        assert np.array_equal(values[:n], scalars[:n])
