"""A model's weights, from a GGUF file into the form the kernels read."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import ModelFileError
from prolepsis.kernels.forward import DOWN, GATE_UP, QKV, Plan
from prolepsis.kernels.llvm import LANES
from prolepsis.kernels.qmatmul import Weights
from prolepsis.kernels.rope_table import inv_freq, rope_table
from prolepsis.kernels.tile import CELL, CELL_BYTES, KINDS
from prolepsis.model.config import ModelConfig
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.gguf_parser import GGUFTensor
from prolepsis.quant.packing import pack, packed_bytes

_ALIGNMENT = 64
# Products of a layer, in the order of `kernels.forward`: matrices that read the same input lie side by side.
_GROUPS = (("attn_q", "attn_k", "attn_v"), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",))


@dataclass
class _Matrix:
    tensor: GGUFTensor
    out_column: int = 0
    order: NDArray[np.intp] | None = None
    offset: int = field(default=0, init=False)


def load_plan(file: GGUFFile, config: ModelConfig, max_positions: int, fast: bool) -> Plan:
    """Pack every tensor of `file` and lay out the model for `kernels.forward.forward`.

    Raises ModelFileError for a tensor that is missing, of the wrong shape, or of a type that is not supported.
    """
    loader = _Loader(file, config)
    groups, norms = [], []
    for layer in range(config.num_layers):
        for group, names in enumerate(_GROUPS):
            groups.append((len(loader.matrices), len(names)))
            loader.add_group(group, [f"blk.{layer}.{name}.weight" for name in names])
        norms += [loader.vector(f"blk.{layer}.{name}_norm.weight") for name in ("attn", "ffn")]
    norms.append(loader.vector("output_norm.weight"))
    embedding = loader.add("token_embd.weight", config.vocab_size, config.hidden_size)
    head = embedding
    if not config.tied_embeddings:
        head = loader.add("output.weight", config.vocab_size, config.hidden_size)
    groups.append((head, 1))
    rope = config.rope
    divisors = np.full(rope.dim // 2, rope.scaling_factor)
    if rope.frequency_factors is not None:
        divisors *= rope.frequency_factors
    cos, sin = rope_table(np.arange(max_positions), inv_freq(rope.theta, rope.dim, divisors.tolist()))
    return Plan(
        weights=loader.pack(),
        groups=np.array(groups, np.int64),
        norms=np.concatenate(norms),
        cos=cos.reshape(-1),
        sin=sin.reshape(-1),
        embedding=embedding,
        layers=config.num_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_heads,
        rotary_dim=rope.dim,
        eps=np.float32(config.norm_eps),
        score_scale=np.float32(config.head_dim**-0.5),
        fast=fast,
    )


class _Loader:
    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.file = file
        self.config = config
        self.matrices: list[_Matrix] = []
        self._check_widths()

    def _check_widths(self) -> None:
        config = self.config
        for value, unit, what in (
            (config.hidden_size, CELL, "hidden size"),
            (config.intermediate_size, CELL, "MLP width"),
            (config.head_dim, CELL, "head dimension"),
            (config.rope.dim, CELL, "rotary dimension"),
        ):
            if value % unit:
                raise ModelFileError(
                    f"{self.file.path}: the {what} {value} is not a multiple of {unit}, which is not supported"
                )

    def _tensor(self, name: str, shape: tuple[int, ...], types: set[str]) -> GGUFTensor:
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{self.file.path}: tensor {name!r} is missing")
        if tensor.shape != shape:
            raise ModelFileError(f"{self.file.path}: tensor {name!r} has shape {tensor.shape}, expected {shape}")
        if tensor.type_name not in types:
            raise ModelFileError(
                f"{self.file.path}: tensor {name!r} is of type {tensor.type_name}, which is not supported; "
                f"supported here: {', '.join(sorted(types))}"
            )
        return tensor

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm's gains, float32 [hidden]."""
        return self._tensor(name, (self.config.hidden_size,), {"F32"}).data.view(np.float32)

    def add(self, name: str, rows: int, columns: int) -> int:
        """Queue a matrix for packing and return its index."""
        self.matrices.append(_Matrix(self._tensor(name, (rows, columns), set(KINDS))))
        return len(self.matrices) - 1

    def add_group(self, group: int, names: list[str]) -> None:
        """Queue the matrices of one product, each beginning where the one before it ends in the output."""
        config = self.config
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        columns = {QKV: config.hidden_size, GATE_UP: config.hidden_size, DOWN: config.intermediate_size}
        rows = {QKV: (query, key, key), GATE_UP: (config.intermediate_size,) * 2}
        out_column = 0
        for i, name in enumerate(names):
            height = rows[group][i] if group in rows else config.hidden_size
            matrix = self.matrices[self.add(name, height, columns.get(group, query))]
            matrix.out_column = out_column
            out_column += height
            if group == QKV and i < 2 and config.rope.style == "interleaved":
                matrix.order = _half_order(height // config.head_dim, config.head_dim, config.rope.dim)

    def pack(self) -> Weights:
        """Pack all queued matrices into one allocation, on all cores."""
        table = np.zeros((len(self.matrices), 6), np.int64)
        size = 0
        for row, matrix in zip(table, self.matrices, strict=True):
            rows, columns = matrix.tensor.shape
            kind = KINDS[matrix.tensor.type_name]
            tile_bytes = columns // CELL * CELL_BYTES[kind]
            matrix.offset = size
            row[:] = kind, size, tile_bytes, columns, -(-rows // LANES) * LANES, matrix.out_column
            size += -(-packed_bytes(matrix.tensor.type_name, rows, columns) // _ALIGNMENT) * _ALIGNMENT
        data = np.empty(size, np.uint8)

        def pack_one(matrix: _Matrix) -> None:
            rows, columns = matrix.tensor.shape
            end = matrix.offset + packed_bytes(matrix.tensor.type_name, rows, columns)
            pack(matrix.tensor.type_name, matrix.tensor.data, rows, columns, matrix.order, data[matrix.offset : end])

        with ThreadPoolExecutor() as workers:
            list(workers.map(pack_one, self.matrices))
        return Weights(data, table)


def _half_order(heads: int, head_dim: int, rotary_dim: int) -> NDArray[np.intp]:
    """Rows that turn RoPE's neighbouring pairs (2i, 2i + 1) into pairs (i, i + dim / 2), head by head.

    The engine knows one style only, in which both halves of the pairs are contiguous vectors.
    """
    within = np.arange(head_dim)
    within[:rotary_dim] = np.arange(rotary_dim).reshape(-1, 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * head_dim + within).reshape(-1)
