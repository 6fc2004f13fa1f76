"""The vector building blocks, each through a small function compiled around it."""

from typing import Any

import numpy as np
import pytest
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from prolepsis.kernels import byte_dot, llvm
from prolepsis.kernels.cpu import has
from prolepsis.kernels.rows import DTYPES, store_head

FLOAT_KINDS = {np.dtype(np.float32): llvm.FLOATS, np.dtype(np.int32): llvm.INTS, np.dtype(np.uint16): llvm.HALFS}


def over_vectors(emit, source, target):
    """Compiled f(x, out): out = emit(x) for every vector of 16 of x; dtypes as given."""

    @intrinsic
    def one(typing, x, out, at):
        def codegen(context, b, signature, args):
            px, po = (llvm.data(context, b, signature.args[i], args[i]) for i in (0, 1))
            value = llvm.load(b, FLOAT_KINDS[np.dtype(source)], px, llvm.scaled(b, args[2], np.dtype(source).itemsize))
            llvm.store(b, emit(b, value), po, llvm.scaled(b, args[2], np.dtype(target).itemsize))
            return context.get_dummy_value()

        return types.void(x, out, types.int64), codegen

    @njit
    def every(x, out):
        for at in range(0, x.size, 16):
            one(x, out, at)

    def run(values: Any) -> Any:
        values = np.asarray(values, source)
        padded = np.zeros(-(-values.size // 16) * 16, source)
        padded[: values.size] = values
        out = np.zeros(padded.size, target)
        every(padded, out)
        return out[: values.size]

    return run


def reduced(combine, dtype):
    """Compiled f(x [16]) -> the tree reduction of x, through memory so that nothing is folded away."""
    kind, scalar = (llvm.FLOATS, types.float32) if dtype == np.float32 else (llvm.INTS, types.int32)

    @intrinsic
    def one(typing, x, at):
        def codegen(context, b, signature, args):
            base = llvm.data(context, b, signature.args[0], args[0])
            return llvm.tree(b, lambda u, v: combine(b, u, v), llvm.load(b, kind, base, llvm.scaled(b, args[1], 4)))

        return scalar(x, types.int64), codegen

    @njit
    def every(x, out):
        for i in range(out.size):
            out[i] = one(x, 16 * i)

    return every


def halved(function, rows):
    """The order of `llvm.tree`, in NumPy: [n, 16] to [n]."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = function(rows[:, :half], rows[:, half:])
    return rows[:, 0]


@pytest.mark.parametrize(
    ("combine", "function", "dtype"),
    [
        (lambda b, u, v: b.add(u, v), np.add, np.int32),
        (lambda b, u, v: b.select(b.icmp_signed(">", u, v), u, v), np.maximum, np.int32),
        (lambda b, u, v: b.fadd(u, v), np.add, np.float32),
        (lambda b, u, v: llvm.maximum(b, u, v), np.maximum, np.float32),
    ],
    ids=["int sum", "int maximum", "float sum", "float maximum"],
)
def test_tree_meets_every_lane_once_in_its_order(combine, function, dtype):
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((500, 16)) * 1000).astype(dtype)
    rows[:16] = np.eye(16, dtype=dtype)  # each lane counts, and once
    out = np.zeros(len(rows), dtype)
    reduced(combine, dtype)(rows.reshape(-1), out)
    assert np.array_equal(out, halved(function, rows))


@pytest.mark.parametrize("least", [-126.0, 14.0])
def test_power_of_two(least):
    power = over_vectors(lambda b, x: llvm.power_of_two(b, x, least), np.float32, np.float32)
    x = np.linspace(least, 127, 400_001).astype(np.float32)
    assert np.abs(power(x) / 2.0 ** x.astype(np.float64) - 1).max() < 3e-6
    whole = np.arange(least, 128)
    assert np.array_equal(power(whole), 2.0**whole)
    below = np.nextafter(np.float32(least), np.float32(-np.inf))
    assert power([below, least - 1, -1e4, -3e38, -np.inf]).tolist() == [0.0] * 5
    assert np.isnan(power([np.nan, -np.nan])).all()


def test_exp_over_its_range():
    exp = over_vectors(llvm.exp, np.float32, np.float32)
    x = np.unique(np.concatenate([np.linspace(-87, 88, 400_001), -np.geomspace(1e-30, 87, 50_000)]).astype(np.float32))
    exact = np.exp(x.astype(np.float64))
    assert np.abs(exp(x) / exact - 1).max() < 2e-7
    assert exp([0.0, -0.0]).tolist() == [1.0, 1.0]


def test_exp_outside_its_range():
    exp = over_vectors(llvm.exp, np.float32, np.float32)
    below = np.nextafter(np.float32(-87), np.float32(-np.inf))
    assert exp([below, -88, -1000, -3e38, -np.inf]).tolist() == [0.0] * 5
    assert np.isnan(exp([np.nan, -np.nan])).all()
    assert exp([-87.0])[0] > 0


def test_silu():
    silu = over_vectors(llvm.sigmoid_weighted, np.float32, np.float32)
    x = np.linspace(-87, 100, 100_001).astype(np.float32)
    exact = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    assert (np.abs(silu(x) - exact) <= 4e-7 * np.abs(exact)).all()
    assert np.abs(silu([-88.0, -100, -3e38]) / [-88.0, -100, -3e38]).max() <= np.exp(-87.9)
    assert np.isnan(silu([np.nan])).all()
    assert silu([np.inf])[0] == np.inf


def test_half_to_float_of_every_pattern():
    bits = np.arange(1 << 16).astype(np.uint16)
    widened = over_vectors(llvm.half_to_float, np.uint16, np.float32)(bits)
    expected = bits.view(np.float16).astype(np.float32)
    assert np.array_equal(widened, expected, equal_nan=True)
    assert np.array_equal(np.signbit(widened), np.signbit(expected))


def test_brain_to_float_of_every_pattern():
    bits = np.arange(1 << 16).astype(np.uint16)
    widened = over_vectors(llvm.brain_to_float, np.uint16, np.float32)(bits)
    assert np.array_equal(widened.view(np.uint32), bits.astype(np.uint32) << 16)


def around(values):
    """Each float32, its two neighbours, and the midpoint with the next of `values` and its neighbours."""
    values = np.asarray(values, np.float32)
    middle = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    points = np.concatenate([values, middle])
    up, down = np.float32(np.inf), np.float32(-np.inf)
    return np.concatenate([points, np.nextafter(points, up), np.nextafter(points, down)])


def brain_reference(x):
    """Round to bfloat16, ties to even, in integers; NaNs keep their upper bits and are made quiet."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)


def stored(dtype, x):
    """x rounded to a cache dtype by the kernel that fills the cache."""

    @njit
    def run(code, x, out):
        store_head(code, x, 0, x.size, out, 0)

    padded = np.zeros(-(-x.size // 16) * 16, np.float32)
    padded[: x.size] = x
    out = np.zeros(padded.size, np.uint16)
    run(DTYPES[dtype], padded, out)
    return out[: x.size]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_rounding_to_bf16():
    finite = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
    specials = np.array([np.inf, 3.4028235e38, 3.39e38, np.nan], np.float32)
    payloads = np.array([0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0x7F80FFFF], np.uint32).view(np.float32)
    x = np.concatenate([around(finite), specials, payloads])
    x = np.concatenate([x, -x])
    out = stored("bf16", x)
    assert np.array_equal(out, brain_reference(x))
    assert np.array_equal((out & 0x7FFF) > 0x7F80, np.isnan(x))
    bits = np.arange(1 << 16, dtype=np.uint32)
    quiet = np.where((bits & 0x7FFF) > 0x7F80, bits | 0x40, bits)
    assert np.array_equal(stored("bf16", (bits << 16).view(np.float32)), quiet), "what is bf16 already stays"


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_rounding_to_fp16():
    finite = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    specials = np.array([np.inf, 65519.996, 65520, 65536, 1e30, 1e-45, 2.0**-25, np.nan], np.float32)
    specials = np.concatenate([specials, np.nextafter(specials[:-1], np.float32(0))])
    x = np.concatenate([around(finite), specials])
    x = np.concatenate([x, -x])
    out, expected = stored("fp16", x), x.astype(np.float16)
    nan = np.isnan(x)
    assert np.array_equal(out[~nan], expected[~nan].view(np.uint16))
    assert np.isnan(out[nan].view(np.float16)).all()
    bits = np.arange(1 << 16).astype(np.uint16)
    number = ~np.isnan(bits.view(np.float16))
    assert np.array_equal(stored("fp16", bits.view(np.float16).astype(np.float32))[number], bits[number])


def dots(form, largest):
    """Compiled f(groups uint8 [8, 64], activations int8 [2, 8, 4], out int32 [2, 16]) by one form of `byte_dots`."""

    @intrinsic
    def emit(typing, groups, activations, out):
        def codegen(context, b, signature, args):
            pg, pa, po = (llvm.data(context, b, signature.args[i], args[i]) for i in range(3))
            weights = [llvm.load(b, llvm.BYTES, pg, llvm.I64(64 * g)) for g in range(8)]

            def activation(t, g):
                return b.bitcast(llvm.broadcast_at(b, llvm.INTS, pa, llvm.I64(32 * t + 4 * g)), llvm.BYTES)

            starts = [llvm.splat(llvm.INTS, 7 + t) for t in range(2)]
            for t, total in enumerate(form(b, starts, weights, activation, largest)):
                llvm.store(b, total, po, llvm.I64(64 * t))
            return context.get_dummy_value()

        return types.void(groups, activations, out), codegen

    @njit
    def run(groups, activations, out):
        emit(groups, activations, out)

    return run


FORMS = {
    "chosen": (True, byte_dot.byte_dots),
    "fused": (has("avx512vnni") or has("avxvnni"), lambda b, s, g, a, largest: byte_dot._fused(b, s, g, a)),
    "plain": (True, lambda b, s, g, a, largest: byte_dot._plain(b, s, g, a)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("largest", [15, 63, 255])
def test_byte_dots_are_exact_up_to_the_extremes(form, largest):
    available, function = FORMS[form]
    if not available:
        pytest.skip("this CPU has no such instruction")
    run = dots(function, largest)
    rng = np.random.default_rng(largest)
    for case in range(40):
        groups = rng.integers(0, largest + 1, (8, 64)).astype(np.uint8)
        activations = rng.integers(-128, 128, (2, 8, 4)).astype(np.int8)
        if case < 4:
            groups[:] = largest if case % 2 else groups
            activations[:] = 127 if case < 2 else -128
        out = np.zeros((2, 16), np.int32)
        run(groups, activations, out)
        lanes = groups.reshape(8, 16, 4).astype(np.int64)
        expected = np.einsum("gnk,tgk->tn", lanes, activations.astype(np.int64)) + np.array([[7], [8]])
        assert np.array_equal(out, expected)


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("largest", [15, 63, 255])
def test_paired_bytes_of_every_register_size_are_exact(size, largest, monkeypatch):
    if not has({16: "ssse3", 32: "avx2", 64: "avx512bw"}[size]):
        pytest.skip("this CPU has no such instruction")
    monkeypatch.setattr(byte_dot, "_fused_bytes", lambda: 0)
    monkeypatch.setattr(byte_dot, "_pair_bytes", lambda: size)
    test_byte_dots_are_exact_up_to_the_extremes("chosen", largest)


def brain_chain():
    """Compiled f(x, y, out): out[i] = the chain of `llvm.brain_dot` from 0 over the pairs x[:, i] and y[:, i]; uint32
    [n, 16] and float32 [16]."""

    @intrinsic
    def emit(typing, x, y, count, out):
        def codegen(context, b, signature, args):
            px, py, po = (llvm.data(context, b, signature.args[i], args[i]) for i in (0, 1, 3))
            total = cgutils.alloca_once_value(b, llvm.splat(llvm.FLOATS, 0.0))
            with cgutils.for_range(b, args[2]) as loop:
                pair = (llvm.load(b, llvm.INTS, p, llvm.scaled(b, loop.index, 64)) for p in (px, py))
                b.store(llvm.brain_dot(b, b.load(total), *pair), total)
            llvm.store(b, b.load(total), po, llvm.I64(0))
            return context.get_dummy_value()

        return types.void(x, y, types.int64, out), codegen

    @njit
    def run(x, y, out):
        emit(x, y, len(x), out)

    def chain(x, y):
        out = np.empty(16, np.float32)
        run(np.ascontiguousarray(x, np.uint32), np.ascontiguousarray(y, np.uint32), out)
        return out

    return chain


def pairs(upper, lower):
    """float32 that are bf16, as pairs in every lane."""
    bits = [np.float32(x).view(np.uint32) for x in (upper, lower)]
    return np.full((1, 16), bits[0] | bits[1] >> 16, np.uint32)


needs_brain_dots = pytest.mark.skipif(not llvm.has_brain_dots(), reason="this CPU has no such instruction")
brain_forms = pytest.mark.parametrize("form", [pytest.param("instruction", marks=needs_brain_dots), "generic"])


@brain_forms
def test_the_upper_product_is_added_first_and_each_sum_is_rounded(form, monkeypatch):
    if form == "generic":
        monkeypatch.setattr(llvm, "has_brain_dots", lambda: False)
    chain, large = brain_chain(), 2.0**24
    ones = pairs(1, 1)

    def dots(*x):
        return chain(np.concatenate([pairs(*pair) for pair in x]), np.repeat(ones, len(x), axis=0))[0]

    assert dots((large, 0), (1, 1)) == large, "one rounding would give large + 2"
    assert dots((large, 0), (1, -large)) == 0
    assert dots((large, 0), (-large, 1)) == 1
    assert dots((1.5, 0.25)) == 1.75
    subnormal = np.uint32(0x007F8000).view(np.float32)
    assert chain(pairs(subnormal, -subnormal), pairs(2.0**64, 2.0**14)).tolist() == [0] * 16


@needs_brain_dots
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_sums_of_products_are_the_same_without_the_instruction(monkeypatch):
    """Of any bf16, and factors as attention has them: 0, or at least 2^14. So no sum is a subnormal number."""
    instruction = brain_chain()
    instruction(pairs(1, 1), pairs(1, 1))
    monkeypatch.setattr(llvm, "has_brain_dots", lambda: False)
    generic, rng = brain_chain(), np.random.default_rng(0)
    for case in range(4000):
        count = int(rng.integers(1, 20))
        halfs = rng.integers(0, 1 << 16, (count, 16, 2))
        lowest, highest = ((0, 256), (0, 4), (120, 130))[case % 3]
        x = halfs & 0x807F | rng.integers(lowest, highest, halfs.shape) << 7
        y = rng.integers(0, 1 << 16, x.shape) & 0x807F | rng.integers(141, 141 + (2, 50)[case % 2], x.shape) << 7
        y[rng.random(y.shape) < 0.1] = 0
        if case % 5 == 0:  # what has been added is taken away again, but for the last bits
            x[count // 2 :], y[count // 2 :] = x[: count - count // 2] ^ 0x8000 ^ (case % 2), y[: count - count // 2]
        x, y = (z[..., 0] | z[..., 1] << 16 for z in (x, y))
        one, other = instruction(x, y), generic(x, y)
        nan = np.isnan(one)
        assert np.array_equal(nan, np.isnan(other))
        assert np.array_equal(one[~nan].view(np.uint32), other[~nan].view(np.uint32))
        assert not ((one != 0) & (np.abs(one) < 2.0**-126)).any()
