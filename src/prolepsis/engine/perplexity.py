"""Perplexity: how surprised a model is by a text, and how far one model's predictions are from another's."""

from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.engine.runner import Progress, Runner
from prolepsis.errors import InputError


class Perplexity(NamedTuple):
    """exp of the mean negative log-likelihood `nats` over `tokens` predicted tokens."""

    perplexity: float
    nats: float
    tokens: int


class Comparison(NamedTuple):
    """A model beside its reference on one text.

    reference, model: their perplexities; kl: mean of KL(reference || model) in nats over the predicted tokens;
    same_top: share of them where both find the same token likeliest.
    """

    reference: Perplexity
    model: Perplexity
    kl: float
    same_top: float


def measure_perplexity(runner: Runner, tokens: Many[int], context: int, progress: Progress | None = None) -> Perplexity:
    """Score `tokens` in consecutive windows of `context`, each from its second token on.

    Raises InputError for fewer than two tokens.
    """
    total, count = 0.0, 0
    for (log_probs,), following in _predictions([runner], tokens, context, progress):
        total += _surprise(log_probs, following)
        count += len(following)
    return _perplexity(total, count)


def compare(
    reference: Runner, model: Runner, tokens: Many[int], context: int, progress: Progress | None = None
) -> Comparison:
    """Score `tokens` as `measure_perplexity` does by both, a chunk at a time, so that no more logits are held.

    Raises InputError for fewer than two tokens, or vocabularies that differ in size.
    """
    totals, kl, same, count = np.zeros(2), 0.0, 0, 0
    for both, following in _predictions([reference, model], tokens, context, progress):
        if both[0].shape != both[1].shape:
            sizes = " and ".join(str(each.shape[1]) for each in both)
            raise InputError(f"the models have vocabularies of {sizes} tokens, so they cannot be compared")
        totals += [_surprise(each, following) for each in both]
        kl += float((np.exp(both[0]) * (both[0] - both[1])).sum())
        same += int((both[0].argmax(axis=1) == both[1].argmax(axis=1)).sum())
        count += len(following)
    reference_total, model_total = totals.tolist()
    return Comparison(_perplexity(reference_total, count), _perplexity(model_total, count), kl / count, same / count)


def _predictions(
    runners: Many[Runner], tokens: Many[int], context: int, progress: Progress | None
) -> Iterator[tuple[list[NDArray[np.float64]], NDArray[np.int64]]]:
    """A chunk at a time: each runner's log-probabilities [n, vocab], and the tokens [n] that follow."""
    if len(tokens) < 2:
        raise InputError(f"the text has {len(tokens)} token(s); perplexity needs at least 2")
    for start in range(0, len(tokens) - 1, context):
        sequences = [runner.new_sequence(tokens[start : start + context]) for runner in runners]
        first = sequences[0]
        try:
            while first.num_cached < len(first.tokens):
                begin = first.num_cached
                room = min(each.table.room for each in sequences)
                logits = [runner.all_logits(each, room) for runner, each in zip(runners, sequences, strict=True)]
                following = np.array(first.tokens[begin + 1 : begin + 1 + len(logits[0])], np.int64)
                if len(following):
                    yield [log_softmax(each[: len(following)]) for each in logits], following
                if progress is not None:
                    progress(start + first.num_cached, len(tokens))
        finally:
            for sequence in sequences:
                sequence.release()


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities of each row of [n, vocab]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def _surprise(log_probs: NDArray[np.float64], following: NDArray[np.int64]) -> float:
    """Sum over rows of the negative log-likelihood of the token that follows."""
    return float(-log_probs[np.arange(len(following)), following].sum())


def _perplexity(total: float, count: int) -> Perplexity:
    mean = total / count
    return Perplexity(float(np.exp(mean)), mean, count)
