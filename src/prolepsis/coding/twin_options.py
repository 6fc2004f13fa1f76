"""What the products of a mixed twin may be rounded to."""

from prolepsis.kernels.cells import tile_bytes
from prolepsis.kernels.llvm import LANES
from prolepsis.kernels.qmatmul import ROWS, TILE_BYTES, WIDTH, Weights, lines_of
from prolepsis.kernels.twin_pass import ATTENTION_OUT, DOWN, GATE_UP, QUERY
from prolepsis.quant.grid import IntegerGrid

PRODUCTS = (QUERY, ATTENTION_OUT, GATE_UP, DOWN)
"""Of each layer, what is chosen for: columns of a choice."""

OWN = 0
"""The option to take the target's weights as they are."""

ROUNDINGS = {
    1: IntegerGrid(2, 64, symmetric=False),
    2: IntegerGrid(2, 32, symmetric=False),
    3: IntegerGrid(3, 64, symmetric=False),
    4: IntegerGrid(3, 32, symmetric=False),
    5: IntegerGrid(4, 128, symmetric=False),
    6: IntegerGrid(4, 32, symmetric=False),
    7: IntegerGrid(5, 128, symmetric=False),
    8: IntegerGrid(5, 32, symmetric=False),
    9: IntegerGrid(6, 128, symmetric=False),
    10: IntegerGrid(8, 128, symmetric=False),
}
"""The other options by the numbers that profiles have, which mean the same for ever. A grid must not search: its sums
would depend on the machine."""


def weights_of(weights: Weights, matrices: range) -> int:
    """How many numbers these matrices have, padding included."""
    return sum(int(weights.matrices[m, ROWS] * weights.matrices[m, WIDTH]) for m in matrices)


def bits_of(weights: Weights, matrices: range, option: int) -> int:
    """What these matrices take in memory with an option, scales included."""
    if option == OWN:
        lines = [line for matrix in matrices for line in lines_of(weights, matrix)]
        return sum(8 * int(line[TILE_BYTES] * line[ROWS]) // LANES for line in lines)
    grid, table = ROUNDINGS[option], weights.matrices
    return sum(
        8 * int(table[m, ROWS]) // LANES * tile_bytes(grid.kind, int(table[m, WIDTH]), grid.group) for m in matrices
    )
