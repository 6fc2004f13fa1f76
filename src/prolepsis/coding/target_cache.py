"""The KV that a model makes with a cache of any dtype, without such a cache."""

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import KV, DType, Geometry, from_scalars
from prolepsis.coding.past import OwnPast
from prolepsis.coding.predictors import Segment
from prolepsis.coding.predictors.twin import stored
from prolepsis.coding.profile import grid_spans
from prolepsis.coding.twin_network import REFERENCE, Target, TwinNetwork
from prolepsis.coding.twin_run import Workspace


def compute_kv(target: Target, ids: NDArray[np.uint32], dtype: DType) -> KV:
    """K and V of the tokens `ids` from position 0 on, attention reading them as a cache of this dtype holds them.

    It is the target's own arithmetic: what the engine computes with such a cache.

    Raises:
        InputError: more tokens than the model has angles for.
    """
    plan = target.plan
    geometry = Geometry(dtype, plan.layers, target.kv_heads, target.head_dim)
    network, work = TwinNetwork.of(target, REFERENCE).corrected([]), Workspace(target)
    past = OwnPast(geometry, target.positions)
    shape = (plan.layers, 2, len(ids), target.kv_heads, target.head_dim)
    scalars = np.empty(shape, np.uint16)
    steps = np.empty(shape[:4], np.uint16)
    for span in grid_spans(0, len(ids)):
        stop = span.start + span.count
        work.begin(network, Segment(span.start, span.count, ids[span.start : stop]), past)
        work.embed()
        for layer in range(plan.layers):
            work.predict(layer)
            values, own = stored(work.means[None], dtype)
            past.put(layer, span.start, values[0], None if own is None else own[0])
            scalars[layer, :, span.start : stop] = values[0]
            if own is not None:
                steps[layer, :, span.start : stop] = own[0]
            if layer + 1 < plan.layers:
                work.finish(layer, layer)
    return from_scalars(scalars, steps, dtype)
