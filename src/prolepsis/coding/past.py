"""The K and V of a sequence for whoever codes it without an engine: a pool of one's own."""

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import (
    FORMATS,
    KV,
    DType,
    Geometry,
    QuantisedKV,
    moderate_values,
    quantise,
    to_scalars,
)
from prolepsis.coding.predictors import Segment
from prolepsis.errors import InputError
from prolepsis.kernels.kv_blocks import put_rows
from prolepsis.kernels.kv_pool import KVPool
from prolepsis.kernels.rows import DTYPES

_BLOCK = 32  # tokens


def as_attended(scalars: NDArray[np.uint16], steps: NDArray[np.uint16] | None, dtype: DType) -> NDArray[np.uint16]:
    """What attention reads for these scalars: bits of bf16 or fp16 as they are, of other dtypes the nearest bf16."""
    if FORMATS[dtype].bits == 16:
        return scalars
    values = moderate_values(dtype)[scalars]
    if steps is not None:
        values *= moderate_values("fp16")[steps][..., None]
    return cast(NDArray[np.uint16], quantise(values, "bf16"))


class OwnPast:
    """A `predictors.Past` of up to `positions` tokens. The operating system supplies its memory as it fills.

    Values of fewer than 16 bits are kept as what attention reads for them.
    """

    def __init__(self, geometry: Geometry, positions: int) -> None:
        dtype, layers, heads, dim = geometry
        self.known = 0
        self._geometry, self._positions = geometry, positions
        blocks = -(-positions // _BLOCK)
        self._table = np.arange(blocks, dtype=np.int32)
        k, v = (np.zeros(layers * blocks * heads * _BLOCK * dim, np.uint16) for _ in range(2))
        none = np.empty(0, np.uint16)
        attended = dtype if FORMATS[dtype].bits == 16 else "bf16"
        self.pool = KVPool(k, v, none, none, blocks, heads, dim, _BLOCK, DTYPES[attended])

    def blocks(self, stop: int) -> NDArray[np.int32]:
        """int32 [blocks]. Raises InputError for more positions than there is room for."""
        if stop > self._positions:
            raise InputError(f"position {stop - 1} is beyond the {self._positions} positions of the predictor's model")
        return self._table

    def put(self, layer: int, start: int, scalars: NDArray[np.uint16], steps: NDArray[np.uint16] | None) -> None:
        """Put one layer of tokens that become known: `predictors.Past.put`."""
        bits = as_attended(scalars, steps, self._geometry.dtype)
        put_rows(self.pool, self.blocks(start + scalars.shape[1]), layer, start, bits)

    def append(self, kv: KV) -> None:
        """Make more tokens known, without coding them. Raises InputError as `blocks` does."""
        scalars, steps = to_scalars(kv, self._geometry.dtype), kv.steps if isinstance(kv, QuantisedKV) else None
        for layer in range(self._geometry.layers):
            self.put(layer, self.known, scalars[layer], None if steps is None else steps[layer])
        self.known += scalars.shape[2]


def follow(
    new_past: Callable[[], OwnPast | None], parts: Iterable[tuple[Segment, KV]]
) -> Iterator[tuple[Segment, KV, OwnPast | None]]:
    """The segments of texts, in order, each with its KV and the past to code it with; a text begins at position 0.

    new_past: `SegmentCoder.new_past`. Whoever takes a segment need not code it for those behind it to be coded.
    """
    past = None
    for segment, kv in parts:
        if segment.start == 0:
            past = new_past()
        yield segment, kv, past
        if past is not None and past.known == segment.start:
            past.append(kv)
