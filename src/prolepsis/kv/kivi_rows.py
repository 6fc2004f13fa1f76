"""Whole blocks of kivi4, whose runs lie as `kernels.kivi` has them, to and from rows of tokens (`stored.KiviKV`)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.kv.stored import KIVI_BLOCK, KIVI_RUN, KiviKV

_ROWS = KIVI_BLOCK // KIVI_RUN  # in a block


def blocks_between(start: int, stop: int) -> slice:
    """The blocks of these tokens in a table. Raises InputError where the tokens are no whole blocks."""
    if start % KIVI_BLOCK or stop % KIVI_BLOCK:
        raise InputError(
            f"of kivi4, whole blocks of {KIVI_BLOCK} tokens can be read and written, not tokens {start} .. {stop}"
        )
    return slice(start // KIVI_BLOCK, stop // KIVI_BLOCK)


def to_rows(codes: list[NDArray[Any]], params: list[NDArray[Any]], head_dim: int) -> KiviKV:
    """codes, params: those of some blocks, of K and of V, [layers, blocks, kv_heads, ...] each."""
    layers, blocks, heads = codes[0].shape[:3]
    shape = (layers, 2, blocks * _ROWS, heads, head_dim)
    out = KiviKV(np.empty((*shape, KIVI_RUN // 2), np.uint8), *np.empty((2, *shape), np.uint16))
    for kind in (0, 1):
        pairs = _by_rows(kind, params[kind], head_dim, 2)
        out.codes[:, kind] = _by_rows(kind, codes[kind], head_dim, KIVI_RUN // 2)
        out.steps[:, kind], out.minimums[:, kind] = pairs[..., 0], pairs[..., 1]
    return out


def codes_of(kv: KiviKV, kind: int) -> NDArray[np.uint8]:
    """The codes of K (kind 0) or V as blocks have them, [layers, blocks, kv_heads, numbers of a block's head]."""
    return _by_blocks(kind, kv.codes[:, kind])


def params_of(kv: KiviKV, kind: int) -> NDArray[np.uint16]:
    """As `codes_of`, steps and minimums in turn."""
    return _by_blocks(kind, np.stack([kv.steps[:, kind], kv.minimums[:, kind]], axis=-1))


def _by_rows(kind: int, array: NDArray[Any], dim: int, numbers: int) -> NDArray[Any]:
    """[layers, rows, kv_heads, head_dim, numbers of a run]."""
    layers, blocks, heads = array.shape[:3]
    if kind == 0:
        array = array.reshape(layers, blocks, heads, dim, _ROWS, numbers).transpose(0, 1, 4, 2, 3, 5)
    else:
        array = array.reshape(layers, blocks, heads, _ROWS, dim, numbers).swapaxes(2, 3)
    return array.reshape(layers, blocks * _ROWS, heads, dim, numbers)


def _by_blocks(kind: int, array: NDArray[Any]) -> NDArray[Any]:
    layers, rows, heads, dim, numbers = array.shape
    array = array.reshape(layers, rows // _ROWS, _ROWS, heads, dim, numbers)
    array = array.transpose(0, 1, 3, 4, 2, 5) if kind == 0 else array.swapaxes(2, 3)
    return array.reshape(layers, rows // _ROWS, heads, _ROWS * dim * numbers)
