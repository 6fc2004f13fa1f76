"""The weights of a drafting twin: the target's, rounded where they have more bits than a draft is worth.

The head covers all tokens. One of the first 32,768 alone (of 49,152, in order of merges) saves a tenth of a step on the
default model and accepts 1 to 3 points less, which is no gain; 16,384 and 8,192 lose 4 to 6 and 8 to 20 points.
"""

import numpy as np
from numpy.typing import NDArray

from prolepsis.kernels.cells import quantised_codes
from prolepsis.kernels.forward import QKV, Plan
from prolepsis.kernels.qmatmul import NATURAL, NEXT, ORDER, kinds_of
from prolepsis.quant.matrices import PackedRounded, kept, packed

COARSE = "Q4_1"
"""What most weights are rounded to. Q4_0 takes a tenth less memory and accepts 1 to 2 points less."""

FINE = "Q8_0"
"""What embedding, head and the projections to K and V are rounded to: 4 bits there cost more than they save."""


def twin_plan(target: Plan) -> Plan:
    """The twin of `target`: coarser weights and 8-bit activations.

    Weights of 4 bits, and fine ones of at most 8, are taken as they are; where all are, so is the memory they lie in.
    """
    table = target.weights.matrices
    types = _types(target)
    groups = target.groups.copy()
    for group in groups:
        _settle_order(group, table, types, _fine(target))
    if not any(types):
        return target._replace(fast=True)
    made = [
        PackedRounded(target.weights, matrix, name).placed() if name else kept(target.weights, matrix)
        for matrix, name in enumerate(types)
    ]
    return target._replace(weights=packed(made), groups=groups, fast=True)


def _fine(target: Plan) -> set[int]:
    """Embedding, head and the projections to K and V."""
    fine = {target.embedding, int(target.groups[-1, 0])}
    for first in target.groups[QKV:-1:4, 0].tolist():
        fine |= {first + 1, first + 2}
    return fine


def _types(target: Plan) -> list[str]:
    """What each matrix is to be rounded to; "" where it is taken as it is."""
    weights, fine, types = target.weights, _fine(target), []
    for matrix in range(len(weights.matrices) - np.count_nonzero(weights.matrices[:, NEXT])):
        keeps = quantised_codes(8 if matrix in fine else 4)
        known = np.isin(kinds_of(weights, matrix, 1), keeps).all()
        types.append("" if known else FINE if matrix in fine else COARSE)
    return types


def _settle_order(group: NDArray[np.int64], table: NDArray[np.int64], types: list[str], fine: set[int]) -> None:
    """A product has one order of activations. What is rounded has the natural one, so others must be rounded too."""
    first, count, _ = group.tolist()
    members = range(first, first + count)
    if not any(types[matrix] for matrix in members):
        return
    group[2] = NATURAL
    for matrix in members:
        if table[matrix, ORDER] != NATURAL and not types[matrix]:
            types[matrix] = FINE if matrix in fine else COARSE
