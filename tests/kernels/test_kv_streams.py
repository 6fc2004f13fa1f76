"""Streams: whatever the shape, dtype and prediction, values come back, in little more room than theory asks for."""

import numpy as np
import pytest
from forms import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import Case, blank, counted, decoded, encoded, random_case

from prolepsis.coding import tables
from prolepsis.coding.cache_dtypes import DType
from prolepsis.coding.tables import TokenTables
from prolepsis.kernels import kv_streams
from prolepsis.kernels.kv_static import turn_rows

# Tokens, heads, head_dim, heads of the stream.
SHAPES = [(256, 3, 64, 3), (256, 4, 16, 2), (100, 1, 128, 1), (33, 2, 50, 1), (9, 3, 7, 3), (1, 1, 1, 1)]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.integers(0, 2**32), st.sampled_from([0.0, 0.7, 30, 1e5]))
def test_round_trip(dtype: DType, shape: tuple[int, int, int, int], seed: int, width: float) -> None:
    """Only the columns of the stream are touched."""
    case = random_case(np.random.default_rng(seed), dtype, *shape, width=width)
    frequencies = tables.normalise(counted(case)) if seed % 2 else tables.universal(dtype)
    out, sound = decoded(case, encoded(case, frequencies), frequencies)
    assert sound
    own = slice(case.column, case.column + case.row)
    assert np.array_equal(out[:, own], case.matrix[:, own])
    out[:, own] = 0xABCD
    assert (out == 0xABCD).all()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 2**32))
def test_damaged_streams_do_no_harm(dtype: DType, seed: int) -> None:
    random = np.random.default_rng(seed)
    case = random_case(random, dtype, 256, 2, 48, 1)
    frequencies = tables.normalise(counted(case))
    data = encoded(case, frequencies)
    decoded(case, data[: random.integers(0, len(data))].copy(), frequencies)
    decoded(case, np.frombuffer(random.bytes(len(data)), np.uint8).copy(), frequencies)
    for _ in range(5):
        damaged = data.copy()
        damaged[random.integers(0, len(data), 3)] ^= random.integers(1, 256, 3).astype(np.uint8)
        out, _ = decoded(case, damaged, frequencies)
        other = np.ones(out.shape[1], np.bool_)
        other[case.column : case.column + case.row] = False
        assert (out[:, other] == 0xABCD).all()


@pytest.mark.parametrize("words", [0x7FFFFFFF, 0xFFFFFFFE, 0x80000000, 7, 63])
def test_impossible_numbers_of_words_are_refused(words: int) -> None:
    case = random_case(np.random.default_rng(0), "bf16", 256, 1, 64, 1)
    data = encoded(case, blank())
    data[:4] = np.array([words], "<u4").view(np.uint8)
    assert not decoded(case, data, blank())[1]


def simple_case(dtype: DType, tokens: int, row: int, code: int, ordinals: np.ndarray) -> Case:
    """One scale for all, and predictions of +0."""
    none, scales = np.empty(0, np.float32), np.full(row, code, np.int32)
    guess = kv_streams.Guess(np.zeros(row, np.float32), none, none, 0, False, scales, np.empty(0, np.int32), row)
    return Case(dtype, ordinals.astype(np.uint16).reshape(tokens, row), guess, 0, row)


@pytest.mark.parametrize("bits", [0.02, 0.05, 0.1, 0.5, 1, 4])
@pytest.mark.parametrize(("tokens", "row", "most"), [(2048, 512, 0.01), (256, 192, None)])
def test_overhead(bits: float, tokens: int, row: int, most: float | None) -> None:
    """Under 1 % above the ideal code length of the tables, or what 4 lanes cost where there is next to nothing."""
    random = np.random.default_rng(1)
    n, extremes = tokens * row, (1e-6, 0.5 if bits <= 1 else 1)
    for _ in range(60):  # a token of 1 - p and 32 others of p / 32 each
        p = sum(extremes) / 2
        entropy = -(1 - p) * np.log2(max(1 - p, 1e-9)) - p * np.log2(p / (1 if bits <= 1 else 32))
        extremes = (p, extremes[1]) if entropy < bits else (extremes[0], p)
    other = random.integers(1, 2 if bits <= 1 else 33, n)
    case = simple_case("int8", tokens, row, 1016, np.where(random.random(n) < p, other, 0))
    counts = counted(case)
    token_tables = TokenTables("int8", tables.normalise(counts))
    ideal = token_tables.code_length(counts)
    assert abs(ideal / n - bits) < 0.1 * bits + 0.01
    data = encoded(case, token_tables.frequencies)
    assert ideal <= 8 * len(data) < 1.01 * ideal + (0 if most else 8 * 20)
    assert decoded(case, data, token_tables.frequencies)[1]


def test_few_bits_go_into_few_lanes() -> None:
    """Bit 31 of the number of words says so; in streams of more bits it is clear, as in all that older writers made."""
    flags = []
    for spread in (0, 1, 30):
        values = np.random.default_rng(0).integers(0, spread + 1, 256 * 192)
        case = simple_case("int8", 256, 192, 1016, values)
        data = encoded(case, tables.normalise(counted(case)))
        words = int(data[:4].view("<u4")[0])
        flags.append(words >> 31)
        assert len(data) >= 4 + 2 * (words & 0x7FFFFFFF)
    assert flags == [1, 1, 0]
    short = simple_case("int8", 10, 192, 1016, np.zeros(1920))
    assert encoded(short, blank())[3] >> 7 == 0  # it has few lanes anyway


def test_what_does_not_shrink_is_kept_as_it_is() -> None:
    random = np.random.default_rng(0)
    case = random_case(random, "bf16", 256, 2, 64, 1)
    noise = case._replace(matrix=random.integers(0, 1 << 16, case.matrix.shape).astype(np.uint16))
    data = encoded(noise, tables.universal("bf16"))
    own = noise.matrix[:, case.column : case.column + case.row]
    assert data.tobytes() == b"\xff\xff\xff\xff" + own.tobytes()
    assert np.array_equal(decoded(noise, data, blank())[0][:, case.column : case.column + case.row], own)
    assert not decoded(noise, data[:-1], blank())[1]


def test_code_length_counts_escapes_and_raw_bits() -> None:
    frequencies = np.zeros((72, 128), np.uint16)
    frequencies[:, 0], frequencies[:, 40], frequencies[:, 127] = 2048, 1024, 1024
    counts = np.zeros((72, 128), np.int64)
    counts[50, 0], counts[50, 40], counts[50, 6], counts[50, 127] = 5, 7, 11, 13
    # far: token 0 has 1 bit; token 40 is bin 20, 2 bits and 3 raw ones; token 6 is impossible, so it escapes like 127
    assert TokenTables("bf16", frequencies).code_length(counts) == 5 * 1 + 7 * (2 + 3) + (11 + 13) * (2 + 16)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize(("pairs", "dim"), [(0, 5), (1, 2), (8, 16), (16, 33), (17, 40), (40, 96), (64, 128)])
def test_turning_is_one_rounding_an_operation(pairs: int, dim: int, half: bool) -> None:
    random = np.random.default_rng(pairs)
    means = random.normal(size=(1, 3, dim)).astype(np.float32)
    cos, sin = (random.normal(size=(2, 4, pairs))).astype(np.float32)
    out = np.zeros((4, 3, dim), np.float32)
    turn_rows(means, cos, sin, half, out)
    expected = np.repeat(means, 4, axis=0)
    first = slice(0, pairs) if half else slice(0, 2 * pairs, 2)
    second = slice(pairs, 2 * pairs) if half else slice(1, 2 * pairs, 2)
    a, b, c, s = means[..., first], means[..., second], cos[:, None], sin[:, None]
    expected[..., first], expected[..., second] = a * c - b * s, a * s + b * c
    assert np.array_equal(out, expected)
