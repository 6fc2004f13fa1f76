"""Passes over one row of logits, for the sampler: largest logits, penalties, exponentials, drawing.

Every result is the same bits on every machine: IEEE additions and multiplications in a fixed order, no contraction to
FMA, no fast-math, no library call. A row is cut into blocks of `BLOCK` tokens. Vocabulary sizes are below 2^31.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from prolepsis.kernels.exponential import COEFFICIENTS, F64, RUN, exp_run
from prolepsis.kernels.llvm import F32, I32, I64, data, load, maximum, scaled

BLOCK = RUN
"""Tokens of a block: `draw` makes a partial sum of each."""


@intrinsic
def _largest_of_block(typing, logits, at):
    """Largest of 64 float32 from `at` on; NaN where one is."""

    def emit(context, b, signature, arguments):
        floats = ir.VectorType(F32, BLOCK)
        whole = load(b, floats, data(context, b, signature.args[0], arguments[0]), scaled(b, arguments[1], 4))
        broken = b.bitcast(b.fcmp_unordered("uno", whole, whole), I64)
        half, largest = BLOCK // 2, whole
        while half:
            low, high = (
                ir.Constant(ir.VectorType(I32, half), list(range(first, first + half))) for first in (0, half)
            )
            largest = maximum(b, b.shuffle_vector(largest, largest, low), b.shuffle_vector(largest, largest, high))
            half //= 2
        largest = b.extract_element(largest, I32(0))
        return b.select(b.icmp_unsigned("==", broken, I64(0)), largest, F32(float("nan")))

    return types.float32(logits, types.int64), emit


@intrinsic
def _sum_of_block(typing, weights, at):
    """What `_sum_range` gives for 64 float64 from `at` on."""

    def emit(context, b, signature, arguments):
        source = data(context, b, signature.args[0], arguments[0])
        four = ir.VectorType(F64, 4)
        total = ir.Constant(four, [0.0] * 4)
        for i in range(0, BLOCK, 4):
            total = b.fadd(total, load(b, four, source, scaled(b, b.add(arguments[1], I64(i)), 8)))
        first, second, third, fourth = (b.extract_element(total, I32(lane)) for lane in range(4))
        return b.fadd(b.fadd(first, second), b.fadd(third, fourth))

    return types.float64(weights, types.int64), emit


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
        padded[:count] = logits[start:]
        exp_run(padded, 0, largest, inverse_temperature, COEFFICIENTS, COEFFICIENTS.shape[0], results, 0)
        weights[to : to + count] = results[:count]
    return count


@njit(inline="always")
def _exp_blocks(logits, largest, inverse_temperature, weights, stride):
    """Sum of the exponentials, each block's written `stride` after that of the block before."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    for block in range((logits.shape[0] + BLOCK - 1) // BLOCK):
        to = block * stride
        count = exp_block(logits, block, largest, inverse_temperature, weights, to)
        whole = to + count // 4 * 4
        for i in range(to, whole, 4):
            a += weights[i]
            b += weights[i + 1]
            c += weights[i + 2]
            d += weights[i + 3]
        for i in range(whole, to + count):
            a += weights[i]
    return (a + b) + (c + d)


@njit(cache=True, nogil=True)
def exp_weights(logits, largest, inverse_temperature, weights):
    """weights[i] = exp((logits[i] - largest) * inverse_temperature), so that the largest is exactly 1; returns their sum.

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
def _sum_range(weights, start, stop):
    """Sum of weights[start:stop] in four interleaved partial sums, so that the additions overlap in the pipeline."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = start + (stop - start) // 4 * 4
    for i in range(start, whole, 4):
        a += weights[i]
        b += weights[i + 1]
        c += weights[i + 2]
        d += weights[i + 3]
    for i in range(whole, stop):
        a += weights[i]
    return (a + b) + (c + d)


@njit(inline="always")
def _locate(values, start, stop, running, target):
    """The first i in start .. stop - 1 at which `running` plus the values so far exceeds target, and the sum before i.

    Where rounding lets none exceed it, the last positive value stands in, so a value of 0 is never chosen.
    """
    chosen, before = start, running
    for i in range(start, stop):
        if values[i] > 0.0:
            chosen, before = i, running
            running += values[i]
            if running > target:
                break
    return chosen, before


@njit(cache=True, nogil=True)
def draw(weights, uniform):
    """Inverse-transform sampling: the first index at which the running sum exceeds uniform * (sum of all).

    weights float64 [vocab], not negative, at least one positive; uniform in [0, 1). Never an index of weight 0.
    """
    size = weights.shape[0]
    sums = np.empty((size + BLOCK - 1) // BLOCK)
    for block in range(size // BLOCK):
        sums[block] = _sum_of_block(weights, block * BLOCK)
    if size % BLOCK:
        sums[size // BLOCK] = _sum_range(weights, size // BLOCK * BLOCK, size)
    target = uniform * _sum_range(sums, 0, sums.shape[0])
    block, before = _locate(sums, 0, sums.shape[0], 0.0, target)
    token, _ = _locate(weights, block * BLOCK, min((block + 1) * BLOCK, size), before, target)
    return token


@njit(inline="always")
def _part(index, size):
    """Which of the four partial sums of `_sum_range` over `size` values takes the index-th."""
    return index & 3 if index < size // 4 * 4 else 0


@njit(cache=True, nogil=True)
def normalise_few(tokens, weights, vocab):
    """Scale weights, in place, by the inverse of what would be the sum of a whole row with zeros elsewhere.

    tokens int32 [n], ascending; weights float64 [n]; vocab: tokens in a row.
    """
    parts = np.zeros(4)
    for i in range(tokens.shape[0]):
        parts[_part(tokens[i], vocab)] += weights[i]
    factor = 1.0 / ((parts[0] + parts[1]) + (parts[2] + parts[3]))
    for i in range(tokens.shape[0]):
        weights[i] *= factor


@njit(cache=True, nogil=True)
def draw_few(tokens, weights, vocab, uniform):
    """The token that `draw` would choose from a whole row with zeros elsewhere.

    tokens int32 [n], ascending; weights float64 [n], as in `draw`; vocab: tokens in a row.
    """
    sums = np.zeros((vocab + BLOCK - 1) // BLOCK)
    first = np.zeros(sums.shape[0] + 1, np.int64)
    parts = np.empty(4)
    i = 0
    for block in range(sums.shape[0]):
        first[block] = i
        parts[:] = 0.0
        while i < tokens.shape[0] and tokens[i] < (block + 1) * BLOCK:
            parts[_part(tokens[i], vocab)] += weights[i]
            i += 1
        sums[block] = (parts[0] + parts[1]) + (parts[2] + parts[3])
    first[sums.shape[0]] = i
    target = uniform * _sum_range(sums, 0, sums.shape[0])
    block, before = _locate(sums, 0, sums.shape[0], 0.0, target)
    chosen, _ = _locate(weights, first[block], first[block + 1], before, target)
    return tokens[chosen]
