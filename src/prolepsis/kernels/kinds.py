"""The kinds of weights that `tile` multiplies: what a code of each is worth.

A weight is `scale * (value - bias) + minimum`, where `value` is its code, or what the kind's book has for the code, and

- of the scales there is one for each `group` columns of a row: float16, times a power of two that the matrix has;
- with `part`, each `part` columns have a whole number by which that scale is multiplied;
- minimums are float16, one beside each scale; with `part` they are subtracted, after multiplication by a whole number
  of the part's own;
- kinds of free groups have any multiple of 32 columns in one, and a `bias` for each scale: a zero point.
"""

from typing import NamedTuple

MXFP4_BOOK = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
IQ4_BOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ3_BOOK = (-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62)
IQ2_BOOK = (-43, -25, -8, 8, 25, 43)
IQ1_BOOK = (-9, -7, -1, 1, 7, 9)

FREE = 0
"""`Kind.group` of kinds whose matrices say how many columns share a scale."""


class Kind(NamedTuple):
    """bits: of a code, or of a float weight where `group` is 1; brain: whether that is bfloat16. The other fields: see
    above."""

    bits: int
    group: int
    part: int = 0
    bias: int = 0
    minimums: bool = False
    book: tuple[int, ...] = ()
    brain: bool = False


KINDS = {
    "Q4_0": Kind(4, 32, bias=8),
    "Q4_1": Kind(4, 32, minimums=True),
    "Q8_0": Kind(8, 32, bias=128),
    "Q6_K": Kind(6, 256, part=16, bias=32),
    "F16": Kind(16, 1),
    "BF16": Kind(16, 1, brain=True),
    "F32": Kind(32, 1),
    "Q5_0": Kind(5, 32, bias=16),
    "Q5_1": Kind(5, 32, minimums=True),
    "Q2_K": Kind(2, 256, part=16, minimums=True),
    "Q3_K": Kind(3, 256, part=16, bias=4),
    "Q4_K": Kind(4, 256, part=32, minimums=True),
    "Q5_K": Kind(5, 256, part=32, minimums=True),
    "IQ4_NL": Kind(4, 32, book=IQ4_BOOK),
    "IQ4_XS": Kind(4, 256, part=32, book=IQ4_BOOK),
    "MXFP4": Kind(4, 32, book=MXFP4_BOOK),
    # Types of llama.cpp whose tables of vectors hold few numbers: those are the book, and signs are part of a code.
    "IQ3_XXS": Kind(4, 256, part=32, book=IQ3_BOOK),
    "IQ3_S": Kind(4, 256, part=32, book=tuple(range(-15, 16, 2))),
    "IQ2_32": Kind(3, 256, part=32, book=IQ2_BOOK),
    "IQ2_16": Kind(3, 256, part=16, book=IQ2_BOOK),
    "IQ1_32": Kind(3, 256, part=32, book=IQ1_BOOK),
    "IQ1_16": Kind(3, 256, part=16, book=IQ1_BOOK),
    # GPTQ, AWQ, EXL2, compressed-tensors and ternary types: a scale and a zero point for each group of columns.
    "INT2": Kind(2, FREE),
    "INT3": Kind(3, FREE),
    "INT4": Kind(4, FREE),
    "INT5": Kind(5, FREE),
    "INT6": Kind(6, FREE),
    "INT8": Kind(8, FREE),
}
"""Kinds by name. Their order is kept in the fingerprints of twins: new kinds come last."""
