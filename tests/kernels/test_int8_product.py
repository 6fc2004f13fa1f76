"""Integer products: exact for every shape, on whatever instructions there are."""

import numpy as np
import pytest
from numba import njit

from prolepsis.kernels.int8_product import LANES, pack, tile_int8_product


@njit
def product(weights, columns, x, sums, tiles, out):
    for tile in range(tiles):
        tile_int8_product(weights, tile * columns * LANES, columns, x, x.shape[1], sums, len(x), out[tile])


@pytest.mark.parametrize("rows", [1, 3, 8, 13, 256])
@pytest.mark.parametrize(("outputs", "columns"), [(16, 16), (48, 0), (32, 400)])
def test_products_are_exact(rows, outputs, columns):
    random = np.random.default_rng(rows * outputs + columns)
    weights = random.integers(-127, 128, (outputs, columns)).astype(np.int8)
    wide = random.integers(-128, 128, (rows, columns + 32)).astype(np.int8)
    sums = wide[:, :columns].sum(axis=1, dtype=np.int32)
    out = np.full((outputs // LANES, rows, LANES), 7, np.int32)
    product(pack(weights), columns, wide, sums, outputs // LANES, out)
    exact = wide[:, :columns].astype(np.int64) @ weights.T.astype(np.int64)
    assert np.array_equal(out.transpose(1, 0, 2).reshape(rows, outputs), exact)


def test_the_largest_sums_fit():
    """4096 columns of the largest magnitudes, as `linear` may meet them in the widest layer."""
    x, weights = np.full((1, 4096), -128, np.int8), np.full((16, 4096), 127, np.int8)
    out = np.zeros((1, 1, LANES), np.int32)
    product(pack(weights), 4096, x, x.sum(axis=1, dtype=np.int32), 1, out)
    assert (out == -128 * 127 * 4096).all()
