"""Values as they are, for streams that coding would not make smaller: in as many bits as the cache stores."""

import numpy as np
from numba import njit

from prolepsis.kernels import simd
from prolepsis.kernels.kv_contexts import bits_of
from prolepsis.kernels.rans import JIT

_u8, _u16, _i64 = np.uint8, np.uint16, np.int64


@njit(**JIT)
def raw_size(n, form):
    """Bytes of n values. form: `kv_contexts.form_of`."""
    return (n * bits_of(form) + 7) >> 3


@njit(**JIT)
def write_raw(values, at, count, form, out, begin, index):
    """Values at ... at + count - 1 as number index ... of those that begin at byte `begin` of `out`, in order.

    values: uint16, scalars. A scalar's sign goes above the magnitude that the dtype has; of two in a byte, the first
    takes the lower half.
    """
    bits = bits_of(form)
    if bits == 16:
        simd.copy_bytes(out, begin + 2 * index, values, at, 2 * count)
        return
    sign = bits - 1
    for i in range(count):
        value = _i64(values[at + i])
        narrow = (value & ((1 << sign) - 1)) | (value >> 15) << sign
        if bits == 8:
            out[begin + index + i] = _u8(narrow)
        elif (index + i) & 1:
            out[begin + ((index + i) >> 1)] |= _u8(narrow << 4)
        else:
            out[begin + ((index + i) >> 1)] = _u8(narrow)


@njit(**JIT)
def read_raw(data, begin, index, count, form, values, at):
    """The inverse of `write_raw`."""
    bits = bits_of(form)
    if bits == 16:
        simd.copy_bytes(values, at, data, begin + 2 * index, 2 * count)
        return
    sign = bits - 1
    for i in range(count):
        if bits == 8:
            narrow = _i64(data[begin + index + i])
        else:
            narrow = _i64(data[begin + ((index + i) >> 1)]) >> (4 * ((index + i) & 1)) & 15
        values[at + i] = _u16((narrow & ((1 << sign) - 1)) | (narrow >> sign) << 15)
