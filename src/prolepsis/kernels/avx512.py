"""Vector operations that only CPUs with AVX-512 have.

They **abort the process** elsewhere, at compile time: compile a function that calls one only where `simd.AVX512` is
true.
"""

from llvmlite import ir
from llvmlite.binding import get_host_cpu_name
from numba import config
from numba.extending import intrinsic

from prolepsis.kernels import llvm
from prolepsis.kernels.simd import I32x16

# Where the CPU gathers by microcode, nothing else can be begun meanwhile, and single loads are faster.
_SINGLE_LOADS = (config.CPU_NAME or get_host_cpu_name()).startswith("znver")


def _load_each(builder, data, index):
    base = builder.bitcast(data, llvm.I32.as_pointer())
    pairs = builder.bitcast(index, ir.VectorType(llvm.I64, 8))
    # Nothing, but LLVM cannot see through it, and so leaves the vector in 8 moves instead of 16.
    opaque = ir.InlineAsm(ir.FunctionType(llvm.I64, [llvm.I64]), "", "=r,0", side_effect=False)
    result = ir.Constant(I32x16.llvm, ir.Undefined)
    for k in range(8):
        pair = builder.call(opaque, [builder.extract_element(pairs, llvm.I32(k))])
        places = builder.and_(pair, llvm.I64(0xFFFFFFFF)), builder.lshr(pair, llvm.I64(32))
        for lane, place in enumerate(places, 2 * k):
            result = builder.insert_element(result, builder.load(builder.gep(base, [place])), llvm.I32(lane))
    return result


@intrinsic
def gather(typing, array, index):
    """array[index] of an array of 32-bit elements; index: sixteen int32, none below 0."""

    def emit(context, builder, signature, arguments):
        data = llvm.data(context, builder, signature.args[0], arguments[0])
        if _SINGLE_LOADS:
            return _load_each(builder, data, arguments[1])
        everywhere = ir.Constant(ir.VectorType(ir.IntType(1), 16), [1] * 16)
        operands = [llvm.splat(I32x16.llvm, 0), data, arguments[1], everywhere, llvm.I32(4)]
        return llvm.call(builder, "llvm.x86.avx512.mask.gather.dpi.512", I32x16.llvm, operands)

    return I32x16(array, index), emit


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


@intrinsic
def look_up(typing, table, index):
    """table[index mod 32], lane by lane; both thirty-two int16."""

    def emit(context, builder, signature, arguments):
        return llvm.call(builder, "llvm.x86.avx512.permvar.hi.512", table.llvm, list(arguments))

    return table(table, index), emit


@intrinsic
def look_up_two(typing, lower, index, upper):
    """The table of 64 that is `lower` and `upper`, at index mod 64, lane by lane; all thirty-two int16."""

    def emit(context, builder, signature, arguments):
        return llvm.call(builder, "llvm.x86.avx512.vpermi2var.hi.512", lower.llvm, list(arguments))

    return lower(lower, index, upper), emit
