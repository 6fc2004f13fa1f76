"""AWQ checkpoints (Lin et al. 2023, arXiv:2306.00978) in AutoAWQ's "gemm" order, 4 bits.

Of a linear layer of `columns` inputs and `rows` outputs there are `qweight` int32 [columns, rows / 8], `qzeros` int32
[groups, rows / 8] and `scales` [groups, rows]. Eight neighbouring outputs share a word; from its lowest bits on they
are those of `ORDER`.
"""

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import ModelFileError
from prolepsis.quant.bit_words import pack_words
from prolepsis.quant.grouped_matrix import GroupedMatrix, Rows, Scales, checked_groups, group_size

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BITS = 4
SYMMETRIC = 8
Int32 = NDArray[np.int32]


def awq_matrix(
    name: str,
    qweight: Int32,
    qzeros: Int32 | None,
    scales: Scales,
    declared_group: int | None,
) -> GroupedMatrix:
    """The matrix [rows, columns] of a layer; `name` of it is for errors; `declared_group`: what the configuration says.

    Raises:
        ModelFileError: shapes that do not fit together, or groups that are not supported.
    """
    columns, words = qweight.shape
    rows = words * len(ORDER)
    groups = checked_groups(name, scales, rows)
    if qzeros is not None and qzeros.shape != (groups, words):
        raise ModelFileError(f"{name}: qzeros have shape {qzeros.shape}, expected {(groups, words)}")
    group = group_size(name, columns, groups, declared_group)

    def codes(some: Rows) -> NDArray[np.uint8]:
        return unpack_awq(qweight, some)

    def zeros(some: Rows) -> NDArray[np.uint8]:
        assert qzeros is not None
        return unpack_awq(qzeros, some)

    return GroupedMatrix(
        f"{name} (AWQ, {BITS} bits, groups of {group})",
        (rows, columns),
        BITS,
        group,
        codes,
        SYMMETRIC if qzeros is None else zeros,
        scales.T,
    )


def unpack_awq(words: Int32, rows: Rows) -> NDArray[np.uint8]:
    """Codes or zero points of some outputs: int32 [n, all rows / 8] to uint8 [rows, n]."""
    octets, of = np.unique(rows // len(ORDER), return_inverse=True)
    raw = np.ascontiguousarray(words[:, octets].T).view(np.uint8).reshape(len(octets), -1, len(ORDER) * BITS // 8)
    codes = np.empty((len(octets), len(ORDER), len(words)), np.uint8)
    for byte, pair in enumerate(zip(ORDER[::2], ORDER[1::2], strict=True)):
        np.bitwise_and(raw[:, :, byte], 15, out=codes[:, pair[0]])
        np.right_shift(raw[:, :, byte], 4, out=codes[:, pair[1]])
    return codes[of, rows % len(ORDER)]


def pack_awq(codes: NDArray[np.uint8]) -> Int32:
    """`qweight` of codes [rows, columns], or `qzeros` of zero points [rows, groups]: int32 [columns, rows / 8]."""
    moved = codes.reshape(-1, len(ORDER), codes.shape[1])[:, ORDER].reshape(codes.shape)
    return np.ascontiguousarray(pack_words(moved, BITS).T).view(np.int32)
