"""Sums of products of unsigned weight bytes and signed activation bytes, in the best instructions the CPU has; and
tables of bytes.

Every form is exact in int32, so all give the same bits.
"""

from functools import cache

from llvmlite import ir

from prolepsis.kernels.cpu import has
from prolepsis.kernels.llvm import BYTES, I16, I32, INTS, call, splat

_WORDS = ir.VectorType(I16, 32)
_LARGEST_ACTIVATION = 128
_LARGEST_WORD = 2**15 - 1

# Intrinsics by bytes in a register: (widest first) multiply bytes and add pairs, multiply words and add pairs.
_BYTE_PAIRS = {
    64: "llvm.x86.avx512.pmaddubs.w.512",
    32: "llvm.x86.avx2.pmadd.ub.sw",
    16: "llvm.x86.ssse3.pmadd.ub.sw.128",
}
_SHUFFLES = {64: "llvm.x86.avx512.pshuf.b.512", 32: "llvm.x86.avx2.pshuf.b", 16: "llvm.x86.ssse3.pshuf.b.128"}
_WORD_PAIRS = {64: "llvm.x86.avx512.pmaddw.d.512", 32: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.sse2.pmadd.wd"}


@cache
def _fused_bytes():
    """Width of the fused dot product (vpdpbusd) in bytes; 0 where there is none."""
    if has("avx512vnni"):
        return 64
    return 32 if has("avxvnni") else 0


@cache
def _pair_bytes():
    """Width of pmaddubsw and pmaddwd in bytes; 0 where there are none."""
    if has("avx512bw"):
        return 64
    return 32 if has("avx2") else 16 if has("ssse3") else 0


def byte_dots(b, starts, groups, activations, largest):
    """starts[t] + sum over g of the four products in each 32-bit lane of groups[g] and activations(t, g).

    starts: int32 vectors, one for each row t; groups: vectors of unsigned bytes, none above `largest`;
    activations(t, g) returns a vector of signed bytes.
    """
    if _fused_bytes():
        return _fused(b, starts, groups, activations)
    if not _pair_bytes():
        return _plain(b, starts, groups, activations)
    if 2 * largest * _LARGEST_ACTIVATION <= _LARGEST_WORD:
        return _paired(b, starts, groups, activations, largest)
    # Too large for sums of two in 16 bits: low and high nibbles apart.
    low = [b.and_(w, splat(BYTES, 15)) for w in groups]
    high = [b.and_(b.lshr(w, splat(BYTES, 4)), splat(BYTES, 15)) for w in groups]
    zeros = [splat(INTS, 0)] * len(starts)
    upper = _paired(b, zeros, high, activations, 15)
    starts = [b.add(start, b.shl(u, splat(INTS, 4))) for start, u in zip(starts, upper, strict=True)]
    return _paired(b, starts, low, activations, 15)


def look_up(b, table, codes):
    """table[c] for every byte c of a vector. table: up to 16 unsigned bytes; codes are below their number."""
    table = [*table, *[0] * (16 - len(table))]
    if size := _pair_bytes():
        entries = ir.Constant(BYTES, table * 4)
        return _by_register(b, _SHUFFLES[size], BYTES, size, entries, codes)
    choices = [splat(BYTES, value) for value in table]
    for bit in range(4):
        odd = b.icmp_unsigned("!=", b.and_(codes, splat(BYTES, 1 << bit)), splat(BYTES, 0))
        choices = [b.select(odd, above, below) for below, above in zip(choices[::2], choices[1::2], strict=True)]
    return choices[0]


def _by_register(b, name, result, size, *operands):
    """Apply an intrinsic on registers of `size` bytes to whole vectors of 64 bytes."""
    if size == 64:
        return call(b, name, result, operands)

    def piece(operand, i):
        count = operand.type.count * size // 64
        mask = ir.Constant(ir.VectorType(I32, count), list(range(i * count, (i + 1) * count)))
        return b.shuffle_vector(operand, operand, mask)

    kind = ir.VectorType(result.element, result.count * size // 64)
    parts = [call(b, name, kind, [piece(operand, i) for operand in operands]) for i in range(64 // size)]
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        mask = ir.Constant(ir.VectorType(I32, count), list(range(count)))
        parts = [b.shuffle_vector(u, v, mask) for u, v in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _fused(b, starts, groups, activations):
    size = _fused_bytes()
    sums = list(starts)
    for g, weights in enumerate(groups):
        for t, total in enumerate(sums):
            name = f"llvm.x86.avx512.vpdpbusd.{8 * size}"
            sums[t] = _by_register(b, name, INTS, size, total, weights, activations(t, g))
    return sums


def _paired(b, starts, groups, activations, largest):
    """Products of bytes summed in 16 bits for as long as they surely fit, then in 32."""
    size = _pair_bytes()
    run = _LARGEST_WORD // (2 * largest * _LARGEST_ACTIVATION)
    sums = list(starts)
    for first in range(0, len(groups), run):
        words = [None] * len(starts)
        for g in range(first, min(first + run, len(groups))):
            for t, before in enumerate(words):
                pairs = _by_register(b, _BYTE_PAIRS[size], _WORDS, size, groups[g], activations(t, g))
                words[t] = pairs if before is None else b.add(before, pairs)
        for t, word in enumerate(words):
            wide = _by_register(b, _WORD_PAIRS[size], INTS, size, word, splat(_WORDS, 1))
            sums[t] = b.add(sums[t], wide)
    return sums


def _plain(b, starts, groups, activations):
    sums = list(starts)
    for g, weights in enumerate(groups):
        w = b.bitcast(weights, INTS)
        for t in range(len(sums)):
            a = b.bitcast(activations(t, g), INTS)
            for byte in range(4):
                unsigned = b.and_(b.lshr(w, splat(INTS, 8 * byte)), splat(INTS, 0xFF))
                signed = b.ashr(b.shl(a, splat(INTS, 24 - 8 * byte)), splat(INTS, 24))
                sums[t] = b.add(sums[t], b.mul(unsigned, signed))
    return sums
