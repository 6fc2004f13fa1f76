"""Random numbers by counter: the n-th token of a request has its own, whatever was or was not drawn before it.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): integers only, so the same on
every machine.
"""

import os

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

TOKEN, DRAFT, ACCEPT = range(3)
"""What a random number is for: each purpose has its own."""
_MASK = 0xFFFFFFFF


def fresh_seed() -> int:
    """A seed from the operating system, below 2^53 so that it survives any JSON reader."""
    return int.from_bytes(os.urandom(8), "little") >> 11


def uniform(seed: int, n: int, purpose: int = TOKEN) -> float:
    """The n-th number of the stream `seed`, in [0, 1), a multiple of 2^-53; seed and n in 0 .. 2^64 - 1.

    purpose: one of those above.
    """
    words = philox((n & _MASK, n >> 32, purpose, 0), (seed & _MASK, seed >> 32))
    return ((words[0] << 32 | words[1]) >> 11) * 2.0**-53


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words from a counter of four and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low, high = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _MASK, (low >> 32) ^ c3 ^ k1, low & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3
