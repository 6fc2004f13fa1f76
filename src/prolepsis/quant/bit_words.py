"""Codes of some bits in 32-bit words, the way GPTQ, AWQ and EXL2 lay them: one stream of bits, the lowest first.

Of 2, 4 and 8 bits every word holds a whole number of codes; of 3, 5 and 6 a code may begin in one word and end in the
next, and 32 codes take `bits` words.
"""

from functools import cache
from math import gcd

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Bytes = NDArray[np.uint8]

WORD = 32


@cache
def _codes_of(bits: int, count: int) -> NDArray[np.generic]:
    """The codes in each number of bits * count bits, as the bytes of one element: several are looked up at a time."""
    numbers = np.arange(1 << bits * count, dtype=np.uint32)[:, None]
    codes = (numbers >> np.arange(count, dtype=np.uint32) * np.uint32(bits) & np.uint32((1 << bits) - 1)).astype(
        np.uint8
    )
    return codes.view(f"<u{count}")[:, 0]


def unpack_words(words: Words, bits: int) -> Bytes:
    """Streams along the rows of `words` uint32 [streams, n]: codes uint8 [streams, n * 32 / bits]."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    if 8 % bits == 0:
        return _codes_of(bits, 8 // bits)[raw].view(np.uint8)
    # Codes of 3, 5 and 6 bits: some of them at once, out of two bytes each time.
    count = {3: 4, 5: 2, 6: 2}[bits]
    width = bits * count
    steps = np.arange(8 // gcd(8, width)) * width
    blocks = raw.reshape(len(raw), -1, width // gcd(8, width))
    padded = np.concatenate([blocks, np.zeros((*blocks.shape[:2], 1), np.uint8)], axis=2)
    numbers = np.empty((*blocks.shape[:2], len(steps)), np.uint16)
    for at, step in enumerate(steps.tolist()):
        byte, shift = divmod(step, 8)
        low = padded[:, :, byte].astype(np.uint16) >> np.uint16(shift)
        numbers[:, :, at] = low | padded[:, :, byte + 1].astype(np.uint16) << np.uint16(8 - shift)
    numbers &= np.uint16((1 << width) - 1)
    return _codes_of(bits, count)[numbers.reshape(len(raw), -1)].view(np.uint8)


def pack_words(codes: Bytes, bits: int) -> Words:
    """Codes uint8 [n, streams], where n * bits is a multiple of 32, to streams down the columns of uint32 [words,
    streams]: the inverse of `unpack_words`, transposed."""
    period = WORD if WORD % bits else WORD // bits
    spans = codes.reshape(-1, period, codes.shape[1])
    out = np.zeros((len(spans), period * bits // WORD, codes.shape[1]), np.uint32)
    for at in range(period):
        word, shift = divmod(at * bits, WORD)
        code = spans[:, at].astype(np.uint32)
        out[:, word] |= code << np.uint32(shift)
        if shift + bits > WORD:
            out[:, word + 1] |= code >> np.uint32(WORD - shift)
    return out.reshape(-1, codes.shape[1])


def take_codes(words: Words, index: NDArray[np.intp], bits: int) -> Bytes:
    """Codes number `index` of the streams along the rows of `words` uint32 [streams, n]: uint8 [streams, index]."""
    word, shift = np.divmod(index * bits, WORD)
    code = words[:, word] >> shift.astype(np.uint32)
    if WORD % bits:
        after = words[:, np.minimum(word + 1, words.shape[1] - 1)]
        # Shifted in two steps, for a shift by 32 is undefined.
        code |= after << (WORD - 1 - shift).astype(np.uint32) << np.uint32(1)
    return (code & np.uint32((1 << bits) - 1)).astype(np.uint8)
