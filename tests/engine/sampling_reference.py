"""What sampling is by definition, to the last bit: NumPy, every weight computed, everything sorted.

Element by element NumPy's arithmetic is IEEE's, and a loop over Python floats adds in the order it is written in.
"""

import math
from itertools import pairwise

import numpy as np

from prolepsis.engine import rng

FIRST_UNRANKED = 2047  # of the bins, 32 to an octave: weights of 2^-64 and less


def exp(x: np.ndarray) -> np.ndarray:
    n = (x.clip(-708.0) * 1.4426950408889634 + 6755399441055744.0) - 6755399441055744.0
    r = (x.clip(-708.0) - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
    p = np.full(len(x), 1.0 / math.factorial(13))
    for degree in range(12, 1, -1):
        p = p * r + 1.0 / math.factorial(degree)
    return np.where(x >= -708.0, ((p * r) * r + r + 1.0) * np.exp2(n), 0.0)


def in_order(values) -> float:
    total = 0.0
    for value in values:
        total += float(value)
    return total


def in_four(values: np.ndarray) -> float:
    """Four interleaved sums; what no four are left of goes to the first."""
    whole = len(values) // 4 * 4
    a, b, c, d = (in_order(values[i:whole:4]) for i in range(4))
    for value in values[whole:]:
        a += float(value)
    return (a + b) + (c + d)


def penalised(logits: np.ndarray, params, prompt: list[int], output: list[int]) -> np.ndarray:
    values = logits.copy()
    for token, bias in params.logit_bias.items():
        values[token] += np.float32(bias)
    repetition, presence, frequency = (
        np.float32(x) for x in (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    )
    for token in {*prompt, *output}:
        values[token] = values[token] / repetition if values[token] > 0 else values[token] * repetition
        if token in output:
            values[token] = values[token] - np.float32(output.count(token)) * frequency - presence
    return values


def kept(weights: np.ndarray, params) -> np.ndarray:
    """Weights with 0 for what top-k, top-p and min-p rule out."""
    top_k = params.top_k if 0 < params.top_k < len(weights) else len(weights)
    order = np.argsort(-weights, kind="stable")
    if top_k < len(weights) or params.top_p < 1.0:
        bins = np.minimum((np.float64(1.0).view(np.int64) - weights.view(np.int64)) >> 47, FIRST_UNRANKED)
        order = order[bins[order] < FIRST_UNRANKED]
        count = min(top_k, len(order))
        if params.top_p < 1.0:
            count = min(count, reaching(weights, bins, order, count, params.top_p))
        order = order[:count]
    result = np.zeros(len(weights))
    result[order] = weights[order]
    return np.where(result >= params.min_p, result, 0.0)


def reaching(weights: np.ndarray, bins: np.ndarray, order: np.ndarray, count: int, top_p: float) -> int:
    """How many in order add up to top_p times the first `count`. Bins are added up first, each in the order of ids."""
    edges = [0, *(np.flatnonzero(np.diff(bins[order])) + 1), len(order)]
    before, inside, sums = 0.0, 0.0, []  # up to each rank; and up to the end of its bin
    for start, stop in pairwise(edges):
        after = before + in_order(weights[np.sort(order[start:stop])])
        inside = 0.0
        for rank in range(start, stop):
            inside += float(weights[order[rank]])
            sums.append((before + inside, after))
        before = after
    mass = top_p * sums[count - 1][0]
    for rank, (sum_, after) in enumerate(sums):
        last_of_bin = rank + 1 in edges
        if after >= mass and (sum_ >= mass or last_of_bin):
            return rank + 1
    return len(order)


def locate(values, before: float, target: float) -> tuple[int, float]:
    chosen, start = 0, before
    for i, value in enumerate(values):
        if value > 0:
            chosen, start = i, before
            before += float(value)
            if before > target:
                break
    return chosen, start


def draw(probabilities: np.ndarray, uniform: float) -> int:
    blocks = [probabilities[start : start + 64] for start in range(0, len(probabilities), 64)]
    sums = np.array([in_four(block) for block in blocks])
    target = uniform * in_four(sums)
    block, before = locate(sums, 0.0, target)
    return block * 64 + locate(blocks[block], before, target)[0]


def probabilities(logits: np.ndarray, params, prompt: list[int], output: list[int]) -> np.ndarray:
    adjusted = penalised(logits, params, prompt, output)
    weights = exp((adjusted.astype(np.float64) - float(adjusted.max())) * (1.0 / params.temperature))
    weights = kept(weights, params)
    return weights * (1.0 / in_four(weights))


def token(logits: np.ndarray, params, prompt: list[int], output: list[int]) -> int:
    """The token after `output`."""
    if params.is_greedy:
        return int(np.argmax(penalised(logits, params, prompt, output)))
    return draw(probabilities(logits, params, prompt, output), rng.uniform(params.seed, len(output)))
