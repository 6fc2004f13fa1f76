"""Predictions of values as predictions of the integers that are stored for them."""

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import to_float
from prolepsis.coding.predictors import Chain, Prediction
from prolepsis.coding.threads import for_each

_ONE = 127 << 3  # the scale code of 1
FARTHEST = 512.0
"""No integer is there."""


def on_grid(prediction: Prediction | Chain, steps: NDArray[np.uint16]) -> Prediction | Chain:
    """The same prediction in units of each token's and head's step: fp16 bits [layers, 2, tokens, kv_heads].

    A step that is 0, infinite or NaN says nothing, and 0 is predicted.
    """
    if isinstance(prediction, Chain):
        return _chain_on_grid(prediction, steps[0])
    divisors, unit_shifts = units_of(steps)
    means = prediction.turned_means(steps.shape[2])
    units, flat = divisors.reshape(-1, *divisors.shape[2:]), means.reshape(-1, *means.shape[2:])

    def divide(s: int) -> None:
        with np.errstate(over="ignore"):
            np.divide(flat[s], units[s, ..., None], out=flat[s])
        np.clip(flat[s], -FARTHEST, FARTHEST, out=flat[s])

    for_each(len(units), divide)
    shifts = unit_shifts if prediction.shifts is None else unit_shifts + prediction.shifts
    return Prediction(means, prediction.scales, shifts)


def _chain_on_grid(chain: Chain, steps: NDArray[np.uint16]) -> Chain:
    by_head = np.ascontiguousarray(steps.transpose(0, 2, 1)).reshape(-1, steps.shape[1])
    divisors, shifts = units_of(by_head)
    return chain._replace(work=chain.work._replace(units=divisors, unit_shifts=shifts))


def units_of(steps: NDArray[np.uint16]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """(what to divide by, what to add to scale codes) where values lie in steps of these, fp16 bits."""
    values = to_float(steps, "fp16")
    useful = np.isfinite(values) & (values != 0)
    codes = (np.abs(values).view(np.int32) + (1 << 19)) >> 20
    return np.where(useful, values, np.float32(np.inf)), np.where(useful, _ONE - codes, 0).astype(np.int32)
