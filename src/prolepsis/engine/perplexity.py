"""Perplexity: how surprised a model is by a text."""

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from prolepsis.engine.runner import Progress, Runner
from prolepsis.errors import InputError


class Perplexity(NamedTuple):
    """exp of the mean negative log-likelihood `nats` over `tokens` predicted tokens."""

    perplexity: float
    nats: float
    tokens: int


def measure_perplexity(runner: Runner, tokens: Many[int], context: int, progress: Progress | None = None) -> Perplexity:
    """Score `tokens` in consecutive windows of `context`, each from its second token on.

    Raises InputError for fewer than two tokens.
    """
    if len(tokens) < 2:
        raise InputError(f"the text has {len(tokens)} token(s); perplexity needs at least 2")
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, context):
        sequence = runner.new_sequence(tokens[start : start + context])
        try:
            while sequence.num_cached < len(sequence.tokens):
                first = sequence.num_cached
                logits = runner.all_logits(sequence)
                following = np.array(sequence.tokens[first + 1 : first + 1 + len(logits)], np.int64)
                total += _negative_log_likelihood(logits[: len(following)], following)
                count += len(following)
                if progress is not None:
                    progress(start + sequence.num_cached, len(tokens))
        finally:
            sequence.release()
    mean = total / count
    return Perplexity(float(np.exp(mean)), mean, count)


def _negative_log_likelihood(logits: np.ndarray, targets: np.ndarray) -> float:
    """Sum over rows of -log softmax(logits)[target], in float64."""
    wide = logits.astype(np.float64)
    peak = wide.max(axis=1)
    log_total = peak + np.log(np.exp(wide - peak[:, None]).sum(axis=1))
    return float((log_total - wide[np.arange(len(targets)), targets]).sum())
