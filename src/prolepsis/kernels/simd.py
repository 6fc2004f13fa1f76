"""Explicit vectors inside Numba functions: a vector value type and the operations on it.

A `Vector` is an LLVM `<n x element>` held in registers; each function below is an intrinsic that emits one or two LLVM
instructions. Numba's own loops cannot express what these are for: a table lookup beside a store is never vectorised.

Arithmetic, shifts, loads and stores are generic LLVM and compile on every CPU. `gather`, `expand` and `compress` are
AVX-512 instructions that **abort the process** elsewhere: compile a function that calls them only where
`AVX512` is true.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from prolepsis.kernels import llvm
from prolepsis.kernels.cpu import has

AVX512 = has("avx512f", "avx512bw", "avx512dq", "avx512vl")

_ELEMENTS = {"i1": ir.IntType(1), "i8": llvm.I8, "i16": llvm.I16, "i32": llvm.I32, "i64": llvm.I64}
_SCALARS = {"i8": types.uint8, "i16": types.uint16, "i32": types.uint32, "i64": types.uint64}


class Vector(types.Type):
    """The Numba type of `lanes` integers of one width."""

    def __init__(self, element: str, lanes: int) -> None:
        self.element, self.lanes = element, lanes
        self.llvm = ir.VectorType(_ELEMENTS[element], lanes)
        super().__init__(name=f"Vector({element} x {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        super().__init__(manager, vector, vector.llvm)


I8x16, I16x16, I32x16 = Vector("i8", 16), Vector("i16", 16), Vector("i32", 16)
I32x8, I64x8 = Vector("i32", 8), Vector("i64", 8)


def _spread(context, builder, vector, kind, value):
    """`value` as it is when it is a vector, else in every lane."""
    if isinstance(kind, Vector):
        return value
    return llvm.broadcast(builder, vector.llvm, context.cast(builder, value, kind, _SCALARS[vector.element]))


def _pointer(context, builder, signature, arguments):
    """Address of element arguments[1] of the array arguments[0]."""
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.gep(data, [context.cast(builder, arguments[1], signature.args[1], types.intp)])


def _binary(name):
    @intrinsic
    def operation(typing, x, y):
        def emit(context, builder, signature, arguments):
            vector, other = signature.args
            return getattr(builder, name)(arguments[0], _spread(context, builder, vector, other, arguments[1]))

        return x(x, y), emit

    return operation


add, sub, mul = _binary("add"), _binary("sub"), _binary("mul")
bit_and, bit_or, bit_xor = _binary("and_"), _binary("or_"), _binary("xor")
shift_left, shift_right, shift_right_signed = _binary("shl"), _binary("lshr"), _binary("ashr")


def _comparison(operator):
    @intrinsic
    def operation(typing, x, y):
        def emit(context, builder, signature, arguments):
            vector, other = signature.args
            y = _spread(context, builder, vector, other, arguments[1])
            return builder.icmp_unsigned(operator, arguments[0], y)

        return Vector("i1", x.lanes)(x, y), emit

    return operation


less, at_least, not_equal = _comparison("<"), _comparison(">="), _comparison("!=")


@intrinsic
def select(typing, mask, x, y):
    """x where the mask is set, else y (a vector or a scalar)."""

    def emit(context, builder, signature, arguments):
        other = _spread(context, builder, signature.args[1], signature.args[2], arguments[2])
        return builder.select(arguments[0], arguments[1], other)

    return x(mask, x, y), emit


def converter(vector, name):
    """Function that turns a vector into `vector` lane by lane: name is "zext", "sext" or "trunc"."""

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


@intrinsic
def last(typing, x):
    """The highest lane, as uint32."""

    def emit(context, builder, signature, arguments):
        return builder.extract_element(arguments[0], llvm.I32(x.lanes - 1))

    return types.uint32(x), emit


@intrinsic
def count(typing, mask):
    """How many lanes of a mask are set, as int64."""

    def emit(context, builder, signature, arguments):
        bits = builder.bitcast(arguments[0], ir.IntType(mask.lanes))
        return builder.zext(builder.ctpop(bits), llvm.I64)

    return types.int64(mask), emit


def constant(lanes):
    """Function () -> the int32 vector of sixteen with these values."""

    @intrinsic
    def operation(typing):
        def emit(context, builder, signature, arguments):
            return ir.Constant(I32x16.llvm, list(lanes))

        return I32x16(), emit

    return operation


zeros, iota = constant([0] * 16), constant(range(16))


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


# --------------------------------------------------------------------------------------------- AVX-512 only


def _gatherer(vector, index_vector, name, scale):
    @intrinsic
    def operation(typing, array, index):
        def emit(context, builder, signature, arguments):
            data = llvm.data(context, builder, signature.args[0], arguments[0])
            everywhere = ir.Constant(ir.VectorType(ir.IntType(1), vector.lanes), [1] * vector.lanes)
            operands = [llvm.splat(vector.llvm, 0), data, arguments[1], everywhere, llvm.I32(scale)]
            return llvm.call(builder, f"llvm.x86.avx512.mask.gather.{name}.512", vector.llvm, operands)

        return vector(array, index), emit

    return operation


gather = _gatherer(I32x16, I32x16, "dpi", 4)  # (array of 32-bit elements, element indices)
gather_bytes = _gatherer(I32x16, I32x16, "dpi", 1)  # (uint8 array, byte offsets): 32 bits from each
gather_long = _gatherer(I64x8, I32x8, "dpq", 8)  # (array of 64-bit elements, 8 element indices)


def _mover(name):
    @intrinsic
    def operation(typing, x, mask):
        def emit(context, builder, signature, arguments):
            kind = x.llvm
            operands = [arguments[0], llvm.splat(kind, 0), arguments[1]]
            return llvm.call(builder, f"llvm.x86.avx512.mask.{name}.v16i32", kind, operands)

        return x(x, mask), emit

    return operation


expand = _mover("expand")  # the first lanes of x move, in order, to where the mask is set
compress = _mover("compress")  # the lanes where the mask is set move, in order, to the front
