"""GPTQ and rounding to nearest, against what defines them."""

import numpy as np
import pytest
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.kernels.kinds import KINDS
from prolepsis.quant.exl2_grid import ProductGrid, scale_factors
from prolepsis.quant.exl2_layout import Exl2Matrix, pack_exl2
from prolepsis.quant.gptq import factorised, gptq
from prolepsis.quant.grid import BlockGrid, Grid, IntegerGrid, nearest
from prolepsis.quant.input_statistics import InputStatistics, output_error
from prolepsis.quant.matrix import Codes, whole
from prolepsis.quant.rtn import Span, rtn

COLUMNS = 160
GRIDS: list[Grid] = [
    IntegerGrid(4, 64),
    IntegerGrid(3, 0, symmetric=False),
    IntegerGrid(2, 32, symmetric=False, search=True),
    IntegerGrid(8, 96, search=True),
    BlockGrid("Q4_0", search=True),
    BlockGrid("Q4_1"),
    BlockGrid("Q8_0"),
    ProductGrid(4, 64),
]


def weights(rows: int = 48, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 0.05, (rows, COLUMNS)).astype(np.float32)


def correlated(tokens: int = 400, seed: int = 1) -> InputStatistics:
    """Inputs of which 40 hidden causes say most, in columns of different sizes."""
    rng = np.random.default_rng(seed)
    causes = rng.normal(size=(tokens, 40)) @ rng.normal(size=(40, COLUMNS))
    inputs = (causes + 0.3 * rng.normal(size=causes.shape)) * rng.lognormal(0, 1, COLUMNS)
    out = InputStatistics(COLUMNS)
    for part in np.array_split(inputs.astype(np.float32), 3):
        out.add(part)
    return out


def textbook(weight: NDArray[np.float32], hessian: NDArray[np.float64], grid: Grid) -> NDArray[np.float32]:
    """Optimal brain surgery, column by column, with the inverse of what is left of the Hessian."""
    left, out = weight.astype(np.float64), np.empty_like(weight)
    damped = hessian + np.eye(COLUMNS) * 0.01 * np.diagonal(hessian).mean()
    for column in range(COLUMNS):
        if column % grid.group == 0:
            steps = grid.fit(left[:, column : column + grid.group].T.astype(np.float32))
        _, out[:, column] = nearest(grid.kind, steps, left[:, column].astype(np.float32))
        inverse = np.linalg.inv(damped[column:, column:])
        left[:, column:] -= np.outer((left[:, column] - out[:, column]) / inverse[0, 0], inverse[0])
    return out


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("act_order", [False, True])
def test_less_error_than_rounding(grid: Grid, act_order: bool) -> None:
    weight, known = weights(), correlated()
    made = gptq(weight, factorised(known.hessian, act_order, 0.01, "x"), [Span(COLUMNS, grid)])
    plain = output_error(weight, whole(rtn(weight, grid)), known.hessian)
    assert output_error(weight, whole(made), known.hessian) < 0.7 * plain
    if act_order:
        assert sorted(made.order) == list(range(COLUMNS))
    (part,) = made.parts
    assert isinstance(part, Codes)
    assert part.codes.max() < 2 ** KINDS[grid.kind].bits
    assert np.isfinite(whole(made)).all()


def test_equals_textbook() -> None:
    weight, hessian, grid = weights(8), correlated().hessian, IntegerGrid(4, 32)
    made = whole(gptq(weight, factorised(hessian, False, 0.01, "x"), [Span(COLUMNS, grid)]))
    expected = textbook(weight, hessian, grid)
    # A weight halfway between two codes may fall to either side, and changes those after it.
    assert (np.abs(made - expected) > 1e-6).mean() < 0.02
    assert output_error(weight, made, hessian) == pytest.approx(output_error(weight, expected, hessian), rel=0.02)


def test_independent_inputs_are_rounding() -> None:
    weight, grid = weights(), IntegerGrid(4, 32)
    made = gptq(weight, factorised(np.eye(COLUMNS), False, 0.01, "x"), [Span(COLUMNS, grid)])
    np.testing.assert_array_equal(whole(made), whole(rtn(weight, grid)))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_rounding_is_within_half_a_step(grid: Grid) -> None:
    weight = weights()
    made = rtn(weight, grid)
    (part,) = made.parts
    assert isinstance(part, Codes)
    step = np.abs(np.ldexp(part.scales.astype(np.float32), made.forms[0].exponent))
    step = np.repeat(step, made.forms[0].group or 32, axis=1)[:, :COLUMNS]
    inside = (part.codes > 0) & (part.codes < 2 ** KINDS[grid.kind].bits - 1)
    assert inside.mean() > 0.3
    assert (np.abs(whole(made) - weight)[inside] <= 0.501 * step[inside]).all()


def test_search_loses_less() -> None:
    weight = weights()
    lost = [np.square(whole(rtn(weight, IntegerGrid(3, 32, True, search))) - weight).sum() for search in (False, True)]
    assert lost[1] < lost[0]


def test_dead_and_dependent_columns() -> None:
    known = correlated(tokens=20)
    for array in (known.products, known.products.T):
        array[5] = 0
    made = whole(gptq(weights(), factorised(known.hessian, True, 0.0, "x"), [Span(COLUMNS, IntegerGrid(4, 32))]))
    assert np.isfinite(made).all()
    with pytest.raises(InputError, match=r"blk\.3"):
        factorised(np.full((COLUMNS, COLUMNS), np.nan), False, 0.01, "blk.3.attn_q.weight")


def test_hostile_weights() -> None:
    weight = weights()
    weight[:4] = 0
    weight[4:6] *= 1e-9
    weight[6, ::2] = 3e5
    for grid in GRIDS:
        assert np.isfinite(whole(rtn(weight, grid))).all()
    weight[0, 0] = np.inf
    with pytest.raises(InputError, match="not finite"):
        rtn(weight, GRIDS[0])


def test_two_widths_go_through_an_exl2_file() -> None:
    weight, known = weights(), correlated()
    spans = [Span(32, ProductGrid(5, 64)), Span(128, ProductGrid(4, 64))]
    made = gptq(weight, factorised(known.hessian, True, 0.01, "x"), spans)
    parts = [part for part in made.parts if isinstance(part, Codes)]
    factors = [scale_factors(part.scales) for part in parts]
    assert made.order is not None
    tensors = pack_exl2(
        np.concatenate([part.codes for part in parts], axis=1),
        [(5, 32), (4, 64), (4, 64)],
        np.concatenate([codes for codes, _ in factors], axis=1),
        np.concatenate([most for _, most in factors]),
        made.order,
    )
    np.testing.assert_array_equal(whole(Exl2Matrix("x", tensors, COLUMNS)), whole(made))
