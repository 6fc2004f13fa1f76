"""Explicit vectors inside Numba functions: a vector value type and the operations on it.

A `Vector` is an LLVM `<n x element>` held in registers; each function below is an intrinsic that emits one or two LLVM
instructions. Numba's own loops cannot express what these are for: a table lookup beside a store is never vectorised,
and 16-bit lanes never stay 16 bits wide.

All of this is generic LLVM and compiles on every CPU; what only some have is in `avx512`.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from prolepsis.kernels import llvm
from prolepsis.kernels.cpu import has

AVX512 = has("avx512f", "avx512bw", "avx512dq", "avx512vl")
"""Whether the operations of `avx512` may be compiled."""

_ELEMENTS = {"i1": ir.IntType(1), "i8": llvm.I8, "i16": llvm.I16, "i32": llvm.I32, "i64": llvm.I64, "f32": llvm.F32}
_SCALARS = {"i8": types.uint8, "i16": types.uint16, "i32": types.uint32, "i64": types.uint64, "f32": types.float32}


class Vector(types.Type):
    """The Numba type of `lanes` numbers of one kind."""

    def __init__(self, element: str, lanes: int) -> None:
        self.element, self.lanes = element, lanes
        self.llvm = ir.VectorType(_ELEMENTS[element], lanes)
        super().__init__(name=f"Vector({element} x {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        super().__init__(manager, vector, vector.llvm)


I8x16, I16x16, I32x16, F32x16 = (Vector(element, 16) for element in ("i8", "i16", "i32", "f32"))
I8x32, I16x32 = Vector("i8", 32), Vector("i16", 32)
I64x8 = Vector("i64", 8)


def _spread(context, builder, vector, kind, value):
    """`value` as it is when it is a vector, else in every lane."""
    if isinstance(kind, Vector):
        return value
    return llvm.broadcast(builder, vector.llvm, context.cast(builder, value, kind, _SCALARS[vector.element]))


def _pointer(context, builder, signature, arguments):
    """Address of element arguments[1] of the array arguments[0]."""
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.gep(data, [context.cast(builder, arguments[1], signature.args[1], types.intp)])


def _binary(operate):
    """An intrinsic of two vectors, or a vector and a scalar, from a function of builder and two LLVM values."""

    @intrinsic
    def operation(typing, x, y):
        def emit(context, builder, signature, arguments):
            vector, other = signature.args
            return operate(builder, arguments[0], _spread(context, builder, vector, other, arguments[1]))

        return x(x, y), emit

    return operation


def _named(name):
    return _binary(lambda builder, x, y: getattr(builder, name)(x, y))


add, sub, mul = _named("add"), _named("sub"), _named("mul")
bit_and, bit_or, bit_xor = _named("and_"), _named("or_"), _named("xor")
shift_left, shift_right, shift_right_signed = _named("shl"), _named("lshr"), _named("ashr")  # by less than the width
add_float, sub_float, mul_float, divide = _named("fadd"), _named("fsub"), _named("fmul"), _named("fdiv")
minimum = _binary(lambda builder, x, y: builder.select(builder.icmp_unsigned("<", x, y), x, y))
minimum_signed = _binary(lambda builder, x, y: builder.select(builder.icmp_signed("<", x, y), x, y))
maximum_signed = _binary(lambda builder, x, y: builder.select(builder.icmp_signed(">", x, y), x, y))


def _comparison(operator, signed=False):
    @intrinsic
    def operation(typing, x, y):
        def emit(context, builder, signature, arguments):
            vector, other = signature.args
            y = _spread(context, builder, vector, other, arguments[1])
            compare = builder.icmp_signed if signed else builder.icmp_unsigned
            return compare(operator, arguments[0], y)

        return Vector("i1", x.lanes)(x, y), emit

    return operation


less, at_least, equal, not_equal = (_comparison(operator) for operator in ("<", ">=", "==", "!="))
less_signed, at_least_signed = _comparison("<", signed=True), _comparison(">=", signed=True)


@intrinsic
def select(typing, mask, x, y):
    """x where the mask is set, else y (a vector or a scalar)."""

    def emit(context, builder, signature, arguments):
        other = _spread(context, builder, signature.args[1], signature.args[2], arguments[2])
        return builder.select(arguments[0], arguments[1], other)

    return x(mask, x, y), emit


def converter(vector, name):
    """Function that turns a vector into `vector`.

    name: lane by lane "zext", "sext", "trunc", "uitofp" or "fptosi"; "bitcast", the same bits cut into other lanes.
    """

    @intrinsic
    def operation(typing, x):
        def emit(context, builder, signature, arguments):
            return getattr(builder, name)(arguments[0], vector.llvm)

        return vector(x), emit

    return operation


def loader(vector):
    """Function (array, index) -> `vector` at any alignment; index counts the array's elements."""

    @intrinsic
    def operation(typing, array, index):
        def emit(context, builder, signature, arguments):
            pointer = _pointer(context, builder, signature, arguments)
            value = builder.load(builder.bitcast(pointer, vector.llvm.as_pointer()))
            value.align = 1
            return value

        return vector(array, index), emit

    return operation


@intrinsic
def store(typing, array, index, x):
    """Write all lanes at any alignment; index counts the array's elements."""

    def emit(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature, arguments)
        builder.store(arguments[2], builder.bitcast(pointer, x.llvm.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(array, index, x), emit


def shuffler(source, lanes):
    """Function (x, y) -> the lanes named by `lanes` of x followed by y."""
    result = Vector(source.element, len(lanes))

    @intrinsic
    def operation(typing, x, y):
        def emit(context, builder, signature, arguments):
            mask = ir.Constant(ir.VectorType(llvm.I32, len(lanes)), list(lanes))
            return builder.shuffle_vector(arguments[0], arguments[1], mask)

        return result(x, y), emit

    return operation


@intrinsic
def bit_length(typing, x):
    """Position of the highest bit set in a uint64, counted from 1; 0 for 0."""

    def emit(context, builder, signature, arguments):
        value = context.cast(builder, arguments[0], signature.args[0], types.uint64)
        return builder.sub(llvm.I64(64), builder.ctlz(value, ir.Constant(ir.IntType(1), 0)))

    return types.uint64(x), emit


def lane(k):
    """Function (x) -> lane k of a vector, counted from the end where k is negative."""

    @intrinsic
    def operation(typing, x):
        def emit(context, builder, signature, arguments):
            return builder.extract_element(arguments[0], llvm.I32(k % x.lanes))

        return _SCALARS[x.element](x), emit

    return operation


@intrinsic
def leading_zeros(typing, x):
    """In each lane, zeros above the highest bit set; the lane's width for 0."""

    def emit(context, builder, signature, arguments):
        name = f"llvm.ctlz.v{x.lanes}{x.element}"
        return llvm.call(builder, name, x.llvm, [arguments[0], ir.Constant(ir.IntType(1), 0)])

    return x(x), emit


@intrinsic
def count(typing, mask):
    """How many lanes of a mask are set, as int64."""

    def emit(context, builder, signature, arguments):
        bits = builder.bitcast(arguments[0], ir.IntType(mask.lanes))
        return builder.zext(builder.ctpop(bits), llvm.I64)

    return types.int64(mask), emit


def constant(vector, lanes):
    """Function () -> `vector` with these values."""
    values = list(lanes)

    @intrinsic
    def operation(typing):
        def emit(context, builder, signature, arguments):
            return ir.Constant(vector.llvm, values)

        return vector(), emit

    return operation


@intrinsic
def broadcast(typing, like, value):
    """The scalar `value` in every lane of a vector of the type of `like`."""

    def emit(context, builder, signature, arguments):
        return _spread(context, builder, signature.args[0], signature.args[1], arguments[1])

    return like(like, value), emit


def _scalar_access(element):
    """(load, store) of a little-endian integer at any byte of a uint8 array; no bounds check."""
    kind = _SCALARS[element]
    pointed = _ELEMENTS[element].as_pointer()

    @intrinsic
    def load(typing, array, index):
        def emit(context, builder, signature, arguments):
            pointer = _pointer(context, builder, signature, arguments)
            value = builder.load(builder.bitcast(pointer, pointed))
            value.align = 1
            return value

        return kind(array, index), emit

    @intrinsic
    def store(typing, array, index, value):
        def emit(context, builder, signature, arguments):
            pointer = _pointer(context, builder, signature, arguments)
            value = context.cast(builder, arguments[2], signature.args[2], kind)
            builder.store(value, builder.bitcast(pointer, pointed)).align = 1
            return context.get_dummy_value()

        return types.void(array, index, value), emit

    return load, store


load_u16, store_u16 = _scalar_access("i16")
load_u32, store_u32 = _scalar_access("i32")
_, store_u64 = _scalar_access("i64")


@intrinsic
def copy_bytes(typing, target, to, source, begin, count):
    """Copy `count` bytes between places that do not overlap; `to` and `begin` count the arrays' elements."""

    def emit(context, builder, signature, arguments):
        kinds = signature.args
        into = context.make_array(kinds[0])(context, builder, arguments[0]).data
        start = context.make_array(kinds[2])(context, builder, arguments[2]).data
        into = builder.gep(into, [context.cast(builder, arguments[1], kinds[1], types.intp)])
        start = builder.gep(start, [context.cast(builder, arguments[3], kinds[3], types.intp)])
        cgutils.raw_memcpy(builder, into, start, context.cast(builder, arguments[4], kinds[4], types.intp), 1)
        return context.get_dummy_value()

    return types.void(target, to, source, begin, count), emit
