"""The KV that a profile is calibrated on, in a temporary file: memory holds a few layers of it at a time."""

import os
from collections.abc import Iterator
from math import prod
from tempfile import TemporaryFile, gettempdir
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import KV, Geometry, QuantisedKV, from_scalars, moderate_values, to_scalars
from prolepsis.coding.linear_matrices import chain_order
from prolepsis.coding.predictors import Segment
from prolepsis.coding.rope import RopeSpec
from prolepsis.errors import InputError
from prolepsis.kernels.kv_chain import GROUP
from prolepsis.kernels.kv_chain_rows import PAIRS

Scalars = NDArray[np.uint16]

_HELD_OUT = 6  # one of so many segments is left out of the fit, to see how well it does; or the last of fewer


def temporary_file(size: int) -> BinaryIO:
    """A file of `size` bytes whose space is there: writing to a mapped one on a full disk would kill the process."""
    file = TemporaryFile(prefix="prolepsis-calibration-")  # noqa: SIM115 - the caller closes it
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, max(1, size))
        else:
            file.truncate(size)
    except OSError as error:
        file.close()
        raise InputError(
            f"calibrating needs {size / 1e6:.0f} MB for a while in {gettempdir()}: {error.strerror}; use fewer tokens, "
            "or set TMPDIR"
        ) from error
    return cast(BinaryIO, file)


class CalibrationSample:
    """Segments of KV with their tokens, up to `tokens` in all. Close it, or use it as a context.

    Raises:
        InputError: there is no room for the file; or KV of kivi4, for which profiles are measured on what is coded.
    """

    def __init__(self, geometry: Geometry, rope: RopeSpec | None, tokens: int) -> None:
        if geometry.dtype == "kivi4":
            raise InputError("there is no calibrating for kivi4: its profiles are measured on what is coded")
        self.geometry, self.rope, self.capacity = geometry, rope, tokens
        self.segments: list[Segment] = []
        self.tokens = 0
        shape = (geometry.layers, 2, tokens, geometry.kv_heads, geometry.head_dim)
        self._file = temporary_file(2 * prod(shape))
        self._scalars = np.memmap(self._file, np.uint16, "r+", shape=shape)
        self._steps = np.zeros(shape[:4], np.uint16) if geometry.steps is not None else None

    def __enter__(self) -> "CalibrationSample":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the disk space back."""
        del self._scalars
        self._file.close()

    def add(self, segment: Segment, kv: KV) -> None:
        """Keep a segment of a text; its ids must be known where the fit is to look at tokens.

        Raises:
            InputError: more tokens than there is room for.
        """
        end = self.tokens + segment.count
        if end > self.capacity:
            raise InputError(f"{end} tokens are more than the {self.capacity} that this sample has room for")
        self._scalars[:, :, self.tokens : end] = to_scalars(kv, self.geometry.dtype)
        if self._steps is not None:
            assert isinstance(kv, QuantisedKV)
            self._steps[:, :, self.tokens : end] = kv.steps
        self.segments.append(segment)
        self.tokens = end

    def chosen(self, held_out: bool | None) -> list[bool]:
        """Which of the segments `parts` gives."""
        return [held_out in (None, self._is_held_out(index)) for index in range(len(self.segments))]

    def parts(self, *, held_out: bool | None = None) -> Iterator[tuple[Segment, KV]]:
        """The segments and their KV: all of them, those held out of the fit, or the others."""
        begin = 0
        for segment, wanted in zip(self.segments, self.chosen(held_out), strict=True):
            if wanted:
                part = slice(begin, begin + segment.count)
                steps = None if self._steps is None else self._steps[:, :, part]
                yield segment, from_scalars(np.ascontiguousarray(self._scalars[:, :, part]), steps, self.geometry.dtype)
            begin += segment.count

    def layer_parts(self, layer: int) -> Iterator[tuple[slice, Segment, Scalars, Scalars | None]]:
        """Of each segment: its tokens among all, itself, and one layer's scalars, uint16 [2, tokens, kv_heads,
        head_dim], and steps, [2, tokens, kv_heads], where there are any.
        """
        begin = 0
        for segment in self.segments:
            part = slice(begin, begin + segment.count)
            steps = None if self._steps is None else self._steps[layer, :, part]
            yield part, segment, np.ascontiguousarray(self._scalars[layer, :, part]), steps
            begin = part.stop

    def _is_held_out(self, index: int) -> bool:
        last = len(self.segments) - 1
        return index == last > 0 if last < _HELD_OUT - 1 else index % _HELD_OUT == _HELD_OUT - 1

    @property
    def fitted(self) -> NDArray[np.bool_]:
        """Which tokens are not held out: bool [tokens]."""
        counts = [s.count for s in self.segments]
        return np.repeat([not self._is_held_out(i) for i in range(len(counts))], counts)

    @property
    def ids(self) -> NDArray[np.uint32] | None:
        """uint32 [tokens], or None where a segment's are not known."""
        known = [s.ids for s in self.segments if s.ids is not None]
        return np.concatenate(known) if known and len(known) == len(self.segments) else None

    def layer(self, layer: int) -> NDArray[np.float32]:
        """A layer's values in chain order, K before RoPE: float32 [tokens, channels]. Infinities and NaNs are 0."""
        values = moderate_values(self.geometry.dtype)[self._scalars[layer, :, : self.tokens]]
        if self._steps is not None:
            steps = moderate_values("fp16")[self._steps[layer, :, : self.tokens]]
            values *= steps[..., None]
        channels, pairs = chain_order(self.geometry, self.rope)
        rows = values.reshape(2, self.tokens, -1)
        half = rows.shape[2]
        out = np.concatenate([rows[kind][:, channels[kind * half : (kind + 1) * half]] for kind in range(2)], axis=1)
        self._unturn(out, pairs)
        return out

    def _unturn(self, rows: NDArray[np.float32], pairs: NDArray[np.int32]) -> None:
        if self.rope is None:
            return
        tables = [self.rope.table(s.start, s.count) for s in self.segments]
        cos, sin = (np.concatenate(parts) for parts in zip(*tables, strict=True))
        for group, pair in enumerate(pairs):
            if pair < 0:
                continue
            first, second = (rows[:, GROUP * group + k * PAIRS :][:, :PAIRS] for k in range(2))
            c, s = cos[:, pair : pair + PAIRS], sin[:, pair : pair + PAIRS]
            rows[:, GROUP * group : GROUP * (group + 1)] = np.concatenate(
                [first * c + second * s, second * c - first * s], axis=1
            )
