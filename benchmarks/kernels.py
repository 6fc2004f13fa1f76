"""Matrix products and attention of the kernels, beside what torch and the `gguf` package offer for the same work.

python benchmarks/kernels.py [--only products|attention] [--kinds Q4_1,INT4] [--rows 1,4,16,256] [--ggml DIR] [--json]

Products: activations float32 [rows, columns] times packed weights, the rounding of the activations to 16 bits included,
or to 8 with `--precision fast`. Kinds whose scales belong to any number of columns have `--group` of them. Peers, on
the same numbers: torch's bfloat16 `linear`; for INT4 its `_weight_int4pack_mm_for_cpu`, bfloat16 activations and
scales; for types of GGUF llama.cpp's (`--ggml`: where its libraries lie), and the straightforward reader,
`gguf.quants.dequantize` and a float32 product in NumPy.
Attention: one new token over paged K and V of 3 KV heads and 9 query heads of 64 values; the peer gathers the blocks
and calls torch's `scaled_dot_product_attention`.

Every contender walks through copies of its weights (or layers of its cache) that together exceed the last-level cache,
as in a model; ours is called from compiled code and the peers from Python, as each is in an engine. GB/s counts the
bytes of the weights (or of K and V) once, `of copy` is that as a share of what the C library's copy moves with as many
threads (read and written bytes), GFLOP/s two operations for each weight and row, or for each value of K and V
and head. Results are compared before anything is measured.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numba
import numpy as np
from ggml_product import ggml_product
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from measuring import copy_bandwidth, memory_bandwidth, numbers, parser, report, rounds
from numba import njit
from sections import shared

from prolepsis.kernels.attention_parts import PART
from prolepsis.kernels.cells import CELL, CODES, PLANES, RECORD
from prolepsis.kernels.kinds import KINDS
from prolepsis.kernels.kv_pool import KVPool
from prolepsis.kernels.paged_attention import Tiles, attend_item, merge_shares, plan_attention
from prolepsis.kernels.products import need
from prolepsis.kernels.qmatmul import (
    NATURAL,
    OFFSET,
    WIDTH,
    Activations,
    Weights,
    count_tiles,
    multiply_tiles,
    quantise,
)
from prolepsis.kernels.rows import DTYPE_BF16
from prolepsis.kernels.team import JOB
from prolepsis.quant.gguf_types import LAYOUTS, encoded
from prolepsis.quant.matrices import Placed, packed
from prolepsis.quant.matrix import Codes, Form, HeldMatrix, whole

HAVE_TORCH = find_spec("torch") is not None
SHAPES = [(576, 576), (1536, 576), (3072, 576), (576, 1536), (4096, 4096)]  # rows x columns of the weights
FAST_KINDS = ["Q4_0", "Q4_1", "Q4_K", "INT4", "Q8_0", "Q6_K"]
KV_HEADS, GROUP, HEAD_DIM, BLOCK = 3, 3, 64, 32
MOST_COPIES = 400
TOLERANCE = 0.05  # of the largest output: bfloat16 is within it


# Parameters of a section, behind `team.JOB`.
_STEP, _COPY, _SHARE, _SHARES, _WIDTH, _PAIRS, _SPAN = range(JOB, JOB + 7)
_ITEMS_A_THREAD = 8
_ROWS_AN_ITEM = 8


@njit
def _prepare_product(control, step, threads, work):
    """Even steps round the activations, odd ones multiply, each time with the next copy of the weights."""
    weights, _, out, _ = work
    if step % 2 == 0:
        control[_SHARE] = 0
        return (out.shape[0] + _ROWS_AN_ITEM - 1) // _ROWS_AN_ITEM
    tiles = count_tiles(weights, step // 2, 1)
    share = (tiles + _ITEMS_A_THREAD * threads - 1) // (_ITEMS_A_THREAD * threads)
    control[_COPY], control[_SHARE] = step // 2, share
    return (tiles + share - 1) // share


@njit
def _run_product(control, item, work):
    weights, activations, out, in_bytes = work
    rows, share = out.shape[0], control[_SHARE]
    if share == 0:
        for row in range(item * _ROWS_AN_ITEM, min((item + 1) * _ROWS_AN_ITEM, rows)):
            quantise(activations, row, weights.matrices[0, WIDTH], in_bytes, weights.orders, NATURAL)
        return
    multiply_tiles(
        weights, control[_COPY], 1, item * share, share, activations, rows, out.reshape(-1), out.shape[1], in_bytes
    )  # fmt: skip


@njit
def _prepare_attention(control, step, threads, work):
    """Even steps attend, in the next layer; odd ones merge what was spread over threads."""
    pool, tiles, _, partial, _, _ = work
    control[_STEP] = step
    if step % 2 == 1:
        return 1
    pairs, shares, span, width = plan_attention(pool, tiles, 1, GROUP, threads, partial.size, False)
    control[_PAIRS], control[_SHARES], control[_SPAN], control[_WIDTH] = pairs, shares, span, width
    control[_COPY] = step // 2
    return pairs * ((shares + span - 1) // span)


@njit
def _run_attention(control, item, work):
    pool, tiles, q, partial, partial_state, out = work
    shares, width = control[_SHARES], control[_WIDTH]
    if control[_STEP] % 2 == 0:
        attend_item(
            pool, tiles, control[_COPY], GROUP, 1, item, shares, control[_SPAN], width, q, partial, partial_state, out,
            False,
        )  # fmt: skip
    elif shares > 1:
        merge_shares(pool, tiles, control[_PAIRS], shares, width, GROUP, partial, partial_state, out, False)


def random_matrix(kind: str, rows: int, columns: int, group: int, random: np.random.Generator) -> HeldMatrix:
    """Random codes under scales of about one size."""
    told = KINDS[kind]
    form = Form(kind, columns, 0 if told.group else group)
    groups = -(-columns // (told.group or group))

    def halves() -> np.ndarray:
        return random.uniform(-0.01, 0.01, (rows, groups)).astype(np.float16)

    def parts() -> np.ndarray:
        return random.integers(1, 16, (rows, columns // told.part))

    part = Codes(
        random.integers(0, 1 << told.bits, (rows, columns), dtype=np.uint8),
        halves(),
        halves() if told.minimums else None,
        None if told.group else np.full((rows, groups), 1 << told.bits - 1, np.uint8),
        parts().astype(np.int8) if told.part else None,
        parts().astype(np.uint8) if told.part and told.minimums else None,
    )
    return HeldMatrix((rows, columns), (form,), (part,))


Product = tuple[Callable[[], list[np.ndarray]], int, int]
"""Work that does `copies` products and returns outputs, the copies, and the bytes of one copy of the weights."""


def our_product(matrix: HeldMatrix, x: np.ndarray, arguments: argparse.Namespace) -> Product:
    """The engine's own product."""
    one, in_bytes, rows = packed([Placed(matrix)]), arguments.precision == "fast", len(x)
    size = one.data.size
    copies = _copies(size, arguments.working_set)
    matrices = np.repeat(one.matrices, copies, axis=0)
    matrices[:, OFFSET] = np.arange(copies) * size
    weights = Weights(np.tile(one.data, copies), matrices, one.orders)
    cells = x.size // CELL
    activations = Activations(x.reshape(-1), np.empty(PLANES * x.size, np.int8), np.empty(cells * RECORD, np.int32))
    out = np.empty((rows, matrix.shape[0]), np.float32)
    need(np.array([CODES[matrix.forms[0].kind]]), in_bytes)
    run = shared(_prepare_product, _run_product, arguments.threads, weights, activations, out, in_bytes)

    def work() -> list[np.ndarray]:
        run(2 * copies)
        return [out]

    return work, copies, size


def gguf_product(matrix: HeldMatrix, x: np.ndarray) -> Product:
    """What a reader of GGUF files can do with that format's package: dequantise, and multiply in float32."""
    kind = matrix.forms[0].kind
    raw = encoded(kind, matrix.parts[0])
    return lambda: [x @ dequantize(raw, GGMLQuantizationType[kind]).T], 1, raw.nbytes


def llama_cpp_product(matrix: HeldMatrix, x: np.ndarray, arguments: argparse.Namespace) -> Product:
    """llama.cpp's own, of the same bytes as a GGUF file has, laid out as it does when it loads a model."""
    raw = encoded(matrix.forms[0].kind, matrix.parts[0])
    copies = _copies(raw.nbytes, arguments.working_set)
    work = ggml_product(arguments.ggml, matrix.forms[0].kind, raw, x, copies, arguments.threads)
    return work, copies, raw.nbytes


def torch_int4_product(matrix: HeldMatrix, x: np.ndarray, arguments: argparse.Namespace) -> Product:
    """torch's product of 4-bit weights with a scale and a zero point for each group, and bfloat16 activations."""
    import torch

    part, group = matrix.parts[0], matrix.forms[0].group
    codes = torch.from_numpy(part.codes.astype(np.int32))
    weights = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    # torch's weight is (code - 8) * scale + zero, and ours (code - zero point) * scale.
    zeros = (8.0 - part.zeros.astype(np.float32)) * part.scales.astype(np.float32)
    grid = np.stack([part.scales.astype(np.float32), zeros], axis=-1).transpose(1, 0, 2)
    scales, activations = torch.from_numpy(grid.copy()).bfloat16(), torch.from_numpy(x).bfloat16()
    size = weights.nbytes + scales.nbytes
    held = [(weights.clone(), scales.clone()) for _ in range(_copies(size, arguments.working_set))]

    def work() -> list[np.ndarray]:
        outputs = [torch.ops.aten._weight_int4pack_mm_for_cpu(activations, one, group, grid) for one, grid in held]
        return [outputs[-1].float().numpy()]

    return work, len(held), size


def torch_product(dense: np.ndarray, x: np.ndarray, copies: int) -> Product:
    """torch's product with weights and activations in bfloat16."""
    import torch

    weights = [torch.from_numpy(dense).bfloat16() for _ in range(copies)]
    activations = torch.from_numpy(x).bfloat16()

    def work() -> list[np.ndarray]:
        outputs = [torch.nn.functional.linear(activations, one) for one in weights]
        return [outputs[-1].float().numpy()]

    return work, copies, 2 * dense.size


def measure_products(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each kind, shape, number of activation rows and contender."""
    random = np.random.default_rng(0)
    for kind in arguments.kinds:
        for height, columns in arguments.shapes:
            if columns % max(KINDS[kind].group, CELL):
                continue  # blocks of 256 do not divide 576 columns: no such tensor exists
            matrix = random_matrix(kind, height, columns, arguments.group, random)
            for rows in arguments.rows:
                x = random.normal(size=(rows, columns)).astype(np.float32)
                yield from _one_product(matrix, x, arguments)


def _one_product(matrix: HeldMatrix, x: np.ndarray, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    dense, kind = whole(matrix), matrix.forms[0].kind
    expected = x @ dense.T
    contenders = {"prolepsis": our_product(matrix, x, arguments)}
    if arguments.ggml is not None and kind in LAYOUTS:
        contenders["llama.cpp"] = llama_cpp_product(matrix, x, arguments)
    if not arguments.alone and kind in LAYOUTS:
        contenders["gguf + float32"] = gguf_product(matrix, x)
    if not arguments.alone and HAVE_TORCH:
        contenders["torch bf16"] = torch_product(dense, x, _copies(2 * dense.size, arguments.working_set))
        if kind == "INT4":
            contenders["torch int4pack"] = torch_int4_product(matrix, x, arguments)
    for name, (work, _, _) in contenders.items():
        _compare(f"{kind} product of {name}", work()[-1], expected)
    seconds = rounds({name: work for name, (work, _, _) in contenders.items()}, arguments.runs)
    for name, (_, copies, size) in contenders.items():
        value = seconds[name] / copies
        yield {
            "work": f"{kind} {dense.shape[0]}x{dense.shape[1]}",
            "rows": len(x),
            "contender": name,
            "us": value * 1e6,
            "GB/s": size / value / 1e9,
            "of copy": size / value / arguments.copy,
            "GFLOP/s": 2 * dense.size * len(x) / value / 1e9,
        }


def measure_attention(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each length of context and contender."""
    random = np.random.default_rng(1)
    for tokens in arguments.contexts:
        blocks = -(-tokens // BLOCK)
        size = 2 * 2 * blocks * BLOCK * KV_HEADS * HEAD_DIM
        layers = min(_copies(size, arguments.working_set), 64)
        shape = (layers, blocks, KV_HEADS, BLOCK, HEAD_DIM)
        k, v = (_bf16(random.normal(size=shape)) for _ in range(2))
        q = random.normal(size=(KV_HEADS, 1, GROUP, HEAD_DIM)).astype(np.float32)
        table = random.permutation(blocks).astype(np.int32)
        contenders = {"prolepsis": our_attention(k, v, q, table, tokens, arguments.threads)}
        if HAVE_TORCH:
            theirs = torch_attention(k, v, q, table, tokens)
            _compare("attention", contenders["prolepsis"](), theirs())
            contenders["torch gather + SDPA"] = theirs
        for name, value in rounds(contenders, arguments.runs).items():
            yield {
                "work": f"attention, {tokens} tokens",
                "rows": 1,
                "contender": name,
                "us": value / layers * 1e6,
                "GB/s": size * layers / value / 1e9,
                "of copy": size * layers / value / arguments.copy,
                "GFLOP/s": 4 * tokens * KV_HEADS * GROUP * HEAD_DIM * layers / value / 1e9,
            }


def our_attention(
    k: np.ndarray, v: np.ndarray, q: np.ndarray, table: np.ndarray, tokens: int, threads: int
) -> Callable[[], np.ndarray]:
    """Attention in every layer, as one call; returns the last. k, v: uint16 [layers, blocks, heads, block, dim]."""
    transposed = np.ascontiguousarray(k.swapaxes(3, 4))
    none = np.empty(0, np.uint16)
    pool = KVPool(transposed.reshape(-1), v.reshape(-1), none, none, len(table), KV_HEADS, HEAD_DIM, BLOCK, DTYPE_BF16)
    tiles = Tiles(*(np.array([value], np.int64) for value in (0, 1, tokens - 1, 0)), table[None])
    out = np.empty(KV_HEADS * GROUP * HEAD_DIM, np.float32)
    scaled = (q * np.float32(HEAD_DIM**-0.5)).reshape(-1)
    shares = KV_HEADS * -(-tokens // PART)
    partial = np.empty(shares * GROUP * HEAD_DIM, np.float32)
    partial_state = np.empty(shares * 2 * GROUP, np.float32)
    run = shared(_prepare_attention, _run_attention, threads, pool, tiles, scaled, partial, partial_state, out)

    def work() -> np.ndarray:
        run(2 * len(k))
        return out

    return work


def torch_attention(
    k: np.ndarray, v: np.ndarray, q: np.ndarray, table: np.ndarray, tokens: int
) -> Callable[[], np.ndarray]:
    """The same with torch: blocks gathered by their numbers, then one fused attention call a layer."""
    import torch

    keys, values = (torch.from_numpy(part.view(np.int16)).view(torch.bfloat16) for part in (k, v))
    query = torch.from_numpy(q).bfloat16().reshape(1, KV_HEADS * GROUP, 1, HEAD_DIM)
    index = torch.from_numpy(table.astype(np.int64))

    def gathered(pool: "torch.Tensor") -> "torch.Tensor":
        return pool[index].transpose(0, 1).reshape(1, KV_HEADS, -1, HEAD_DIM)[:, :, :tokens]

    def work() -> np.ndarray:
        outputs = [
            torch.nn.functional.scaled_dot_product_attention(
                query, gathered(keys[layer]), gathered(values[layer]), enable_gqa=True
            )
            for layer in range(len(keys))
        ]
        return outputs[-1].float().numpy().reshape(-1)

    return work


def _bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _copies(size: int, working_set: int) -> int:
    return max(1, min(MOST_COPIES, -(-working_set * 1_000_000 // size)))


def _compare(what: str, result: np.ndarray, expected: np.ndarray) -> None:
    error = float(np.abs(result - expected).max() / np.abs(expected).max())
    if not error < TOLERANCE:
        sys.exit(f"{what}: results differ by {error:.1%} of the largest; nothing was measured")


def main() -> None:
    """Measure what was asked for."""
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--only", choices=["products", "attention"])
    flags.add_argument("--kinds", type=lambda text: text.split(","), default=FAST_KINDS, metavar="KIND,...")
    flags.add_argument("--group", type=int, default=128, help="columns that share a scale, where kinds leave it free")
    flags.add_argument("--precision", choices=["high", "fast"], default="high")
    flags.add_argument("--ggml", type=Path, metavar="DIR", help="llama_cpp/lib of llama-cpp-python, which takes part")
    flags.add_argument("--alone", action="store_true", help="no peers beside products")
    flags.add_argument("--rows", type=numbers, default=[1, 4, 16, 256], metavar="N,N,...")
    flags.add_argument("--shapes", type=_shapes, default=SHAPES, metavar="RxC,...")
    flags.add_argument("--contexts", type=numbers, default=[512, 2048, 8192], metavar="N,N,...")
    flags.add_argument("--working-set", type=int, default=128, metavar="MB", help="weights or KV walked through")
    arguments = flags.parse_args()
    numba.set_num_threads(arguments.threads)
    if HAVE_TORCH:
        import torch

        torch.set_num_threads(arguments.threads)
    else:
        print("torch is not installed: its columns are missing", file=sys.stderr)
    bandwidth = round(memory_bandwidth(arguments.runs) / 1e9, 1)
    arguments.copy = copy_bandwidth(arguments.threads, arguments.runs)
    rows: list[dict[str, Any]] = []
    if arguments.only != "attention":
        rows += measure_products(arguments)
    if arguments.only != "products":
        rows += measure_attention(arguments)
    report("kernels", rows, arguments, memory_gb_s=bandwidth, copy_gb_s=round(arguments.copy / 1e9, 1))


def _shapes(text: str) -> list[tuple[int, ...]]:
    return [tuple(int(side) for side in shape.split("x")) for shape in text.split(",")]


if __name__ == "__main__":
    main()
