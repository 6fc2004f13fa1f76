"""Codes of some bits in 32-bit words, the way GPTQ, AWQ and EXL2 lay them: one stream of bits, the lowest first.

Of 2, 4 and 8 bits every word holds a whole number of codes; of 3, 5 and 6 a code may begin in one word and end in the
next, and 32 codes take `bits` words.
"""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Bytes = NDArray[np.uint8]

WORD = 32


def unpack_words(words: Words, bits: int) -> Bytes:
    """Streams down the columns of `words` uint32 [n, streams]: codes uint8 [n * 32 / bits, streams]."""
    count = len(words) * WORD // bits
    period = WORD if WORD % bits else WORD // bits
    spans = words.reshape(-1, period * bits // WORD, words.shape[1])
    out = np.empty((count // period, period, words.shape[1]), np.uint8)
    mask = np.uint32((1 << bits) - 1)
    for at in range(period):
        word, shift = divmod(at * bits, WORD)
        code = spans[:, word] >> np.uint32(shift)
        if shift + bits > WORD:
            code |= spans[:, word + 1] << np.uint32(WORD - shift)
        out[:, at] = code & mask
    return out.reshape(count, words.shape[1])


def pack_words(codes: Bytes, bits: int) -> Words:
    """The inverse of `unpack_words`: uint8 [n, streams], whose n * bits is a multiple of 32, to uint32 words."""
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
