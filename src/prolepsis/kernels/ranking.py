"""The most probable tokens of a row: top-k, top-p and min-p, without a weight for most of the others.

Weights are in 0 .. 1, relative to the largest; equal weights rank by token id, so that the lowest id wins. They are
told apart by bins, 32 to an octave: within a bin, and over the bins, sums have one fixed order. Bins end at 2^-64:
lighter tokens are not ranked.

What is left out cannot matter: a token is passed over only where its weight is certain to be below all that is asked
about. Bounds have a margin far beyond any rounding.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from prolepsis.kernels.exponential import F64
from prolepsis.kernels.llvm import I64, broadcast, call, data, load, scaled, splat, store
from prolepsis.kernels.sampling import BLOCK, exp_block, exp_weights, inverse_sum

NUM_BINS = 2047
"""Bins of weights in 2^-64 .. 1."""

_ONE = np.float64(1.0).view(np.int64)
_MARGIN = 1e-9  # Relative, of weights: a million times the error of one.
_LN_2 = 0.6931471805599453


@intrinsic
def _at_least(typing, weights, at, bound):
    """Bit i is set where weights[at + i] >= bound, for 64 i."""

    def emit(context, b, signature, arguments):
        vector = ir.VectorType(F64, BLOCK)
        source = data(context, b, signature.args[0], arguments[0])
        values = load(b, vector, source, scaled(b, arguments[1], 8))
        return b.bitcast(b.fcmp_ordered(">=", values, broadcast(b, vector, arguments[2])), I64)

    return types.uint64(weights, types.int64, types.float64), emit


@intrinsic
def _zero_below(typing, weights, at, bound):
    """Zero those of 64 weights from `at` on that are below `bound`."""

    def emit(context, b, signature, arguments):
        vector = ir.VectorType(F64, BLOCK)
        source, offset = data(context, b, signature.args[0], arguments[0]), scaled(b, arguments[1], 8)
        values = load(b, vector, source, offset)
        kept = b.fcmp_ordered(">=", values, broadcast(b, vector, arguments[2]))
        store(b, b.select(kept, values, splat(vector, 0.0)), source, offset)
        return context.get_dummy_value()

    return types.void(weights, types.int64, types.float64), emit


@intrinsic
def _lowest_bit(typing, mask):
    """Position of the lowest bit set in a uint64 that is not 0."""

    def emit(context, b, signature, arguments):
        return call(b, "llvm.cttz.i64", I64, [arguments[0], ir.Constant(ir.IntType(1), 1)])

    return types.int64(types.uint64), emit


@njit(inline="always")
def _bin(weight):
    """Distance of the float's bits from those of 1.0, in units of 1/32 octave: none is lower for a lower weight."""
    return (_ONE - np.float64(weight).view(np.int64)) >> 47


@njit(inline="always")
def _lightest(bin_):
    """The lowest weight of a bin."""
    return np.int64(_ONE - ((bin_ + 1) << 47) + 1).view(np.float64)


@njit
def _pass(largest_logits, largest, inverse_temperature, lowest, blocks):
    """Write to `blocks` all in which a weight of `lowest` or more may be, ascending; returns how many."""
    # A bin's lowest weight is at least 2^-((bin + 1) / 32), as the logarithm is concave.
    bin_ = _bin(lowest)
    exponent = -(bin_ + 1) / 32.0 * _LN_2 - _MARGIN if bin_ < NUM_BINS else -np.inf
    count = 0
    for block in range(largest_logits.shape[0]):
        blocks[count] = block
        count += (np.float64(largest_logits[block]) - largest) * inverse_temperature >= exponent
    return count


@njit
def _tally(weights, blocks, num_bins):
    """Tokens of each bin, and the sum of their weights."""
    counts, masses = np.zeros(num_bins, np.int64), np.zeros(num_bins)
    lowest = _lightest(num_bins - 1)
    for block in blocks:
        bits = _at_least(weights, block * BLOCK, lowest)
        while bits != 0:
            weight = weights[block * BLOCK + _lowest_bit(bits)]
            counts[_bin(weight)] += 1
            masses[_bin(weight)] += weight
            bits &= bits - np.uint64(1)
    return counts, masses


@njit
def _of_bin(weights, blocks, counts, bin_):
    """Tokens of one bin, ascending."""
    tokens = np.empty(counts[bin_], np.int64)
    count = 0
    lowest, high = _lightest(bin_), _lightest(bin_ - 1) if bin_ > 0 else np.inf
    for block in blocks:
        start = block * BLOCK
        bits = _at_least(weights, start, lowest)
        if bits != 0:
            bits &= ~_at_least(weights, start, high)
        while bits != 0:
            tokens[count] = start + _lowest_bit(bits)
            count += 1
            bits &= bits - np.uint64(1)
    return tokens


@njit
def _descending(weights, tokens):
    """Weights of tokens, the heaviest first (a heap sort: what is equal needs no order, and it compiles fast)."""
    values = np.empty(tokens.shape[0])
    for i in range(tokens.shape[0]):
        values[i] = weights[tokens[i]]
    start, stop = values.shape[0] // 2, values.shape[0]
    while stop > 1:
        if start > 0:
            start -= 1
        else:
            stop -= 1
            values[0], values[stop] = values[stop], values[0]
        root = start
        child = 2 * root + 1
        while child < stop:
            if child + 1 < stop and values[child + 1] < values[child]:
                child += 1
            if values[root] <= values[child]:
                break
            values[root], values[child] = values[child], values[root]
            root, child = child, 2 * child + 1
    return values


@njit
def _find(counts, rank):
    """Bin of a rank, and the rank within the bin."""
    bin_ = 0
    while rank >= counts[bin_]:
        rank -= counts[bin_]
        bin_ += 1
    return bin_, rank


@njit
def _mass(weights, blocks, counts, masses, count):
    """Sum of the `count` heaviest weights."""
    bin_, offset = _find(counts, count - 1)
    before, inside = 0.0, 0.0
    for i in range(bin_):
        before += masses[i]
    members = _descending(weights, _of_bin(weights, blocks, counts, bin_))
    for i in range(offset + 1):
        inside += members[i]
    return before + inside


@njit
def _count_reaching(weights, blocks, counts, masses, low, high):
    """How many of the heaviest weights it takes to add up to `low` or more (all, if they never do); 0 where it takes
    another number for `high`."""
    before, count = 0.0, 0
    for bin_ in range(counts.shape[0]):
        if before + masses[bin_] >= low:
            if before + masses[bin_] < high:
                return 0
            members = _descending(weights, _of_bin(weights, blocks, counts, bin_))
            inside = 0.0
            for offset in range(members.shape[0]):
                inside += members[offset]
                if before + inside >= low:
                    return count + offset + 1 if before + inside >= high else 0
            # Added in another order, the bin's sum may miss `low` by its last bit: then the whole bin is taken.
            return count + members.shape[0]
        before += masses[bin_]
        count += counts[bin_]
    return count


@njit
def _num_kept(weights, blocks, counts, masses, top_k, top_p, total):
    """How many of the heaviest top-k and then top-p keep; 0 where there are too few here to tell.

    total: sum of all weights, in whatever order; or 0, if top_p is of the top_k heaviest.
    """
    count, mass = 0, 0.0
    for bin_ in range(counts.shape[0]):
        count += counts[bin_]
        mass += masses[bin_]
    if total == 0.0 and count < top_k and counts.shape[0] < NUM_BINS:
        return 0
    count = min(count, top_k)
    if top_p >= 1.0:
        return count
    if total == 0.0:
        target = top_p * _mass(weights, blocks, counts, masses, count)
        return min(count, _count_reaching(weights, blocks, counts, masses, target, target))
    # Sums of positive numbers in any order: each addition is off by 2^-53 at most; not ranked, 2^-64 for each token.
    slack = top_k * 2.0**-50
    low, high = top_p * total * (1.0 - slack), top_p * total * (1.0 + slack)
    if mass < high * (1.0 + slack):
        return 0
    return _count_reaching(weights, blocks, counts, masses, low, high)


@njit
def _place(weights, blocks, counts, rank):
    """Weight and token of a rank."""
    bin_, offset = _find(counts, rank)
    tokens = _of_bin(weights, blocks, counts, bin_)
    ranked = _descending(weights, tokens)
    weight = ranked[offset]
    earlier = 0  # tokens of the same weight
    while earlier < offset and ranked[offset - 1 - earlier] == weight:
        earlier += 1
    i = 0
    while weights[tokens[i]] != weight or earlier > 0:
        earlier -= weights[tokens[i]] == weight
        i += 1
    return weight, tokens[i]


@njit
def _drop(weights, blocks, lowest, last):
    """Zero, in place, every weight below `lowest`, and those equal to it at an index above `last`; returns how many
    blocks have others. These are moved to the front."""
    above = np.int64(np.float64(lowest).view(np.int64) + 1).view(np.float64)
    count = 0
    for block in blocks:
        start = block * BLOCK
        bound = lowest if start <= last else above
        if _at_least(weights, start, bound) == 0:
            continue
        _zero_below(weights, start, bound)
        if start <= last < start + BLOCK:
            for i in range(last + 1, start + BLOCK):
                weights[i] = weights[i] if weights[i] > lowest else 0.0
        blocks[count] = block
        count += 1
    return count


@njit
def _first_bound(logits, largest, kth, inverse_temperature, top_k, top_p, weights):
    """The last bin that top-k or top-p is likely to reach, and the sum of all weights, which are then known, or 0.

    At least `top_k` blocks have a logit of `kth` or more, so at least as many tokens have.
    """
    vocab = logits.shape[0]
    if top_k < vocab:
        one, weight = np.full(BLOCK, -np.inf, np.float32), np.empty(BLOCK)
        one[0] = kth
        exp_block(one, 0, largest, inverse_temperature, weight, 0)
        return min(_bin(weight[0] * (1.0 - _MARGIN)), NUM_BINS - 1), 0.0
    total = exp_weights(logits, largest, inverse_temperature, weights[:vocab])
    # Lighter tokens do not add up to what is beyond top_p, however many they are.
    return min(_bin((1.0 - top_p) * total / vocab), NUM_BINS - 1), total


@njit
def _exp_some(logits, largest_logits, largest, inverse_temperature, lowest, weights, blocks):
    """The blocks, and their weights, in which one of `lowest` or more may be."""
    passing = blocks[: _pass(largest_logits, largest, inverse_temperature, lowest, blocks)]
    for block in passing:
        exp_block(logits, block, largest, inverse_temperature, weights, block * BLOCK)
    return passing


@njit
def _rank(logits, largest_logits, largest, kth, inverse_temperature, top_k, top_p, weights, blocks):
    """The blocks, with their weights, that hold all of what top-k and then top-p keep; the last weight and token."""
    last, total = _first_bound(logits, largest, kth, inverse_temperature, top_k, top_p, weights)
    if total > 0.0:
        passing = blocks[: _pass(largest_logits, largest, inverse_temperature, _lightest(last), blocks)]
    else:
        passing = _exp_some(logits, largest_logits, largest, inverse_temperature, _lightest(last), weights, blocks)
    counts, masses = _tally(weights, passing, last + 1)
    num_kept = _num_kept(weights, passing, counts, masses, top_k, top_p, total)
    if num_kept == 0:
        last = NUM_BINS - 1
        passing = _exp_some(logits, largest_logits, largest, inverse_temperature, _lightest(last), weights, blocks)
        counts, masses = _tally(weights, passing, last + 1)
        num_kept = _num_kept(weights, passing, counts, masses, top_k, top_p, 0.0)
    weight, token = _place(weights, passing, counts, num_kept - 1)
    return passing, weight, token


@njit(cache=True, nogil=True)
def most_probable(logits, largest_logits, largest, kth, inverse_temperature, top_k, top_p, min_p):
    """The distribution that top-k, then top-p, then min-p leave, as `sampling.draw` takes it: weights float64 [vocab],
    the factor that makes them probabilities, and the blocks that hold any, int32 [n]. Other blocks are not written.

    logits float32 [vocab]; largest_logits float32 [blocks] and `largest` as from `sampling.largest_logits`, finite;
    kth: the top_k-th largest of largest_logits, or the least where there are fewer; 1 <= top_k <= vocab, where vocab
    keeps all; 0 < top_p <= 1; 0 <= min_p <= 1.
    """
    vocab = logits.shape[0]
    blocks = np.empty(largest_logits.shape[0], np.int32)
    weights = np.empty(blocks.shape[0] * BLOCK)
    weights[vocab:] = 0.0
    lowest, last = max(min_p, 2.0**-1022), vocab
    if top_k == vocab and top_p >= 1.0:
        passing = _exp_some(logits, largest_logits, largest, inverse_temperature, lowest, weights, blocks)
    else:
        passing, weight, token = _rank(
            logits, largest_logits, largest, kth, inverse_temperature, top_k, top_p, weights, blocks
        )
        if weight >= lowest:
            lowest, last = weight, token
    passing = passing[: _drop(weights, passing, lowest, last)]
    weights = weights[:vocab]
    return weights, inverse_sum(weights, passing), passing
