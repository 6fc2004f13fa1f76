"""Fields of a few bits out of bytes, eight bytes at a time: what loading a model of packed weights waits for."""

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from prolepsis.kernels.llvm import I64, data, load, store

WORD = 8  # bytes


@intrinsic
def _load_word(typing, source, at):
    """The uint64 whose bytes begin at byte `at`."""

    def emit(context, b, signature, arguments):
        return load(b, I64, data(context, b, signature.args[0], arguments[0]), arguments[1])

    return types.uint64(source, types.int64), emit


@intrinsic
def _store_word(typing, target, at, word):
    def emit(context, b, signature, arguments):
        store(b, arguments[2], data(context, b, signature.args[0], arguments[0]), arguments[1])
        return context.get_dummy_value()

    return types.void(target, types.int64, types.uint64), emit


@njit(cache=True, nogil=True)
def take_fields(blocks, size, at, count, run, bits, low, fields, to, out, width, first, fresh):
    """Spread fields of bytes over bytes. blocks: uint8 [n * size], flat; out: uint8 [n * width], flat.

    Of each block, `count` bytes from `at` on are taken, `run` (a multiple of 8) at a time: first the lowest fields of
    these bytes, of `bits` bits from bit `low` on, then their next ones, `fields` in all. Each is moved up by `to` bits
    and stored (fresh) or or-ed in, from byte `first` of the block's `width` on.
    """
    ones = np.uint64(0x0101010101010101)
    mask = ones * np.uint64(2**bits - 1)
    for block in range(len(blocks) // size):
        target = block * width + first
        for start in range(0, count, run):
            for i in range(0, run, WORD):
                word = _load_word(blocks, block * size + at + start + i)
                for field in range(fields):
                    value = (word >> np.uint64(low + field * bits) & mask) << np.uint64(to)
                    place = target + start * fields + field * run + i
                    _store_word(out, place, value if fresh else value | _load_word(out, place))
