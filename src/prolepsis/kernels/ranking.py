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

from prolepsis.kernels.exponential import F64, exp_run
from prolepsis.kernels.llvm import I64, broadcast, call, data, load, scaled
from prolepsis.kernels.sampling import BLOCK, exp_block, exp_weights, normalise_few

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


@njit(inline="always")
def _gather(logits, largest_logits, largest, inverse_temperature, lowest, known, weights, tokens):
    """Write to `tokens` all whose weight is `lowest` or more, ascending; returns how many.

    known: `weights` are there already; otherwise they are written, of the blocks that matter.
    """
    size = logits.shape[0]
    # A bin's lowest weight is at least 2^-((bin + 1) / 32), as the logarithm is concave.
    bin_ = _bin(lowest)
    exponent = -(bin_ + 1) / 32.0 * _LN_2 - _MARGIN if bin_ < NUM_BINS else -np.inf
    count = 0
    for block in range(largest_logits.shape[0]):
        if (np.float64(largest_logits[block]) - largest) * inverse_temperature < exponent:
            continue
        start = block * BLOCK
        if not known:
            exp_block(logits, block, largest, inverse_temperature, weights, start)
        if start + BLOCK <= size:
            mask = _at_least(weights, start, lowest)
        else:
            mask = np.uint64(0)
            for i in range(size - start):
                mask |= np.uint64(weights[start + i] >= lowest) << np.uint64(i)
        while mask != np.uint64(0):
            tokens[count] = start + _lowest_bit(mask)
            count += 1
            mask &= mask - np.uint64(1)
    return count


@njit(inline="always")
def _of_bin(weights, bin_):
    """Weights of one bin, the heaviest first."""
    members = np.empty(weights.shape[0])
    count = 0
    for weight in weights:
        if _bin(weight) == bin_:
            members[count] = -weight
            count += 1
    return -np.sort(members[:count])


@njit
def _find(counts, rank):
    """Bin of a rank, and the rank within the bin."""
    bin_ = 0
    while rank >= counts[bin_]:
        rank -= counts[bin_]
        bin_ += 1
    return bin_, rank


@njit
def _mass(weights, counts, masses, count):
    """Sum of the `count` heaviest weights."""
    bin_, offset = _find(counts, count - 1)
    before, inside = 0.0, 0.0
    for mass in masses[:bin_]:
        before += mass
    for weight in _of_bin(weights, bin_)[: offset + 1]:
        inside += weight
    return before + inside


@njit
def _count_reaching(weights, counts, masses, mass):
    """How many of the heaviest weights it takes to add up to `mass` or more (all, if they never do)."""
    before, count = 0.0, 0
    for bin_ in range(counts.shape[0]):
        if before + masses[bin_] >= mass:
            members = _of_bin(weights, bin_)
            inside = 0.0
            for offset in range(members.shape[0]):
                inside += members[offset]
                if before + inside >= mass:
                    return count + offset + 1
            # Added in another order, the bin's sum may miss `mass` by its last bit: then the whole bin is taken.
            return count + members.shape[0]
        before += masses[bin_]
        count += counts[bin_]
    return count


@njit
def _tally(weights, num_bins):
    """Tokens of each bin, and the sum of their weights."""
    counts, masses = np.zeros(num_bins, np.int64), np.zeros(num_bins)
    for weight in weights:
        bin_ = _bin(weight)
        counts[bin_] += 1
        masses[bin_] += weight
    return counts, masses


@njit
def _keep_heaviest(tokens, weights, counts, count):
    """Move the `count` heaviest to the front, in the order they have."""
    bin_, offset = _find(counts, count - 1)
    members = _of_bin(weights, bin_)
    lowest = members[offset]
    ties = 0  # of the lowest weight, to be kept
    for weight in members[: offset + 1]:
        ties += weight == lowest
    kept = 0
    for i in range(tokens.shape[0]):
        if weights[i] > lowest or (weights[i] == lowest and ties > 0):
            ties -= weights[i] == lowest
            tokens[kept], weights[kept] = tokens[i], weights[i]
            kept += 1


@njit
def _num_kept(weights, counts, masses, top_k, top_p, total):
    """How many of the heaviest top-k and then top-p keep; 0 where `total`, the sum of more weights than there are
    here, is too coarse to tell.

    total: sum of all weights up to `vocab` roundings, or 0: the sum of the top_k heaviest.
    """
    count = min(top_k, weights.shape[0])
    if top_p >= 1.0:
        return count
    if total == 0.0:
        return min(count, _count_reaching(weights, counts, masses, top_p * _mass(weights, counts, masses, count)))
    # Sums of positive numbers in any order: each addition is off by 2^-53 at most; not ranked, 2^-64 for each token.
    slack = top_k * 2.0**-50
    if masses.sum() * (1.0 - slack) < top_p * total * (1.0 + slack):
        return 0
    fewest = _count_reaching(weights, counts, masses, top_p * total * (1.0 - slack))
    most = _count_reaching(weights, counts, masses, top_p * total * (1.0 + slack))
    return fewest if fewest == most else 0


@njit
def _kth_largest(values, k):
    return -np.partition(-values, k - 1)[k - 1]


@njit
def _first_bound(logits, largest_logits, largest, inverse_temperature, top_k, top_p, weights):
    """The last bin that top-k or top-p can reach, and the sum of all weights, which are then known, or 0."""
    vocab = logits.shape[0]
    if top_k <= largest_logits.shape[0]:
        # So many blocks, hence so many tokens, have a logit of this or more.
        one = np.full(BLOCK, -np.inf, np.float32)
        one[0] = _kth_largest(largest_logits, top_k)
        weight = np.empty(BLOCK)
        exp_block(one, 0, largest, inverse_temperature, weight, 0)
        return min(_bin(weight[0] * (1.0 - _MARGIN)), NUM_BINS - 1), 0.0
    if top_k < vocab:
        return NUM_BINS - 1, 0.0
    total = exp_weights(logits, largest, inverse_temperature, weights)
    # Lighter tokens do not add up to what is beyond top_p, however many they are.
    return min(_bin((1.0 - top_p) * total / vocab), NUM_BINS - 1), total


@njit(cache=True, nogil=True)
def most_probable(logits, largest_logits, largest, inverse_temperature, top_k, top_p, min_p):
    """Tokens that top-k, then top-p, then min-p keep: int32 [n], ascending, and their probabilities, float64 [n].

    logits float32 [vocab]; largest_logits float32 [blocks] and `largest` as from `sampling.largest_logits`, finite;
    1 <= top_k <= vocab; 0 < top_p <= 1; 0 <= min_p <= 1. With the last of all three, all tokens of positive weight.
    """
    vocab = logits.shape[0]
    weights, tokens = np.empty(vocab), np.empty(vocab, np.int32)
    if top_k == vocab and top_p >= 1.0:
        lowest = max(min_p, 2.0**-1022)
        count = _gather(logits, largest_logits, largest, inverse_temperature, lowest, False, weights, tokens)
        kept, kept_weights = tokens[:count], weights[tokens[:count]]
    else:
        last, total = _first_bound(logits, largest_logits, largest, inverse_temperature, top_k, top_p, weights)
        known = total > 0.0
        while True:
            lowest = _lightest(last)
            count = _gather(logits, largest_logits, largest, inverse_temperature, lowest, known, weights, tokens)
            kept, kept_weights = tokens[:count], weights[tokens[:count]]
            counts, masses = _tally(kept_weights, last + 1)
            num_kept = _num_kept(kept_weights, counts, masses, top_k, top_p, total)
            if num_kept > 0:
                break
            last, total = NUM_BINS - 1, 0.0
        _keep_heaviest(kept, kept_weights, counts, num_kept)
        kept, kept_weights = kept[:num_kept], kept_weights[:num_kept]
        if min_p > 0.0:
            enough = kept_weights >= min_p
            kept, kept_weights = kept[enough], kept_weights[enough]
    normalise_few(kept, kept_weights, vocab)
    return kept, kept_weights
