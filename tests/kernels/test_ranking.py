import numpy as np
import pytest

from prolepsis.kernels.ranking import most_probable
from prolepsis.kernels.sampling import BLOCK, largest_logits


def kept(logits, top_k, top_p, min_p):
    """Blocks, and tokens left in them."""
    of_blocks = np.empty(-(-len(logits) // BLOCK), np.float32)
    largest = largest_logits(logits, of_blocks)
    kth = np.sort(of_blocks)[-min(top_k, len(of_blocks))]
    weights, factor, blocks = most_probable(logits, of_blocks, largest, kth, 1.0, top_k, top_p, min_p)
    tokens = [int(block) * BLOCK + i for block in blocks for i in np.flatnonzero(weights[block * BLOCK :][:BLOCK])]
    assert np.isclose(sum(weights[token] for token in tokens) * factor, 1.0)
    return blocks.tolist(), tokens


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "expected"),
    [
        (3, 1.0, 0.0, [70, 75, 5000]),
        (6400, 1.0, 0.5, [70, 75, 5000]),
        (3, 0.9, 0.5, [70, 75, 5000]),
        (6400, 0.5, 0.0, [70, 75]),
        (6400, 0.3, 0.0, [70]),
    ],
)
def test_only_blocks_of_kept_tokens_are_named(top_k, top_p, min_p, expected):
    logits = np.full(6400, -30.0, np.float32)
    logits[[70, 75, 5000]] = 0.0
    assert kept(logits, top_k, top_p, min_p) == (sorted({token // BLOCK for token in expected}), expected)


def test_more_of_the_heaviest_than_there_are_blocks():
    """All of them are in one block, so that the blocks' largest say nothing about the others."""
    logits = np.full(640, -30.0, np.float32)
    logits[64:128] = 0.0
    assert kept(logits, 60, 1.0, 0.0) == ([1], list(range(64, 124)))
