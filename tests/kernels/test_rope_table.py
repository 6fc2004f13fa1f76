"""The rotary tables must be accurate, and the same bits on every machine."""

import hashlib
from fractions import Fraction
from math import cos, pi, sin

import numpy as np
import pytest

from prolepsis.kernels.rope_table import inv_freq, rope_table


def test_accuracy_up_to_a_million_positions() -> None:
    positions = np.concatenate([np.arange(300), np.arange(999_000, 1_000_001, 7), [131_071, 500_009]])
    frequencies = inv_freq(100_000.0, 64)
    c, s = rope_table(positions, frequencies)
    turn = Fraction(pi) + Fraction(1.2246467991473532e-16)  # pi to 32 digits
    for row in (0, 1, 299, 300, 417, len(positions) - 3, len(positions) - 1):
        for column, frequency in enumerate(frequencies):
            angle = float(Fraction(int(positions[row])) * Fraction(frequency) % (2 * turn))
            assert abs(float(c[row, column]) - cos(angle)) < 1e-9 + 2.0**-25
            assert abs(float(s[row, column]) - sin(angle)) < 1e-9 + 2.0**-25


def test_same_bits_everywhere() -> None:
    """A changed bit here would make every saved K undecodable: the tables are part of the file format."""
    c, s = rope_table(np.arange(0, 200_000, 97), inv_freq(10_000.0, 128))
    assert hashlib.sha256(c.tobytes() + s.tobytes()).hexdigest() == GOLDEN


def test_position_alone_decides_a_row() -> None:
    frequencies = inv_freq(10_000.0, 64)
    whole = rope_table(np.arange(5000), frequencies)
    single = rope_table(np.array([4321]), frequencies)
    assert np.array_equal(whole[0][4321], single[0][0])
    assert np.array_equal(whole[1][4321], single[1][0])


def test_frequencies() -> None:
    plain = inv_freq(10_000.0, 8)
    assert np.allclose(plain, [1, 0.1, 0.01, 0.001], rtol=1e-15)
    assert np.array_equal(inv_freq(10_000.0, 8, [1, 2, 4, 8]), plain / [1, 2, 4, 8])
    with pytest.raises(ValueError, match="3 frequency factors for 4"):
        inv_freq(10_000.0, 8, [1, 1, 1])


GOLDEN = "6c49480a569c9f3d887e7fa0783e57e42ab7893aaaf3451f68c6a9f60d0557b8"
