"""Paged attention against a float64 softmax, and its freedom from how the work is cut."""

import numpy as np
import pytest
from attention_cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st

from prolepsis.coding.cache_dtypes import FORMATS, TOKEN_DTYPES, from_scalars
from prolepsis.kernels.attention_parts import PART

NARROW = [dtype for dtype in TOKEN_DTYPES if FORMATS[dtype].bits < 16]

CONTEXTS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 143, 255, 256, 257, 384, 500, 639, 641, 700)


# The bound of `Case.reference` holds if all roundings err the same way. In practice they cancel, and a result that used
# more than this share of it would have been rounded to fewer bits than float32's somewhere.
USED = 0.1


def check(case, **how):
    out = case.run(**how)
    exact, bound = case.reference()
    share = np.abs(out - exact) / bound
    assert share.max() <= (1 if case.fast else USED), f"{share.max():.3f} of the bound"


both = pytest.mark.parametrize("fast", [False, True], ids=["high", "fast"])
every_arithmetic = pytest.mark.parametrize(
    ("dtype", "fast"), [("bf16", False), ("fp16", False), ("bf16", True)], ids=["bf16", "fp16", "fast"]
)


@every_arithmetic
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("context", CONTEXTS)
def test_one_new_token(context, block_size, dtype, fast):
    rng = np.random.default_rng(context)
    check(Case.random(rng, [context], [1], dtype=dtype, fast=fast), block_size=block_size, rng=rng)


@every_arithmetic
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_shapes_of_heads(group, dim, dtype, fast):
    rng = np.random.default_rng(group * dim)
    check(Case.random(rng, [150, 33], [20, 1], group=group, dim=dim, dtype=dtype, fast=fast), rng=rng)


@both
@pytest.mark.parametrize("rows", [1, 5, 8, 9, 70])
def test_several_sequences_in_one_call(rows, fast):
    rng = np.random.default_rng(rows)
    contexts = [rows + extra for extra in (0, 1, 130, 14, 290)]
    for block_size in (16, 32):
        check(Case.random(rng, contexts, [rows, 1, rows, 1, rows], fast=fast), block_size=block_size, rng=rng)


@both
def test_a_whole_prompt_at_once(fast):
    rng = np.random.default_rng(1)
    check(Case.random(rng, [300], [300], kv_heads=3, fast=fast), rng=rng)


@both
@pytest.mark.parametrize("spread", [0.0, 1e-3, 5.0, 30.0])
def test_flat_and_peaked_softmax(spread, fast):
    """Scores that are all equal, and scores hundreds apart, where most weights vanish."""
    rng = np.random.default_rng(2)
    check(Case.random(rng, [400], [9], spread=spread, fast=fast), rng=rng)


@both
def test_a_later_part_that_outweighs_all_before(fast):
    """The running maximum moves at every part boundary, up and down."""
    rng = np.random.default_rng(3)
    case = Case.random(rng, [5 * PART], [4], fast=fast)
    for part in range(5):
        case.keys[0][part * PART : (part + 1) * PART] = case.keys[0][0]
        case.keys[0][part * PART + 3] = np.uint16(0x4000 + 0x20 * (part % 3))
    check(case, rng=rng)


@pytest.mark.parametrize("filler", [0xFFFF, 0x7FC0, 0x7F80, 0x7C00, 0xFF80, 0x7F7F])
def test_what_lies_in_unused_slots_never_shows(filler):
    rng = np.random.default_rng(4)
    for dtype, fast in (("bf16", False), ("fp16", False), ("bf16", True)):
        case = Case.random(rng, [1, 17, 130, 301], [1, 3, 1, 40], dtype=dtype, fast=fast)
        for block_size in (16, 32):
            clean = case.run(block_size, np.random.default_rng(5), filler=0)
            assert np.isfinite(clean).all()
            assert np.array_equal(case.run(block_size, np.random.default_rng(5), filler=filler), clean)


@both
def test_a_nan_in_a_visible_key_or_value_shows(fast):
    rng = np.random.default_rng(6)
    for which in ("keys", "values"):
        for token in (0, 131, 299):
            case = Case.random(rng, [300], [2], fast=fast)
            getattr(case, which)[0][token, 0] = 0x7FC0
            out = case.run().reshape(2, 2, 3, 64)
            seen = [token <= 298, True]
            for row in range(2):
                assert np.isnan(out[row, 0]).all() == seen[row]
                assert np.isfinite(out[row, 1]).all()


@both
def test_bits_do_not_depend_on_blocks_cuts_or_company(fast):
    rng = np.random.default_rng(7)
    case = Case.random(rng, [290, 1, 129, 33], [200, 1, 2, 33], fast=fast)
    whole = case.run(32, np.random.default_rng(8))
    for block_size in (16, 32, 64, 128):
        for seed in range(3):
            assert np.array_equal(case.run(block_size, np.random.default_rng(seed)), whole)
    for rows_a_tile in (1, 2, 5, 8, 40):
        assert np.array_equal(case.run(rows_a_tile=rows_a_tile), whole)
    row = 0
    for sequence, queries in enumerate(case.queries):
        context = len(case.keys[sequence])
        for i in {0, len(queries) // 2, len(queries) - 1}:
            end = context - len(queries) + i + 1
            alone = Case(
                case.dtype, case.group, [case.keys[sequence][:end]], [case.values[sequence][:end]],
                [queries[i : i + 1]], fast=fast,
            )  # fmt: skip
            for threads in (1, 2):  # one thread takes the context as a whole, two in parts
                assert np.array_equal(alone.run(threads=threads)[0], whole[row + i])
        row += len(queries)


@both
def test_too_little_room_for_shares_changes_nothing(fast):
    case = Case.random(np.random.default_rng(9), [700], [1], fast=fast)
    assert np.array_equal(case.run(room=64), case.run())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_narrow_values_are_read_as_the_nearest_bf16(data):
    """The result has the bits of a bf16 cache with what `as_attended` says; any pattern may be stored, NaN too."""
    dtype, rng = data.draw(st.sampled_from(NARROW)), np.random.default_rng(data.draw(st.integers(0, 99)))
    group, dim, heads = data.draw(st.sampled_from([1, 3, 8])), data.draw(st.sampled_from([32, 64, 96, 128])), 2
    contexts = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    rows = [data.draw(st.integers(1, min(n, 40))) for n in contexts]
    stored = []
    for n in contexts:
        scalars = rng.integers(0, 1 << 16, (1, 2, n, heads, dim)).astype(np.uint16) & (0x8000 | FORMATS[dtype].largest)
        stored.append(from_scalars(scalars, rng.integers(0, 1 << 16, (1, 2, n, heads)).astype(np.uint16), dtype))
    queries = [rng.standard_normal((n, heads * group, dim)).astype(np.float32) for n in rows]
    case = Case.of(stored, queries, group, dtype)
    how = {"threads": data.draw(st.sampled_from([1, 2])), "filler": data.draw(st.sampled_from([0xFFFF, 0x7C7C]))}
    case.fast = dtype != "fp8_e5m2" and data.draw(st.booleans())
    expected = case.widened().run(block_size=32)
    for block_size in (16, 32, 64):
        assert np.array_equal(case.run(block_size, rng, **how), expected)


@pytest.mark.parametrize("dtype", ["fp16", "fp8_e5m2"])
def test_what_is_no_bf16_is_attended_in_float32(dtype):
    case = Case.random(np.random.default_rng(10), [200], [3], dtype=dtype)
    precise = case.run()
    case.fast = True
    assert np.array_equal(case.run(), precise)


def test_subnormal_keys_and_values_count_as_0():
    case = Case.random(np.random.default_rng(11), [40], [1], kv_heads=1, group=1, dim=32, fast=True)
    plain = case.run()
    for stored in (case.keys, case.values):
        stored[0][stored[0] & 0x7FFF < 0x3D00] &= 0x807F
    subnormal = case.run()
    for stored in (case.keys, case.values):
        stored[0][stored[0] & 0x7F80 == 0] = 0
    assert np.array_equal(subnormal, case.run())
    assert not np.array_equal(subnormal, plain)
