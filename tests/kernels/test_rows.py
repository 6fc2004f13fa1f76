"""Row operations against float64, with bounds; u = 2^-24 is the rounding of float32."""

import numpy as np
import pytest
from numba import njit
from weight_cases import joined

from prolepsis.kernels.cells import CELL, PLANES, RECORD
from prolepsis.kernels.rows import LARGEST_QUANT, add_row, gate_row, norm_row, quantise_row, rotate_head

U = 2.0**-24


@njit
def norm(x, at, width, gains, gains_at, eps, out, out_at):
    norm_row(x, at, width, gains, gains_at, eps, out, out_at)


@njit
def gate(x, at, up_at, width, out, out_at):
    gate_row(x, at, up_at, width, out, out_at)


@njit
def rotate(x, at, rotated, width, cos, sin, angle, factor, out, out_at):
    rotate_head(x, at, rotated, width, cos, sin, angle, factor, out, out_at)


@njit
def add(x, at, width, delta, delta_at):
    add_row(x, at, width, delta, delta_at)


@njit
def quantise(x, at, width, quants, records, cell):
    quantise_row(x, at, width, quants, records, cell)


def quantised(x):
    """(quants, scales, scale * sum, sums) of x float32 [cells * 32], by cell."""
    cells = x.size // CELL
    quants, records = np.full(PLANES * x.size, 99, np.int8), np.zeros(cells * RECORD, np.int32)
    quantise(x, 0, x.size, quants, records, 0)
    words = records.reshape(cells, RECORD)
    floats = words.view(np.float32)
    return joined(quants), floats[:, 0], floats[:, 1], words[:, 2:]


@pytest.mark.parametrize("width", [32, 96, 576, 4096])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_norm(width, size):
    rng = np.random.default_rng(width)
    x = (rng.standard_normal(16 + width) * size).astype(np.float32)
    gains = rng.standard_normal(width + 32).astype(np.float32)
    out = np.full(width + 48, 5.0, np.float32)
    norm(x, 16, width, gains, 32, np.float32(1e-5), out, 32)
    row = x[16:].astype(np.float64)
    exact = row / np.sqrt(np.mean(row**2) + np.float64(np.float32(1e-5))) * gains[32:]
    # The mean of squares is a chain of width / 16 additions and 4 more; the root halves its error; 5 more roundings.
    assert (np.abs(out[32:-16] - exact) <= (width / 32 + 9) * U * np.abs(exact)).all()
    assert (out[:32] == 5.0).all()
    assert (out[-16:] == 5.0).all()


def test_norm_of_zeros_is_zeros():
    out = np.ones(64, np.float32)
    norm(np.zeros(64, np.float32), 0, 64, np.ones(64, np.float32), 0, np.float32(1e-6), out, 0)
    assert not out.any()


def test_gate():
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(2 * 1536) * 8).astype(np.float32)
    out = np.zeros(1536, np.float32)
    gate(x, 0, 1536, 1536, out, 0)
    g, up = x[:1536].astype(np.float64), x[1536:].astype(np.float64)
    exact = g / (1 + np.exp(-g)) * up
    assert (np.abs(out - exact) <= 6e-7 * np.abs(exact)).all()


def test_add():
    rng = np.random.default_rng(2)
    x, delta = rng.standard_normal((2, 128)).astype(np.float32)
    expected = x.copy()
    expected[32:96] += delta[64:]
    add(x, 32, 64, delta, 64)
    assert np.array_equal(x, expected)


@pytest.mark.parametrize(("rotated", "width"), [(32, 32), (64, 64), (96, 96), (128, 128), (32, 96), (64, 128)])
def test_rotate(rotated, width):
    rng = np.random.default_rng(3)
    x = rng.standard_normal(16 + width).astype(np.float32)
    angles = rng.uniform(0, 6.3, rotated)  # those of two positions
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    out = np.zeros(width, np.float32)
    half, factor = rotated // 2, np.float32(0.125)
    rotate(x, 16, rotated, width, cos, sin, half, factor, out, 0)
    head = x[16:].astype(np.float64)
    first, second = head[:half], head[half:rotated]
    c, s = cos[half:].astype(np.float64), sin[half:].astype(np.float64)
    exact = np.concatenate([first * c - second * s, second * c + first * s, head[rotated:]]) * 0.125
    size = np.concatenate([np.hypot(first, second)] * 2 + [np.abs(head[rotated:])]) * 0.125
    assert (np.abs(out - exact) <= 4 * U * size).all()


def test_rotation_by_nothing_keeps_the_bits():
    x = np.random.default_rng(4).standard_normal(64).astype(np.float32)
    out = np.zeros(64, np.float32)
    rotate(x, 0, 64, 64, np.ones(32, np.float32), np.zeros(32, np.float32), 0, np.float32(1), out, 0)
    assert np.array_equal(out, x)


def test_quantise():
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((200, CELL)) * np.exp(rng.uniform(-60, 60, (200, 1)))).astype(np.float32)
    quants, scales, totals, sums = quantised(x.reshape(-1))
    largest = np.abs(x).max(axis=1)
    assert np.array_equal(scales, largest / np.float32(LARGEST_QUANT))
    steps = x.astype(np.float64) / (largest.astype(np.float64) / LARGEST_QUANT)[:, None]
    assert (np.abs(quants - steps) <= 0.5 + LARGEST_QUANT * 3 * U).all()
    assert (np.abs(quants.astype(int)).max(axis=1) == LARGEST_QUANT).all()
    whole = quants.astype(np.int32)
    assert np.array_equal(sums, -np.stack([whole[:, :16].sum(1), whole[:, 16:].sum(1), whole.sum(1)], axis=1))
    assert np.array_equal(totals, scales * whole.sum(1).astype(np.float32))


def test_quantise_rounds_ties_to_even():
    x = np.zeros(CELL, np.float32)
    x[:6] = [LARGEST_QUANT, 0.5, 1.5, 2.5, -0.5, -1.5]
    assert quantised(x)[0][0, :6].tolist() == [LARGEST_QUANT, 0, 2, 2, 0, -2]


def test_every_quant_is_the_sum_of_its_planes():
    every = np.arange(-int(LARGEST_QUANT), int(LARGEST_QUANT) + 1).astype(np.float32)
    cells = np.append(every, np.zeros(-len(every) % (CELL - 1), np.float32)).reshape(-1, CELL - 1)
    x = np.insert(cells, 0, LARGEST_QUANT, axis=1)
    assert np.array_equal(quantised(x.reshape(-1))[0], x)


def test_quantise_writes_only_its_own_cells():
    quants, records = np.full(4 * PLANES * CELL, 99, np.int8), np.full(4 * RECORD, 99, np.int32)
    quantise(np.ones(96, np.float32), 32, 64, quants, records, 1)
    assert (quants == [99] * 64 + [127] * 128 + [99] * 64).all()
    assert (records[:RECORD] == 99).all()
    assert (records[3 * RECORD :] == 99).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("lane", range(CELL))
def test_quantise_shows_what_is_not_finite(value, lane):
    x = np.linspace(-1, 1, 2 * CELL).astype(np.float32)
    x[lane] = value
    quants, scales, totals, sums = quantised(x)
    assert not np.isfinite(scales[0])
    assert np.isnan(totals[0])
    assert not quants[0].any()
    assert not sums[0].any()
    assert np.isfinite([scales[1], totals[1]]).all()


def test_quantise_of_the_very_small_and_the_very_large():
    for size in (0.0, 1e-45, 1e-38, 1e-30):
        quants, scales, totals, _ = quantised(np.full(CELL, size, np.float32))
        assert not quants.any()
        assert not totals.any()
        assert np.isfinite(scales).all()
    for size in (1.1e-30, 3.4e38):
        quants, scales, _, _ = quantised(np.full(CELL, size, np.float32))
        assert (quants == LARGEST_QUANT).all()
        assert np.isfinite(scales).all()
