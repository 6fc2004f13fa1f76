"""Streams to code, and what becomes of them."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from forms import DTYPES, form_of

from prolepsis.coding.cache_dtypes import FORMATS, DType
from prolepsis.kernels import kv_streams, kv_tokens, rans
from prolepsis.kernels.kv_streams import Guess

ALPHABET = rans.ALPHABET


class Case(NamedTuple):
    """Scalars [tokens, heads * dim], what is said of them, and which columns are coded."""

    dtype: DType
    matrix: np.ndarray
    guess: Guess
    column: int
    row: int


def random_case(
    random: np.random.Generator, dtype: DType, tokens: int, heads: int, dim: int, group: int, *, width: float = 4.0
) -> Case:
    """Means of one token or of all, turned or not, shifted or not. width: of the residuals, in ordinals."""
    scales = np.where(random.random(heads * dim) < 0.1, 0, random.integers(900, 1150, heads * dim)).astype(np.int32)
    rows = tokens if random.random() < 0.5 else 1
    sizes = 2.0 ** (scales / 8 - 127) * random.normal(size=(rows, heads * dim)) * 2.0 ** random.integers(-5, 6)
    pairs = int(random.integers(0, dim // 2 + 1))
    angles = random.normal(size=(tokens, pairs))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    shifts = random.integers(-30, 30, (tokens if random.random() < 0.5 else 0) * heads).astype(np.int32)
    half = bool(random.random() < 0.5)
    guess = Guess(
        sizes.astype(np.float32).reshape(-1), cos.reshape(-1), sin.reshape(-1), pairs, half, scales, shifts, dim
    )
    largest = FORMATS[dtype].largest
    ordinals = np.rint(random.normal(size=(tokens, heads * dim)) * width).astype(np.int64)
    ordinals = np.clip(ordinals + random.integers(0, largest // 2), -largest - 1, largest)
    scalars = np.where(ordinals < 0, 0x8000 | (-1 - ordinals), ordinals).astype(np.uint16)
    first = int(random.integers(0, heads // group)) * group
    return Case(dtype, scalars, guess, first * dim, group * dim)


def counted(case: Case) -> np.ndarray:
    """How often each token occurs in each context."""
    counts = np.zeros((72, ALPHABET), np.int64)
    form = form_of(case.dtype)
    kv_streams.count_stream(
        case.matrix.reshape(-1), case.column, case.row, case.guess, form, kv_tokens.octave_starts(int(form[0])), counts
    )
    return counts


def encoded(case: Case, frequencies: np.ndarray) -> np.ndarray:
    """The bytes of the stream."""
    form, room = form_of(case.dtype), kv_streams.encoding_room(len(case.matrix) * case.row)
    octaves, table = kv_tokens.octave_starts(int(form[0])), rans.encode_table(frequencies)
    matrix = case.matrix.reshape(-1)
    size = kv_streams.encode_stream(matrix, case.column, case.row, case.guess, form, octaves, table, *room)
    return room[-1][:size].copy()


def decoded(case: Case, data: np.ndarray, frequencies: np.ndarray) -> tuple[np.ndarray, bool]:
    """(a matrix filled with 0xABCD, of which the stream's columns were decoded; whether the stream was well formed)."""
    form, out = form_of(case.dtype), np.full_like(case.matrix, 0xABCD)
    padded = np.concatenate([np.full(5, 0x5A, np.uint8), data, np.full(rans.READ_AHEAD, 0xA5, np.uint8)])
    bins, table = kv_tokens.token_bins(int(form[0])), rans.decode_table(frequencies)
    sound = kv_streams.decode_stream(
        padded, 5, 5 + len(data), case.guess, form, bins, table, out.reshape(-1), case.column, case.row
    )
    return out, sound


def blank() -> np.ndarray:
    """Frequencies of tokens that are all alike."""
    return np.full((72, ALPHABET), 32, np.uint16)


def results() -> Iterator[np.ndarray]:
    """Streams of every dtype, and how often their tokens occur."""
    for i, dtype in enumerate(DTYPES):
        for tokens, heads, dim, group in ((256, 2, 64, 1), (33, 3, 50, 3), (7, 1, 3, 1)):
            case = random_case(np.random.default_rng(i), dtype, tokens, heads, dim, group)
            data = encoded(case, blank())
            assert decoded(case, data, blank())[1]
            yield data
            yield counted(case)
