"""Which token follows, where one was drafted from another distribution: exact, however bad the draft.

Leviathan et al. 2022 (arXiv:2211.17192), theorem 1; Chen et al. 2023 (arXiv:2302.01318), algorithm 2.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Probabilities = NDArray[np.float64]


def settle(
    p: Probabilities,
    q: Probabilities,
    draft: int,
    accept: float,
    redraw: float,
    draw: Callable[[Probabilities, float], int],
) -> int:
    """A token distributed as `p`, which is the draft as often as can be: then the draft is accepted.

    p, q: float64 [vocab], the target's and the drafter's probabilities, each with sum 1 up to rounding. draft: a token
    drawn from q. accept, redraw: in [0, 1), independent of each other and of what the draft was drawn with; the second
    is for the token in place of a rejected draft. draw(probabilities, uniform): draws a token.

    Proof. A token x is drafted and accepted with probability q(x) min(1, p(x) / q(x)) = min(p(x), q(x)). Some draft is
    rejected with probability 1 - sum min(p, q) = sum max(p - q, 0), which is what the residual is divided by, so
    x is drawn in place of another with probability max(p(x) - q(x), 0). Together: min(p, q) + max(p - q, 0) = p.
    """
    if accept * q[draft] < p[draft]:
        return draft
    return draw(residual(p, q), redraw)


def residual(p: Probabilities, q: Probabilities) -> Probabilities:
    """What a rejected draft leaves to draw from: max(p - q, 0) divided by its sum, float64 [vocab].

    Where p exceeds q nowhere, they are equal up to rounding, and it is `p`.
    """
    rest = np.subtract(p, q)
    np.maximum(rest, 0.0, out=rest)
    total = rest.sum()
    return np.divide(rest, total, out=rest) if total > 0.0 else p
