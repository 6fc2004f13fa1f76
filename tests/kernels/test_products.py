"""Matrix products against the gguf package's dequantisation, in float64, with bounds derived element by element.

Write u = 2^-24, the rounding of float32. A product row of N terms is computed as a chain of at most one fused
multiply-add a column (float kinds), or at most two a cell of 32 columns after exact integer sums (quantised kinds).

- Float kinds: |error| <= (N + 1) u sum |w x|, the classical bound of a sum in order (Higham, Accuracy and Stability of
  Numerical Algorithms, 2nd edition, 3.1).
- Quantised kinds, against the *quantised* activations a q: the integer sum becomes a float32 (one rounding), step and
  scale are multiplied (another), the chain has two links a cell, and Q4_1's minimum meets scale * sum(q), itself
  rounded: |error| <= (2 cells + 5) u S, where S = sum (|step q_w| + |minimum|) |a q|; 4 more u for the float32 rounding
  of the reference itself.
- Quantised kinds, against the activations as given: besides, |x - a q| <= a / 2 in each cell of scale a, up to the
  rounding of 32639 / max and of the product with it (32639 * 3u of a step): |error| <= that + sum over cells of
  a (1/2 + 98,000 u) sum |w|. Activations of 8 bits have the same bounds: their scale a is larger.
"""

import numpy as np
import pytest
from weight_cases import activations, dequantised, joined, magnitudes, multiplied, pack_weights, random_blocks

from prolepsis.kernels.cells import CELL, PLANES

U = 2.0**-24
KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q6_K", "F16", "BF16", "F32")
FLOAT_KINDS = ("F16", "BF16", "F32")
QUANTISED_KINDS = tuple(name for name in KINDS if name not in FLOAT_KINDS)
BATCHES = (*range(1, 14), 256)


def product(weights, first, count, x, in_bytes=False):
    """x @ matrix^T for `count` matrices side by side, and the quantised activations: scales, and scale * q."""
    rows, columns = x.shape
    held = activations(x)
    out = multiplied(weights, first, count, held, rows, in_bytes)
    scales = held.records.view(np.float32).reshape(rows, columns // CELL, -1)[..., 0].astype(np.float64)
    quants = held.quants.reshape(rows, columns // CELL, PLANES, CELL)[:, :, 0] if in_bytes else joined(held.quants)
    quants = quants.reshape(rows, columns // CELL, CELL).astype(np.float64)
    return out, scales, (quants * scales[..., None]).reshape(rows, columns)


def sample(rows, columns, rng):
    """Activations with outliers, as real ones have."""
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    x[:, rng.integers(0, columns, 3)] *= 40
    return x


def check(type_name, raw, x, in_bytes=False):
    """Assert every bound of the module docstring; returns the largest share of each bound that was used up."""
    weights, size = dequantised(type_name, raw), magnitudes(type_name, raw)
    rows, cells = len(raw), x.shape[1] // CELL
    out, scales, rounded = product(pack_weights([(type_name, raw)]), 0, 1, x, in_bytes)
    exact, given = out[:, :rows].astype(np.float64), x.astype(np.float64)
    assert not out[:, rows:].any(), "rows of padding are zero"
    tiny = 1e-300
    if type_name in FLOAT_KINDS:
        bound = (x.shape[1] + 1) * U * (np.abs(given) @ size.T)
        share = np.abs(exact - given @ weights.T) / (bound + tiny)
        assert share.max() <= 1
        return float(share.max())
    arithmetic = (2 * cells + 9) * U * (np.abs(rounded) @ size.T)
    tight = np.abs(exact - rounded @ weights.T) / (arithmetic + tiny)
    assert tight.max() <= 1, f"{tight.max():.2f} of the float32 bound"
    cell_sums = np.abs(weights).reshape(rows, cells, CELL).sum(axis=2)
    rounding = (scales * (0.5 + 98_000 * U)) @ cell_sums.T
    loose = np.abs(exact - given @ weights.T) / (arithmetic + rounding + tiny)
    assert loose.max() <= 1, f"{loose.max():.2f} of the rounding bound"
    return float(tight.max())


@pytest.mark.parametrize("type_name", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (16, 256), (37, 512), (100, 1536)])
def test_error_is_within_its_bound(type_name, rows, columns):
    rng = np.random.default_rng(rows * columns)
    raw = random_blocks(type_name, rows, columns, rng)
    for batch in BATCHES if columns < 1536 else (1, 13):
        x = sample(batch, columns, rng)
        check(type_name, raw, x)
        check(type_name, raw, x, in_bytes=True)


@pytest.mark.parametrize("type_name", [name for name in KINDS if name != "Q6_K"])
def test_one_cell_and_odd_numbers_of_cells(type_name):
    rng = np.random.default_rng(5)
    for columns in (32, 96, 544):
        check(type_name, random_blocks(type_name, 19, columns, rng), sample(3, columns, rng))


def test_the_bound_is_not_empty():
    """A step that is wrong by one part in 2^12 in an eighth of the blocks is outside the float32 bound."""
    rng = np.random.default_rng(6)
    raw = random_blocks("Q8_0", 16, 256, rng)
    x = sample(2, 256, rng)
    out, _, rounded = product(pack_weights([("Q8_0", raw)]), 0, 1, x)
    weights = dequantised("Q8_0", raw)
    weights[:, :CELL] *= 1 + 2.0**-12
    bound = (2 * 8 + 9) * U * (np.abs(rounded) @ np.abs(weights).T)
    assert (np.abs(out - rounded @ weights.T) > bound).any()


def test_matrices_side_by_side_equal_each_alone():
    rng = np.random.default_rng(7)
    matrices = [(name, random_blocks(name, 16 * (1 + i % 3), 256, rng)) for i, name in enumerate(KINDS)]
    weights, x = pack_weights(matrices), sample(5, 256, rng)
    together, _, _ = product(weights, 0, len(matrices), x)
    column = 0
    for name, raw in matrices:
        alone, _, _ = product(pack_weights([(name, raw)]), 0, 1, x)
        assert np.array_equal(together[:, column : column + len(raw)], alone[:, : len(raw)])
        column += len(raw)


@pytest.mark.parametrize("type_name", KINDS)
def test_a_row_has_the_same_bits_in_every_batch(type_name):
    rng = np.random.default_rng(8)
    weights = pack_weights([(type_name, random_blocks(type_name, 40, 768, rng))])
    x = sample(256, 768, rng)
    for in_bytes in (False, True):
        whole, _, _ = product(weights, 0, 1, x, in_bytes)
        for batch in range(1, 18):
            start = int(rng.integers(0, 256 - batch))
            part, _, _ = product(weights, 0, 1, x[start : start + batch], in_bytes)
            assert np.array_equal(part, whole[start : start + batch])


@pytest.mark.parametrize("type_name", QUANTISED_KINDS)
def test_subnormal_and_zero_scales(type_name):
    rng = np.random.default_rng(9)
    for scale in (0.0, 2.0**-24, 2.0**-18, 100.0):
        raw = random_blocks(type_name, 20, 256, rng, scale)
        check(type_name, raw, sample(3, 256, rng))


@pytest.mark.parametrize("type_name", KINDS)
@pytest.mark.parametrize("magnitude", [0.0, 1e-20, 1e20])
def test_activations_of_extreme_size(type_name, magnitude):
    rng = np.random.default_rng(10)
    x = sample(3, 256, rng) * np.float32(magnitude)
    x[0, :64] = 0.0
    check(type_name, random_blocks(type_name, 20, 256, rng), x)


@pytest.mark.parametrize("type_name", QUANTISED_KINDS)
def test_activations_too_small_to_quantise_count_as_zero(type_name):
    """Below 1e-30 the reciprocal of the step could overflow: such cells are dropped, an error under 1e-30 sum |w|."""
    rng = np.random.default_rng(11)
    raw = random_blocks(type_name, 20, 256, rng)
    for size in (1e-30, 1e-38, 1e-45):
        out, _, _ = product(pack_weights([(type_name, raw)]), 0, 1, np.full((2, 256), size, np.float32))
        assert not out.any()


@pytest.mark.parametrize("type_name", KINDS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_shows_in_its_own_row_only(type_name, value):
    rng = np.random.default_rng(12)
    weights = pack_weights([(type_name, random_blocks(type_name, 32, 256, rng))])
    x = sample(14, 256, rng)
    clean, _, _ = product(weights, 0, 1, x)
    x[3, 77] = value
    with np.errstate(invalid="ignore"):
        out, _, _ = product(weights, 0, 1, x)
    assert not np.isfinite(out[3]).any()
    others = np.arange(14) != 3
    assert np.array_equal(out[others], clean[others])


def test_largest_sums_of_integers_do_not_overflow():
    """Every weight and every activation at its extreme, where a 16-bit sum would saturate."""
    for type_name, size, at in (("Q8_0", 34, 2), ("Q4_0", 18, 2), ("Q4_1", 20, 4)):
        for filling in (0x00, 0x7F, 0x80, 0xF0, 0xFF):
            raw = np.full((16, 8, size), filling, np.uint8)
            raw[..., :at] = np.full(at // 2, 0.5, np.float16).view(np.uint8)
            for sign in (1, -1):
                check(type_name, raw.reshape(16, -1), np.full((2, 256), sign * 127.0, np.float32))
