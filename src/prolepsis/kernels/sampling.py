"""Passes over one row of logits, for the sampler: largest logits, penalties, exponentials, drawing.

Every result is the same bits on every machine: IEEE additions and multiplications in a fixed order, no contraction to
FMA, no fast-math, no library call. A row is cut into blocks of `BLOCK` tokens. Vocabulary sizes are below 2^31.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from prolepsis.kernels.exponential import COEFFICIENTS, F64, RUN, exp_run
from prolepsis.kernels.llvm import F32, I32, I64, broadcast, data, load, maximum, scaled, store

BLOCK = RUN
"""Tokens of a block: `draw` makes a partial sum of each."""


@intrinsic
def _largest_of_block(typing, logits, at):
    """Largest of 64 float32 from `at` on; NaN where one is."""
    if logits.layout != "C":
        return None  # no such function: the values do not lie side by side

    def emit(context, b, signature, arguments):
        floats = ir.VectorType(F32, BLOCK)
        whole = load(b, floats, data(context, b, signature.args[0], arguments[0]), scaled(b, arguments[1], 4))
        broken = b.bitcast(b.fcmp_unordered("uno", whole, whole), I64)
        half, largest = BLOCK // 2, whole
        while half:
            low, high = (ir.Constant(ir.VectorType(I32, half), list(range(first, first + half))) for first in (0, half))
            largest = maximum(b, b.shuffle_vector(largest, largest, low), b.shuffle_vector(largest, largest, high))
            half //= 2
        largest = b.extract_element(largest, I32(0))
        return b.select(b.icmp_unsigned("==", broken, I64(0)), largest, F32(float("nan")))

    return types.float32(logits, types.int64), emit


@intrinsic
def _add_block(typing, parts, values, at, factor):
    """parts[i] += values[at + i] * factor, then values[at + i + 4] and so on to 64; float64, parts [4]."""
    if values.layout != "C":
        return None

    def emit(context, b, signature, arguments):
        sums, source = (data(context, b, signature.args[i], arguments[i]) for i in (0, 1))
        four = ir.VectorType(F64, 4)
        total, factor = load(b, four, sums, I64(0)), broadcast(b, four, arguments[3])
        for i in range(0, BLOCK, 4):
            value = load(b, four, source, scaled(b, b.add(arguments[2], I64(i)), 8))
            total = b.fadd(total, b.fmul(value, factor))
        store(b, total, sums, I64(0))
        return context.get_dummy_value()

    return types.void(parts, values, types.int64, types.float64), emit


@njit(inline="always")
def _add(parts, values, start, count, factor=1.0):
    """Add `count` values times `factor`, those of a block or the last of a row, to four sums, so as to overlap."""
    if count == BLOCK:
        _add_block(parts, values, start, factor)
    else:
        whole = count // 4 * 4
        for i in range(count):
            parts[i & 3 if i < whole else 0] += values[start + i] * factor


@njit(inline="always")
def _clear(parts):
    for i in range(4):
        parts[i] = 0.0


@njit(inline="always")
def _total(parts):
    return (parts[0] + parts[1]) + (parts[2] + parts[3])


@njit(cache=True, nogil=True)
def largest_logits(logits, largest):
    """Write the largest logit of each block; returns the largest of all, NaN where one of them is.

    logits float32 [vocab]; largest float32 [blocks], written.
    """
    size = logits.shape[0]
    most = np.float32(-np.inf)
    for block in range(largest.shape[0]):
        start = block * BLOCK
        if start + BLOCK <= size:
            value = _largest_of_block(logits, start)
        else:
            value = logits[start]
            for i in range(start + 1, size):
                value = logits[i] if logits[i] > value or logits[i] != logits[i] else value
        largest[block] = value
        most = value if value > most or value != value else most
    return most


@njit(inline="always")
def exp_block(logits, block, largest, inverse_temperature, weights, to):
    """weights[to + i] = exp((logits[i] - largest) * inverse_temperature) for the i of a block; returns how many."""
    start = block * BLOCK
    count = min(BLOCK, logits.shape[0] - start)
    if count == BLOCK:
        exp_run(logits, start, largest, inverse_temperature, COEFFICIENTS, COEFFICIENTS.shape[0], weights, to)
    else:
        padded, results = np.full(BLOCK, -np.inf, np.float32), np.empty(BLOCK)
        for i in range(count):
            padded[i] = logits[start + i]
        exp_run(padded, 0, largest, inverse_temperature, COEFFICIENTS, COEFFICIENTS.shape[0], results, 0)
        for i in range(count):
            weights[to + i] = results[i]
    return count


@njit(inline="always")
def _exp_blocks(logits, largest, inverse_temperature, weights, stride):
    """Sum of the exponentials, each block's written `stride` after that of the block before."""
    parts = np.zeros(4)
    for block in range((logits.shape[0] + BLOCK - 1) // BLOCK):
        to = block * stride
        count = exp_block(logits, block, largest, inverse_temperature, weights, to)
        _add(parts, weights, to, count)
    return _total(parts)


@njit(cache=True, nogil=True)
def exp_weights(logits, largest, inverse_temperature, weights):
    """weights[i] = exp((logits[i] - largest) * inverse_temperature), the largest being exactly 1; returns their sum.

    logits float32 [vocab], finite or -inf; weights float64 [vocab], written.
    """
    return _exp_blocks(logits, largest, inverse_temperature, weights, BLOCK)


@njit(cache=True, nogil=True)
def exp_sum(logits, largest, inverse_temperature):
    """The sum that `exp_weights` returns, of weights that are not kept."""
    return _exp_blocks(logits, largest, inverse_temperature, np.empty(BLOCK), 0)


@njit(cache=True, nogil=True)
def penalise(logits, tokens, output_counts, repetition, presence, frequency):
    """Repetition penalty on tokens seen (CTRL, Keskar et al. 2019, section 4.1), then presence and frequency; in place.

    logits float32 [vocab]; tokens int32 [n], those seen; output_counts int32 [n]; the others float32.
    """
    for i in range(tokens.shape[0]):
        value = logits[tokens[i]]
        value = value / repetition if value > 0 else value * repetition
        count = output_counts[i]
        value -= np.float32(count) * frequency
        logits[tokens[i]] = value - presence if count > 0 else value


@njit(inline="always")
def _locate(values, running, target):
    """The first i at which `running` plus the values so far exceeds target, and the sum before i.

    Where rounding lets none exceed it, the last positive value stands in, so a value of 0 is never chosen.
    """
    chosen, before = 0, running
    for i in range(values.shape[0]):
        if values[i] > 0.0:
            chosen, before = i, running
            running += values[i]
            if running > target:
                break
    return chosen, before


@njit(inline="always")
def inverse_sum(weights, blocks):
    """1 / (sum of all weights), added in the order of `exp_weights`. Arguments as in `draw`."""
    parts = np.zeros(4)
    for block in blocks:
        _add(parts, weights, block * BLOCK, min(BLOCK, weights.shape[0] - block * BLOCK))
    return 1.0 / _total(parts)


@njit(cache=True, nogil=True)
def draw(weights, factor, blocks, uniform):
    """Inverse-transform sampling: the first index at which the running sum of weights * factor exceeds
    uniform * (sum of all). Never an index of weight 0.

    weights float64 [vocab], not negative, at least one positive; blocks int32 [n], ascending: those in which any is
    positive, the others are not read; uniform in [0, 1).
    """
    size = weights.shape[0]
    sums = np.zeros((size + BLOCK - 1) // BLOCK)
    parts = np.empty(4)
    for block in blocks:
        _clear(parts)
        _add(parts, weights, block * BLOCK, min(BLOCK, size - block * BLOCK), factor)
        sums[block] = _total(parts)
    _clear(parts)
    for start in range(0, sums.shape[0], BLOCK):
        _add(parts, sums, start, min(BLOCK, sums.shape[0] - start))
    target = uniform * _total(parts)
    block, before = _locate(sums, 0.0, target)
    inside = np.empty(min(BLOCK, size - block * BLOCK))
    for i in range(inside.shape[0]):
        inside[i] = weights[block * BLOCK + i] * factor
    token, _ = _locate(inside, before, target)
    return block * BLOCK + token
