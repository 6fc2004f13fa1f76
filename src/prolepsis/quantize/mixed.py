"""Bits where they count: measure what each matrix loses at several sizes, then choose under a budget (ExLlamaV2).

A measuring walk (`Measure`) leaves the model as it is; `choose` takes its errors to recipes; `Mixed` quantises by them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import numpy as np

from prolepsis.errors import InputError
from prolepsis.kernels.cells import CELL
from prolepsis.kernels.kinds import KINDS
from prolepsis.model.config import ModelConfig
from prolepsis.quant.allocation import Allocation, allocate, least_bits
from prolepsis.quant.exl2_grid import ProductGrid
from prolepsis.quant.gptq import factorised, gptq
from prolepsis.quant.matrix import HeldMatrix, whole
from prolepsis.quant.rtn import Span
from prolepsis.quantize.layer import STAGES, Floats, Layer, shapes, tensor_name
from prolepsis.quantize.methods import all_statistics, quantised_stage
from prolepsis.quantize.names import part_of

_SCALE_BITS, _GROUP_BITS, _ORDER_BITS = 4, 48, 32  # of EXL2: for a row and group; for a group; for a column
_SAMPLE = 512  # tokens that errors of a layer's output are taken from


class Recipe(NamedTuple):
    """How a matrix is held. bits, group: of its columns; wider: share of them, the first, with one bit more."""

    bits: int
    group: int
    wider: float = 0.0

    def spans(self, columns: int) -> list[Span]:
        """The columns in the order of their importance."""
        first = min(round(columns * self.wider / CELL), columns // CELL - 1) * CELL
        wide, narrow = (ProductGrid(bits, self.group) for bits in (self.bits + 1, self.bits))
        return [span for span in (Span(first, wide), Span(columns - first, narrow)) if span.columns]

    def size(self, rows: int, columns: int) -> int:
        """Bits in an EXL2 file."""
        total = _ORDER_BITS * columns
        for span in self.spans(columns):
            groups = -(-span.columns // self.group)
            total += span.columns * rows * KINDS[span.grid.kind].bits + groups * (rows * _SCALE_BITS + _GROUP_BITS)
        return total


RECIPES = (
    Recipe(2, 64),
    Recipe(2, 64, 0.125),
    Recipe(3, 64),
    Recipe(3, 64, 0.125),
    Recipe(4, 128),
    Recipe(4, 32),
    Recipe(5, 128),
    Recipe(6, 128),
    Recipe(8, 128),
)


@dataclass
class Measure:
    """A method that changes nothing: what each matrix loses by each recipe.

    errors: of the last layer, by canonical name, for each recipe: mean over tokens of |change of the hidden state|^2 /
    |hidden state|^2, behind attention for its matrices and behind the layer for those of the MLP.
    """

    recipes: Sequence[Recipe] = RECIPES
    damping: float = 0.01
    errors: dict[str, list[float]] = field(default_factory=dict, init=False)

    def prepare(self, layer: Layer) -> None:
        """Measure all matrices of `layer`."""
        self.errors = {}
        probes = _probes(layer)
        for stage, (parts, known) in enumerate(zip(STAGES, all_statistics(layer), strict=True)):
            factor = factorised(known.hessian, True, self.damping, tensor_name(layer.index, parts[0]))
            for part in parts:
                name = tensor_name(layer.index, part)
                weight = layer.weights[part]
                made = [gptq(weight, factor, recipe.spans(known.columns), name) for recipe in self.recipes]
                self.errors[name] = [probes[stage // 2](part, whole(matrix)) for matrix in made]

    def quantise(self, layer: Layer, stage: int) -> dict[str, HeldMatrix]:
        """Nothing: the walk goes on with the weights as they are."""
        return {}


@dataclass
class Mixed:
    """GPTQ by the recipe of each matrix, by canonical name."""

    recipes: Mapping[str, Recipe]
    damping: float = 0.01

    def prepare(self, layer: Layer) -> None:
        """Statistics are taken stage by stage."""

    def quantise(self, layer: Layer, stage: int) -> dict[str, HeldMatrix]:
        """See `Method`."""

        def spans(part: str, columns: int) -> list[Span]:
            return self.recipes[tensor_name(layer.index, part)].spans(columns)

        return quantised_stage(layer, stage, spans, True, self.damping)


def choose(
    config: ModelConfig, errors: Mapping[str, Sequence[float]], bits: float, recipes: Sequence[Recipe] = RECIPES
) -> tuple[dict[str, Recipe], Allocation]:
    """Recipes with the least sum of `errors`, by canonical name, that take `bits` a weight on average, all overhead
    counted. Raises InputError where that is too few (`require_bits` says so before).
    """
    known = shapes(config)
    parts = [part_of(name) for name in errors]
    sizes = [[recipe.size(*known[part]) for recipe in recipes] for part in parts]
    weights = sum(prod(known[part]) for part in parts)
    found = allocate(sizes, list(errors.values()), int(bits * weights))
    return {name: recipes[option] for name, option in zip(errors, found.choice, strict=True)}, found


def require_bits(config: ModelConfig, bits: float, recipes: Sequence[Recipe] = RECIPES) -> None:
    """Raise InputError where the smallest recipes take more than `bits` a weight."""
    known = shapes(config).values()
    sizes = [[recipe.size(*shape) for recipe in recipes] for shape in known] * config.num_layers
    least = least_bits(sizes, config.num_layers * sum(map(prod, known)), bits)
    if least is not None:
        raise InputError(
            f"--bits {bits:g}: the least that --method mixed makes of this model, scales included, is {least:g}"
        )


def _probes(layer: Layer) -> list[Callable[[str, Floats], float]]:
    """For attention and for the MLP: what the hidden states change when one matrix is replaced."""
    assert layer.hidden is not None
    hidden = layer.hidden[: max(1, _SAMPLE // layer.hidden.shape[1])]
    attended = _after(Layer.attend, layer, hidden, {})
    return [_probe(Layer.attend, layer, hidden), _probe(Layer.feed, layer, attended)]


def _probe(run: Callable[[Layer], None], layer: Layer, hidden: Floats) -> Callable[[str, Floats], float]:
    right = _after(run, layer, hidden, {})
    norm = np.square(right).sum(axis=-1)

    def error(part: str, weight: Floats) -> float:
        missed = _after(run, layer, hidden, {part: weight}) - right
        return float((np.square(missed).sum(axis=-1) / norm).mean())

    return error


def _after(run: Callable[[Layer], None], layer: Layer, hidden: Floats, changed: dict[str, Floats]) -> Floats:
    """What `run` makes of `hidden` with changed weights."""
    out = hidden.copy()
    run(replace(layer, weights=layer.weights | changed, hidden=out))
    return out
