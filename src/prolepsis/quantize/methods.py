"""The ways to quantise a layer: each an object that `walk` asks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prolepsis.quant.awq import channel_scales
from prolepsis.quant.gptq import factorised, gptq
from prolepsis.quant.grid import Floats, Grid
from prolepsis.quant.input_statistics import InputStatistics
from prolepsis.quant.matrix import HeldMatrix
from prolepsis.quant.rtn import Span, rtn
from prolepsis.quantize.layer import STAGES, Layer, tensor_name

_NOT_CLIPPED = ("attn_q", "attn_k")  # softmax makes much of their largest values


def statistics_of(inputs: Iterator[Floats], columns: int) -> InputStatistics:
    """Statistics of pieces float32 [tokens, columns]."""
    out = InputStatistics(columns)
    for piece in inputs:
        out.add(piece)
    return out


def all_statistics(layer: Layer) -> list[InputStatistics]:
    """Statistics of the inputs of all stages of a layer that is not begun."""
    out = [InputStatistics(layer.weights[parts[0]].shape[1]) for parts in STAGES]
    for inputs in layer.all_inputs():
        for known, piece in zip(out, inputs, strict=True):
            known.add(piece)
    return out


def quantised_stage(
    layer: Layer, stage: int, spans: Callable[[str, int], list[Span]], act_order: bool, damping: float
) -> dict[str, HeldMatrix]:
    """GPTQ of the matrices of a stage, by part. spans: the grids of a part that has so many columns."""
    parts = STAGES[stage]
    columns = layer.weights[parts[0]].shape[1]
    hessian = statistics_of(layer.inputs(stage), columns).hessian
    factor = factorised(hessian, act_order, damping, tensor_name(layer.index, parts[0]))
    return {
        part: gptq(layer.weights[part], factor, spans(part, columns), tensor_name(layer.index, part)) for part in parts
    }


@dataclass
class Rtn:
    """Round to nearest. Needs no calibration."""

    grid: Grid

    def prepare(self, layer: Layer) -> None:
        """Nothing is known beforehand."""

    def quantise(self, layer: Layer, stage: int) -> dict[str, HeldMatrix]:
        """See `Method`."""
        return {part: rtn(layer.weights[part], self.grid) for part in STAGES[stage]}


@dataclass
class Gptq:
    """GPTQ, stage by stage: what comes after a quantised product sees its errors ("true sequential")."""

    grid: Grid
    act_order: bool = True
    damping: float = 0.01

    def prepare(self, layer: Layer) -> None:
        """Statistics are taken stage by stage."""

    def quantise(self, layer: Layer, stage: int) -> dict[str, HeldMatrix]:
        """See `Method`."""

        def spans(part: str, columns: int) -> list[Span]:
            return [Span(columns, self.grid)]

        return quantised_stage(layer, stage, spans, self.act_order, self.damping)


@dataclass
class Awq:
    """AWQ: scales folded into the operation before. clip_grid: one that searches, for all but Q and K.

    The scales of `attn_output` are folded into the rows of V: query heads that share a KV head share them.
    """

    grid: Grid
    clip_grid: Grid | None = None
    _metrics: dict[str, Floats] = field(default_factory=dict, init=False)

    def prepare(self, layer: Layer) -> None:
        """Find the scales of all four stages on the layer as it is, then fold them."""
        statistics = all_statistics(layer)
        shared = _heads_that_share(layer)
        scales = [
            channel_scales([layer.weights[part] for part in parts], known, self.grid, shared if stage == 1 else None)
            for stage, (parts, known) in enumerate(zip(STAGES, statistics, strict=True))
        ]
        for parts, scale, known in zip(STAGES, scales, statistics, strict=True):
            metric = (known.hessian / np.outer(scale, scale)).astype(np.float32)
            for part in parts:
                layer.weights[part] = layer.weights[part] * scale
                self._metrics[part] = metric
        layer.norms["attn_norm"] = layer.norms["attn_norm"] / scales[0]
        first = np.unique(shared, return_index=True)[1]
        layer.weights["attn_v"] = layer.weights["attn_v"] / scales[1][first, None]
        layer.norms["ffn_norm"] = layer.norms["ffn_norm"] / scales[2]
        layer.weights["ffn_up"] = layer.weights["ffn_up"] / scales[3][:, None]

    def quantise(self, layer: Layer, stage: int) -> dict[str, HeldMatrix]:
        """See `Method`."""
        made = {}
        for part in STAGES[stage]:
            grid, metric = self.grid, None
            if self.clip_grid is not None and part not in _NOT_CLIPPED:
                grid, metric = self.clip_grid, self._metrics[part]
            made[part] = rtn(layer.weights[part], grid, metric)
        return made


def _heads_that_share(layer: Layer) -> NDArray[np.intp]:
    """For each column of `attn_output`, the row of V that it multiplies."""
    config = layer.config
    heads = np.arange(config.num_heads) // (config.num_heads // config.num_kv_heads)
    return (heads[:, None] * config.head_dim + np.arange(config.head_dim)).reshape(-1)
