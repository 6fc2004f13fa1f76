"""Matrix products against the numbers that weights stand for, in float64, with bounds derived element by element.

Write u = 2^-24, the rounding of float32. A product row of N terms is computed as a chain of at most one fused
multiply-add a column (float kinds), or at most four a cell of 32 columns after exact integer sums (quantised kinds).

- Float kinds: |error| <= (N + 1) u sum |w x|, the classical bound of a sum in order (Higham, Accuracy and Stability of
  Numerical Algorithms, 2nd edition, 3.1).
- Quantised kinds, against the *quantised* activations a q: the integer sum becomes a float32 (one rounding), step and
  scale are multiplied (another), the chain has a link for each part of a cell and for each minimum, and minimums meet
  scale * sum(q), itself rounded twice: |error| <= (links cells + 6) u S, where S = sum (|step q_w| + |minimum|) |a q|;
  4 more u for the float32 rounding of the reference itself, and one for each form behind the first.
- Quantised kinds, against the activations as given: besides, |x - a q| <= a / 2 in each cell of scale a, up to the
  rounding of 32639 / max and of the product with it (32639 * 3u of a step): |error| <= that + sum over cells of
  a (1/2 + 98,000 u) sum |w|. Activations of 8 bits have the same bounds: their scale a is larger.
"""

import numpy as np
import pytest
from weight_cases import activations, joined, magnitudes, multiplied, random_forms, random_matrix, side_by_side

from prolepsis.kernels.cells import CELL, PLANES, is_float, parts_of
from prolepsis.kernels.kinds import KINDS
from prolepsis.kernels.qmatmul import NATURAL, ORDER
from prolepsis.quant.matrix import Codes, Form, HeldMatrix, whole

U = 2.0**-24
QUANTISED_KINDS = tuple(name for name, kind in KINDS.items() if not is_float(kind))
BATCHES = (*range(1, 10), 13, 17)


def product(weights, first, count, x, in_bytes=False):
    """x @ matrix^T for `count` matrices side by side, and the quantised activations: scales, and scale * q."""
    rows, columns = x.shape
    held, order = activations(x), int(weights.matrices[first : first + count, ORDER].max())
    out = multiplied(weights, first, count, held, rows, in_bytes, order)
    scales = held.records.view(np.float32).reshape(rows, columns // CELL, -1)[..., 0].astype(np.float64)
    quants = held.quants.reshape(rows, columns // CELL, PLANES, CELL)[:, :, 0] if in_bytes else joined(held.quants)
    quants = quants.reshape(rows, columns // CELL, CELL).astype(np.float64)
    rounded = (quants * scales[..., None]).reshape(rows, columns)
    if order != NATURAL:
        rounded[:, weights.orders[order : order + columns]] = rounded.copy()
    return out, scales, rounded


def sample(rows, columns, rng):
    """Activations with outliers, as real ones have."""
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    x[:, rng.integers(0, columns, 3)] *= 40
    return x


def links(matrix):
    """Roundings of a row's chain, and what comes before and behind it."""
    kinds = [KINDS[form.kind] for form in matrix.forms]
    a_cell = max(max(1, parts_of(kind)) * (1 + kind.minimums) for kind in kinds)
    return a_cell * matrix.shape[1] // CELL + 10 + len(kinds)


def check(matrix, x, in_bytes=False):
    """Assert every bound of the module docstring; returns the largest share of each bound that was used up."""
    weights, size, rows = whole(matrix).astype(np.float64), magnitudes(matrix), matrix.shape[0]
    out, scales, rounded = product(side_by_side([matrix]), 0, 1, x, in_bytes)
    exact, given = out[:, :rows].astype(np.float64), x.astype(np.float64)
    assert not out[:, rows:].any(), "rows of padding are zero"
    tiny = 1e-300
    if is_float(KINDS[matrix.forms[0].kind]):
        bound = (x.shape[1] + 1) * U * (np.abs(given) @ size.T)
        assert (np.abs(exact - given @ weights.T) / (bound + tiny)).max() <= 1
        return
    arithmetic = links(matrix) * U * (np.abs(rounded) @ size.T)
    tight = np.abs(exact - rounded @ weights.T) / (arithmetic + tiny)
    assert tight.max() <= 1, f"{tight.max():.2f} of the float32 bound"
    order = np.arange(x.shape[1]) if matrix.order is None else matrix.order
    cell_sums = np.abs(weights)[:, order].reshape(rows, -1, CELL).sum(axis=2)
    rounding = (scales * (0.5 + 98_000 * U)) @ cell_sums.T
    loose = np.abs(exact - given @ weights.T) / (arithmetic + rounding + tiny)
    assert loose.max() <= 1, f"{loose.max():.2f} of the rounding bound"


@pytest.mark.parametrize("name", KINDS)
def test_error_is_within_its_bound(name):
    rng = np.random.default_rng(len(name))
    for rows, columns, batches in ((1, 256, (1, 13)), (37, 512, BATCHES), (100, 1536, (1, 13, 64))):
        matrix = random_matrix(name, rows, columns, rng)
        for batch in batches:
            x = sample(batch, columns, rng)
            check(matrix, x)
            check(matrix, x, in_bytes=True)


@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name].group != 256])
def test_one_cell_and_odd_numbers_of_cells(name):
    rng = np.random.default_rng(5)
    for columns in (32, 96, 544):
        check(random_matrix(name, 19, columns, rng), sample(3, columns, rng))


@pytest.mark.parametrize("group", [32, 64, 128, 320, 1024])
def test_every_size_of_groups(group):
    rng = np.random.default_rng(group)
    check(random_matrix("INT4", 20, 320, rng, group), sample(3, 320, rng))


def several_forms(rng, order=None):
    forms = [Form("INT6", 64, 64, -3), Form("INT4", 160, 96, 2), Form("INT2", 32, 32)]
    return random_forms(forms, 40, rng, order=order)


@pytest.mark.parametrize("in_bytes", [False, True])
def test_several_forms_in_any_order(in_bytes):
    rng = np.random.default_rng(6)
    order = rng.permutation(256).astype(np.int32)
    for matrix in (several_forms(rng), several_forms(rng, order), random_matrix("INT4", 20, 256, rng, order=order)):
        for batch in (1, 5):
            check(matrix, sample(batch, 256, rng), in_bytes)


def test_the_bound_is_not_empty():
    """A step that is wrong by one part in 2^12 in an eighth of the blocks is outside the float32 bound."""
    rng = np.random.default_rng(6)
    matrix = random_matrix("Q8_0", 16, 256, rng)
    out, _, rounded = product(side_by_side([matrix]), 0, 1, sample(2, 256, rng))
    weights = whole(matrix).astype(np.float64)
    weights[:, :CELL] *= 1 + 2.0**-12
    bound = links(matrix) * U * (np.abs(rounded) @ np.abs(weights).T)
    assert (np.abs(out - rounded @ weights.T) > bound).any()


def test_matrices_side_by_side_equal_each_alone():
    rng = np.random.default_rng(7)
    matrices = [random_matrix(name, 16 * (1 + i % 3), 256, rng) for i, name in enumerate(KINDS)] + [several_forms(rng)]
    weights, x = side_by_side(matrices), sample(5, 256, rng)
    together, _, _ = product(weights, 0, len(matrices), x)
    column = 0
    for matrix in matrices:
        alone, _, _ = product(side_by_side([matrix]), 0, 1, x)
        assert np.array_equal(together[:, column : column + alone.shape[1]], alone)
        column += alone.shape[1]


def test_floats_beside_an_order_read_activations_as_they_are():
    rng = np.random.default_rng(8)
    ordered, floats = several_forms(rng, rng.permutation(256).astype(np.int32)), random_matrix("BF16", 16, 256, rng)
    x = sample(3, 256, rng)
    together, _, _ = product(side_by_side([ordered, floats]), 0, 2, x)
    alone, _, _ = product(side_by_side([floats]), 0, 1, x)
    assert np.array_equal(together[:, -16:], alone)


@pytest.mark.parametrize("name", KINDS)
def test_a_row_has_the_same_bits_in_every_batch(name):
    rng = np.random.default_rng(8)
    weights = side_by_side([random_matrix(name, 40, 768, rng)])
    x = sample(256, 768, rng)
    for in_bytes in (False, True):
        whole_batch, _, _ = product(weights, 0, 1, x, in_bytes)
        for batch in range(1, 18):
            start = int(rng.integers(0, 256 - batch))
            part, _, _ = product(weights, 0, 1, x[start : start + batch], in_bytes)
            assert np.array_equal(part, whole_batch[start : start + batch])


@pytest.mark.parametrize("name", QUANTISED_KINDS)
def test_subnormal_and_zero_scales(name):
    rng = np.random.default_rng(9)
    for scale in (0.0, 2.0**-24, 2.0**-18, 100.0):
        check(random_matrix(name, 20, 256, rng, scale=scale), sample(3, 256, rng))


@pytest.mark.parametrize("name", KINDS)
def test_activations_of_extreme_size(name):
    rng = np.random.default_rng(10)
    for magnitude in (0.0, 1e-20, 1e20):
        x = sample(3, 256, rng) * np.float32(magnitude)
        x[0, :64] = 0.0
        check(random_matrix(name, 20, 256, rng), x)


@pytest.mark.parametrize("name", QUANTISED_KINDS)
def test_activations_too_small_to_quantise_count_as_zero(name):
    """Below 1e-30 the reciprocal of the step could overflow: such cells are dropped, an error under 1e-30 sum |w|."""
    matrix = random_matrix(name, 20, 256, np.random.default_rng(11))
    for size in (1e-30, 1e-38, 1e-45):
        out, _, _ = product(side_by_side([matrix]), 0, 1, np.full((2, 256), size, np.float32))
        assert not out.any()


@pytest.mark.parametrize("name", KINDS)
def test_a_value_that_is_not_finite_shows_in_its_own_row_only(name):
    rng = np.random.default_rng(12)
    weights = side_by_side([random_matrix(name, 32, 256, rng)])
    x = sample(14, 256, rng)
    clean, _, _ = product(weights, 0, 1, x)
    for value in (np.inf, -np.inf, np.nan):
        x[3, 77] = value
        with np.errstate(invalid="ignore"):
            out, _, _ = product(weights, 0, 1, x)
        assert not np.isfinite(out[3]).any()
        others = np.arange(14) != 3
        assert np.array_equal(out[others], clean[others])


@pytest.mark.parametrize("name", QUANTISED_KINDS)
def test_largest_sums_of_integers_do_not_overflow(name):
    """Every weight and every activation at its extreme, where a 16-bit sum would saturate."""
    matrix = random_matrix(name, 16, 256, np.random.default_rng(13), scale=0.5)
    largest = (len(KINDS[name].book) or 1 << KINDS[name].bits) - 1
    for code in (0, largest):
        part: Codes = matrix.parts[0]
        zeros = None if part.zeros is None else np.full_like(part.zeros, largest - code)
        extreme = part._replace(codes=np.full_like(part.codes, code), zeros=zeros)
        for sign in (1, -1):
            held = HeldMatrix(matrix.shape, matrix.forms, (extreme,))
            check(held, np.full((2, 256), sign * 127.0, np.float32))
