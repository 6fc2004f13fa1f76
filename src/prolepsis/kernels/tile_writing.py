"""Weights into tiles: numbers of 16 rows side by side, and codes in planes of bits."""

import numpy as np
from numba import njit

from prolepsis.kernels.llvm import LANES


@njit(cache=True, nogil=True)
def put_lanes(values, starts, tiles):
    """tiles[t, starts[i] + lane] = values[16 t + lane, i]: numbers of 16 rows, as wide as the elements of `tiles`.

    Rows beyond those of `values` are 0.
    """
    rows = len(values)
    for tile in range(len(tiles)):
        for lane in range(LANES):
            row = tile * LANES + lane
            for i in range(len(starts)):
                tiles[tile, starts[i] + lane] = values[row, i] if row < rows else 0


def _plane_writer(bits):
    each, mask, stride = 8 // bits, np.uint32(0x01010101 * ((1 << bits) - 1)), 4 if bits == 4 else 1

    @njit(cache=True, nogil=True)
    def put_plane(words, low, starts, tiles):
        rows = len(words)
        for tile in range(len(tiles)):
            for c in range(len(starts)):
                for lane in range(LANES):
                    row = tile * LANES + lane
                    for j in range(bits):
                        joined, first = np.uint32(0), 8 * c + (j if bits == 4 else j * each)
                        if row < rows:
                            for k in range(each):
                                codes = words[row, first + k * stride] >> np.uint32(low) & mask
                                joined |= codes << np.uint32(bits * k)
                        tiles[tile, starts[c] + LANES * j + lane] = joined

    return put_plane


PLANE_WRITERS = {bits: _plane_writer(bits) for bits in (1, 2, 4, 8)}
"""By the bits of a plane: f(words, low, starts, tiles) writes the one that begins at bit `low` of the codes (`cells`
says how it lies).

words: the codes, uint32 [rows, columns / 4]; starts: where each cell's plane begins in tiles uint32 [tiles, words].
Rows beyond those of `words` are 0.
"""
