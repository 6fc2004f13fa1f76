"""What the `linear` predictor knows of a model, as arrays."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import Geometry
from prolepsis.coding.rope import RopeSpec
from prolepsis.errors import InputError
from prolepsis.kernels.kv_chain import GROUP
from prolepsis.kernels.kv_chain_rows import PAIRS

TOKEN_LAYERS = 3  # the lowest layers look at the token itself; above, the layers below say as much
LARGEST = 2.0**60  # magnitude of any number here: what is made of them stays finite
_LARGEST_CODE = 2039


class Matrices(NamedTuple):
    """One matrix for each of some layers.

    weights: int8 [layers, channels, columns], channels in chain order. steps: float32 [layers, channels], what a
    product of 1 is worth.
    """

    weights: NDArray[np.int8]
    steps: NDArray[np.float32]


class TokenMatrices(NamedTuple):
    """How the lowest layers follow from the token, whose features (`kv_chain.token_features`) have 16 bits.

    means, inverses: float32 [hidden], of the features. epsilon: float32 [1]. upper: by the features' upper bytes, of
    the lowest TOKEN_LAYERS layers. rest: of layer 0, what int8 leaves of its weights; its weights count for the lower
    bytes too.
    """

    means: NDArray[np.float32]
    inverses: NDArray[np.float32]
    epsilon: NDArray[np.float32]
    upper: Matrices
    rest: Matrices


class LinearMatrices(NamedTuple):
    """base: float32 [layers, channels], a layer of which nothing is known. below, below2: of the layers from 1 and from
    2 on, by the features of the layer below and of the one below that. chain: int8 [layers, chain_size(channels)], for
    group g of 16 channels [16, 16 g], by the groups before; chain_steps: float32 [layers, channels]. means, inverses,
    errors: float32, codes: uint16 [layers, channels], see `kv_chain.ChainTables`.
    """

    base: NDArray[np.float32]
    below: Matrices
    below2: Matrices
    chain: NDArray[np.int8]
    chain_steps: NDArray[np.float32]
    means: NDArray[np.float32]
    inverses: NDArray[np.float32]
    errors: NDArray[np.float32]
    codes: NDArray[np.uint16]
    token: TokenMatrices | None


class ChainOrder(NamedTuple):
    """channels: int32, for each place in chain order the channel of its row, K's or V's. pairs: int32 [groups], the
    first pair that RoPE turns, or -1.
    """

    channels: NDArray[np.int32]
    pairs: NDArray[np.int32]


def chain_order(geometry: Geometry, rope: RopeSpec | None) -> ChainOrder:
    """Channels of a layer, K before V, head after head; where K is turned, 8 pairs a group, first members first.

    Raises:
        InputError: heads that are not made of groups of 16.
    """
    _, _, heads, dim = geometry
    turned = 0 if rope is None else rope.dim
    if dim % GROUP or turned % GROUP:
        raise InputError(
            f"the predictor linear needs heads of a multiple of {GROUP} channels, as many of them turned by RoPE; "
            f"here heads have {dim}, of which {turned} are turned"
        )
    head = np.arange(dim)
    if rope is not None:
        first = np.arange(turned // 2) * (1 if rope.style == "half" else 2)
        second = first + (turned // 2 if rope.style == "half" else 1)
        head[:turned] = np.stack([first.reshape(-1, PAIRS), second.reshape(-1, PAIRS)], axis=1).reshape(-1)
    pairs = np.where(np.arange(dim // GROUP) < turned // GROUP, np.arange(dim // GROUP) * PAIRS, -1)
    begins = np.arange(heads)[:, None] * dim
    plain = np.arange(heads * dim)
    return ChainOrder(
        np.concatenate([(begins + head).reshape(-1), plain]).astype(np.int32),
        np.concatenate([np.tile(pairs, heads), np.full(heads * dim // GROUP, -1)]).astype(np.int32),
    )


def chain_size(channels: int) -> int:
    """Weights of a layer's chain."""
    groups = channels // GROUP
    return GROUP * GROUP * groups * (groups - 1) // 2


def to_tensors(matrices: LinearMatrices) -> dict[str, NDArray[Any]]:
    """Name of each array ("token.upper.weights"), and the array."""
    return dict(_leaves("", matrices))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    if isinstance(value, np.ndarray):
        yield name, value
    elif value is not None:
        for field in value._fields:
            yield from _leaves(f"{name}.{field}" if name else field, getattr(value, field))


def from_tensors(tensors: dict[str, NDArray[Any]], geometry: Geometry, hidden: int) -> LinearMatrices:
    """The inverse of `to_tensors`. hidden: of the token embedding, 0 where tokens are not looked at.

    Raises:
        ValueError: an array is missing, unknown, of another shape or type, or holds numbers that no profile has.
    """
    layers, channels = geometry.layers, 2 * geometry.kv_heads * geometry.head_dim

    def shaped(kind: type[Any], *shape: int) -> NDArray[Any]:
        return np.broadcast_to(np.zeros((), kind), shape)  # takes no memory

    def floats(*shape: int) -> NDArray[np.float32]:
        return shaped(np.float32, *shape)

    def matrices(count: int, columns: int) -> Matrices:
        return Matrices(shaped(np.int8, count, channels, columns), floats(count, channels))

    token = None
    if hidden:
        columns = -(-hidden // GROUP) * GROUP
        upper, rest = matrices(min(TOKEN_LAYERS, layers), columns), matrices(1, columns)
        token = TokenMatrices(floats(hidden), floats(hidden), floats(1), upper, rest)
    each = (layers, channels)
    wanted = LinearMatrices(
        floats(*each),
        matrices(max(0, layers - 1), channels),
        matrices(max(0, layers - 2), channels),
        shaped(np.int8, layers, chain_size(channels)),
        floats(*each),
        floats(*each),
        floats(*each),
        floats(*each),
        shaped(np.uint16, *each),
        token,
    )
    layout = to_tensors(wanted)
    if layout.keys() != tensors.keys():
        raise ValueError(f"arrays that differ from what was expected: {sorted(layout.keys() ^ tensors.keys())}")
    for name, like in layout.items():
        _check_array(name, tensors[name], like)
    return _filled("", wanted, tensors)


def _check_array(name: str, array: NDArray[Any], like: NDArray[Any]) -> None:
    if (array.shape, array.dtype) != (like.shape, like.dtype):
        raise ValueError(f"{name} is {array.dtype} {array.shape}, expected {like.dtype} {like.shape}")
    if array.dtype == np.float32 and not (np.abs(array) <= LARGEST).all():
        raise ValueError(f"{name} holds numbers that are not moderate")
    if array.dtype == np.uint16 and array.size and array.max() > _LARGEST_CODE:
        raise ValueError(f"{name} holds a scale that is not finite")


def _filled(name: str, value: Any, tensors: dict[str, NDArray[Any]]) -> Any:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(tensors[name])
    if value is None:
        return None
    fields = (_filled(f"{name}.{f}" if name else f, getattr(value, f), tensors) for f in value._fields)
    return type(value)(*fields)
