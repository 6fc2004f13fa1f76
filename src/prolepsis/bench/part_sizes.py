"""How many bits a predictor takes for the prompt and for the generated tokens of a cache, by layer, K and V apart."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import Geometry

Part = Literal["prompt", "generated"]
Bits = NDArray[np.float64]


@dataclass(frozen=True)
class LayerSizes:
    """Bits for each value of a layer. coded: of real streams and their index entries, None where nothing is coded."""

    layer: int
    k_ideal: float
    v_ideal: float
    k_coded: float | None
    v_coded: float | None


@dataclass(frozen=True)
class PartSizes:
    """Bits for each value of a part: what the predictor's model says, and what real streams take."""

    predictor: str
    dtype: str
    part: Part
    tokens: int
    ideal_bits: float
    bits_per_scalar: float | None
    layers: list[LayerSizes]


def part_sizes(
    predictor: str, geometry: Geometry, part: Part, tokens: int, ideal: Bits, coded: Bits | None
) -> PartSizes:
    """From bits in all, float64 [layers, 2 (K, V)]."""
    dtype, layers, heads, dim = geometry
    ideal = ideal / (tokens * heads * dim)
    if coded is not None:
        coded = coded / (tokens * heads * dim)
    return PartSizes(
        predictor,
        dtype,
        part,
        tokens,
        float(ideal.mean()),
        None if coded is None else float(coded.mean()),
        [
            LayerSizes(n, *ideal[n].tolist(), *((None, None) if coded is None else coded[n].tolist()))
            for n in range(layers)
        ],
    )
