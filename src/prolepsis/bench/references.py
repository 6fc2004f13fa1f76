"""Predictors that `kv bench` compares with and that code nothing: what their K and V would take under the published
residual model (`mixture`).

**float** is the target in float32, and **an open twin** the published method at a twin's precision: it attends to its
own K and V, and what is known of the layers below corrects nothing. Its products are computed in float32 from the
weights and activations that the twin rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.bench.float_predictor import Attended, FloatPredictor, Precision, closed_loop, open_loop
from prolepsis.bench.kv_bench import Cache
from prolepsis.bench.mixture import Mixture, interval_edges
from prolepsis.bench.part_sizes import PartSizes, part_sizes
from prolepsis.coding.cache_dtypes import FORMATS, DType, moderate_values, to_scalars
from prolepsis.coding.twin_network import VARIANTS
from prolepsis.engine.profiles import WindowKV
from prolepsis.kernels.forward import Plan

Floats = NDArray[np.float32]


class Reference(NamedTuple):
    """A predictor of this precision that attends to the true K and V (`closed`) or to its own."""

    name: str
    precision: Precision
    closed: bool


@dataclass(frozen=True)
class ReferenceRow:
    """What a reference would make of a cache: ideal bits a value, and stored bits for each of these."""

    predictor: str
    dtype: str
    ideal_bits: float
    ideal_ratio: float


class ReferenceOutcome(NamedTuple):
    """A row, and the sizes that it sums up."""

    row: ReferenceRow
    parts: list[PartSizes]


def float_references() -> list[Reference]:
    """The target in float32."""
    return [Reference(f"float, {'closed' if closed else 'open'} loop", Precision(), closed) for closed in (False, True)]


def open_references(predictors: Sequence[str]) -> list[Reference]:
    """Those of `predictors` that are twins, in open loop."""
    return [
        Reference(
            f"{name}-open, mixture", Precision("int16" if kind.fine else "int8", kind.rounds_to, kind.keeps), False
        )
        for name, kind in VARIANTS.items()
        if name in predictors
    ]


def require_floats(dtype: DType) -> None:
    """Raises InputError for a cache of integers, for which there is no estimate."""
    interval_edges(dtype)


def measure_reference(
    reference: Reference,
    plan: Plan,
    calibration: Sequence[WindowKV],
    cache: Cache,
    on_layer: Callable[[int, int], None],
) -> ReferenceOutcome:
    """Fit the residual model to `calibration`, and see what `cache` takes under it.

    on_layer(layers done, layers).

    Raises:
        InputError: `require_floats`.
    """
    predictor, dtype = FloatPredictor(plan, reference.precision), cache.geometry.dtype
    windows = [*calibration, WindowKV(cache.ids, cache.kv)]
    scalars = [to_scalars(window.kv, dtype) for window in windows]
    walks = [
        predictor.predict(window.ids, _attended(reference, each, dtype))
        for window, each in zip(windows, scalars, strict=True)
    ]
    bits = []
    for layer, predicted in enumerate(zip(*walks, strict=True)):  # a layer's weights are unpacked once
        *fitted, means = [np.nan_to_num(each) for each in predicted]
        *known, values = [each[layer] for each in scalars]
        mixture = Mixture.fitted(np.concatenate(known, axis=1), np.concatenate(fitted, axis=1), dtype)
        bits.append(mixture.code_lengths(values, means))
        on_layer(layer + 1, plan.layers)
    return _outcome(reference, cache, np.stack(bits))


def _attended(reference: Reference, scalars: NDArray[np.uint16], dtype: DType) -> Attended:
    if not reference.closed:
        return open_loop(dtype)
    return closed_loop(lambda layer: moderate_values(dtype)[scalars[layer]])


def _outcome(reference: Reference, cache: Cache, bits: NDArray[np.float64]) -> ReferenceOutcome:
    """bits: [layers, 2, tokens]."""
    dtype, _, heads, dim = cache.geometry
    ideal = float(bits.sum()) / (bits.size * heads * dim)
    row = ReferenceRow(reference.name, dtype, ideal, FORMATS[dtype].bits / ideal)
    parts = [
        part_sizes(reference.name, cache.geometry, name, stop - start, bits[:, :, start:stop].sum(axis=2), None)
        for name, start, stop in cache.spans
    ]
    return ReferenceOutcome(row, parts)
