"""Calibration texts cut into pieces of equal length."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError


def pieces(texts: Sequence[Sequence[int]], samples: int, length: int, seed: int) -> NDArray[np.int64]:
    """Up to `samples` pieces of `length` tokens, int64 [pieces, length], in the order in which they stand in the texts.

    The texts follow on one another, so that short ones count too. If there are more pieces than are asked for, `seed`
    decides which are taken; if there is less than one, the text is one shorter piece. Raises InputError for no tokens.
    """
    joined = np.array([token for text in texts for token in text], np.int64)
    if len(joined) < 2:
        raise InputError(f"--calibration: the texts have {len(joined)} token(s); give longer ones")
    length = min(length, len(joined))
    cut = joined[: len(joined) // length * length].reshape(-1, length)
    if len(cut) > samples:
        chosen = np.random.default_rng(seed).permutation(len(cut))[:samples]
        cut = cut[np.sort(chosen)]
    return cut
