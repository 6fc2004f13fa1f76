"""A model's weights, from a file of any format into the form the kernels read."""

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import ModelFileError
from prolepsis.kernels.cells import CELL, is_float
from prolepsis.kernels.forward import DOWN, GATE_UP, QKV, Plan
from prolepsis.kernels.kinds import KINDS
from prolepsis.kernels.qmatmul import ORDER, Weights
from prolepsis.kernels.rope_table import inv_freq, rope_table
from prolepsis.model.config import ModelConfig, RopeStyle, rows_for
from prolepsis.model.memory import require_memory
from prolepsis.quant.matrices import NaturalFloats, Placed, packed, packed_size
from prolepsis.quant.matrix import Matrix
from prolepsis.quant.packing import PackedMatrix

# Products of a layer, in the order of `kernels.forward`: matrices that read the same input lie side by side.
_GROUPS = (("attn_q", "attn_k", "attn_v"), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",))
_STYLE: RopeStyle = "half"  # the only one of the kernels: both halves of the pairs are contiguous vectors


class Source(Protocol):
    """A model file. `path` is what errors call it; tensors have the names that GGUF gives them."""

    @property
    def path(self) -> Path:
        """The file, or the directory of several."""
        ...

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """A matrix. Raises ModelFileError where it is missing, of another shape, or of a type that is not supported."""
        ...

    def vector(self, name: str, width: int) -> NDArray[np.float32]:
        """A vector, float32 [width]. Raises as `matrix` does."""
        ...


def load_plan(source: Source, config: ModelConfig, max_positions: int, fast: bool) -> Plan:
    """Pack every tensor of `source` and lay out the model for `kernels.forward.forward`.

    Raises ModelFileError for a tensor that is missing, of the wrong shape, or of a type that is not supported, and
    InputError for weights that take more memory than is free.
    """
    loader = _Loader(source, config)
    groups, norms = [], []
    for layer in range(config.num_layers):
        for group, names in enumerate(_GROUPS):
            groups.append(loader.add_group(group, [f"blk.{layer}.{name}.weight" for name in names]))
        norms += [loader.vector(f"blk.{layer}.{name}_norm.weight") for name in ("attn", "ffn")]
    norms.append(loader.vector("output_norm.weight"))
    embedding = loader.add("token_embd.weight", config.vocab_size, config.hidden_size)
    head = embedding
    if not config.tied_embeddings:
        head = loader.add("output.weight", config.vocab_size, config.hidden_size)
    groups.append(loader.one_order(head, 1))
    require_memory(f"{source.path}: the model", packed_size(loader.matrices))
    weights = packed(loader.matrices)
    rope = config.rope
    cos, sin = rope_table(np.arange(max_positions), inv_freq(rope.theta, rope.dim, rope.divisors))
    return Plan(
        weights=weights,
        groups=np.array([(first, count, _order(weights, first, count)) for first, count in groups], np.int64),
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
    def __init__(self, source: Source, config: ModelConfig) -> None:
        self.source = source
        self.config = config
        self.matrices: list[Placed] = []
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
                    f"{self.source.path}: the {what} {value} is not a multiple of {unit}, which is not supported"
                )

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm's gains, float32 [hidden]."""
        gains = self.source.vector(name, self.config.hidden_size)
        if not np.isfinite(gains).all():
            raise ModelFileError(f"{self.source.path}: tensor {name!r} holds a value that is not a finite number")
        return gains

    def add(self, name: str, rows: int, columns: int) -> int:
        """Queue a matrix for packing and return its index."""
        self.matrices.append(Placed(self.source.matrix(name, (rows, columns))))
        return len(self.matrices) - 1

    def add_group(self, group: int, names: list[str]) -> tuple[int, int]:
        """Queue the matrices of one product, each beginning where the one before it ends in the output; returns the
        first and their number."""
        config, first = self.config, len(self.matrices)
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        columns = {QKV: config.hidden_size, GATE_UP: config.hidden_size, DOWN: config.intermediate_size}
        rows = {QKV: (query, key, key), GATE_UP: (config.intermediate_size,) * 2}
        out_column = 0
        for i, name in enumerate(names):
            height = rows[group][i] if group in rows else config.hidden_size
            index = self.add(name, height, columns.get(group, query))
            order = rows_for(name, config, _STYLE)
            self.matrices[index] = self.matrices[index]._replace(out_column=out_column, rows=order)
            out_column += height
        return self.one_order(first, len(names))

    def one_order(self, first: int, count: int) -> tuple[int, int]:
        """Make all quantised matrices of a product take the activations in the order of the first of them; returns
        first and count.

        Those of another order, and float weights in any, become float32 with their columns in the natural order: that
        costs memory, and takes a file whose layers were reordered one by one.
        """
        chosen: list[NDArray[np.int32] | None] = []
        for index in range(first, first + count):
            matrix = self.matrices[index].matrix
            assert not isinstance(matrix, PackedMatrix), "files are not packed"
            floats, order = any(is_float(KINDS[form.kind]) for form in matrix.forms), matrix.order
            if not floats:
                chosen.append(order)
            if (order is not None) if floats else not _same(order, chosen[0]):
                self.matrices[index] = self.matrices[index]._replace(matrix=NaturalFloats(matrix))
        return first, count


def _same(one: NDArray[np.int32] | None, other: NDArray[np.int32] | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def _order(weights: Weights, first: int, count: int) -> int:
    """The ORDER of a product: the only one there is, or the natural one."""
    return int(weights.matrices[first : first + count, ORDER].max())
