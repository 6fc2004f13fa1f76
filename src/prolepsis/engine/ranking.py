"""Weights ranked by (weight descending, token id ascending) without sorting more of them than is asked about."""

import numpy as np
from numpy.typing import NDArray

from prolepsis.kernels.sampling import NUM_BINS, bin_weights


class Ranking:
    """The order of float64 weights [vocab] in 0 .. 1; equal weights rank by id, so that the lowest id wins.

    One pass distributes the tokens over bins of similar weight; a question about a rank then sorts one bin. Only the
    first `size` ranks can be asked about: weights below 2^-64 are too light to be told apart.
    """

    def __init__(self, weights: NDArray[np.float64]) -> None:
        self._weights = weights
        self._bins = np.empty(len(weights), dtype=np.uint16)
        counts = np.zeros(NUM_BINS, dtype=np.int64)
        masses = np.zeros(NUM_BINS)
        bin_weights(weights, self._bins, counts, masses)
        self._count_up_to = np.cumsum(counts[:-1])
        self._mass_up_to = np.cumsum(masses[:-1])
        self.size = int(self._count_up_to[-1])
        """Tokens ranked."""
        self._sorted: dict[int, NDArray[np.int64]] = {}

    def token(self, rank: int) -> int:
        """The token at `rank`, 0 being the heaviest; rank < size."""
        bin_, offset = self._find(rank)
        return int(self._members(bin_)[offset])

    def mass(self, count: int) -> float:
        """Sum of the `count` heaviest weights; 1 <= count <= size."""
        bin_, offset = self._find(count - 1)
        inside = np.cumsum(self._weights[self._members(bin_)[: offset + 1]])
        return self._mass_before(bin_) + float(inside[-1])

    def count_reaching(self, mass: float) -> int:
        """How many of the heaviest weights it takes to add up to `mass` or more (`size`, if they never do)."""
        bin_ = int(np.searchsorted(self._mass_up_to, mass))
        if bin_ == len(self._mass_up_to):
            return self.size
        running = self._mass_before(bin_) + np.cumsum(self._weights[self._members(bin_)])
        # Added in another order, the bin's sum may miss `mass` by its last bit: then the whole bin is taken.
        offset = min(int(np.searchsorted(running, mass)), len(running) - 1)
        return self._count_before(bin_) + offset + 1

    def heaviest(self, count: int) -> NDArray[np.int64]:
        """Tokens, ascending by id, among which the `count` heaviest are; rarely many more."""
        if count > self.size:
            return np.arange(len(self._weights))
        bin_, _ = self._find(count - 1)
        return np.flatnonzero(self._bins <= bin_)

    def _find(self, rank: int) -> tuple[int, int]:
        """Bin of a rank, and the rank within the bin."""
        bin_ = int(np.searchsorted(self._count_up_to, rank, side="right"))
        return bin_, rank - self._count_before(bin_)

    def _members(self, bin_: int) -> NDArray[np.int64]:
        """Tokens of one bin, in order."""
        if bin_ not in self._sorted:
            tokens = np.flatnonzero(self._bins == bin_)
            self._sorted[bin_] = tokens[np.argsort(-self._weights[tokens], kind="stable")]
        return self._sorted[bin_]

    def _count_before(self, bin_: int) -> int:
        return int(self._count_up_to[bin_ - 1]) if bin_ else 0

    def _mass_before(self, bin_: int) -> float:
        return float(self._mass_up_to[bin_ - 1]) if bin_ else 0.0
