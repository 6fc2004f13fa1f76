"""Writing session files."""

from collections.abc import Mapping, Sequence
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding import container, streams
from prolepsis.coding.container import Header, SegmentEntry, TokenStorage
from prolepsis.coding.floats import DType
from prolepsis.coding.hashes import BlockHashes
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import GRID, Geometry, Profile, fingerprint, grid_spans
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.segment_coder import SegmentCoder
from prolepsis.errors import InputError


class SessionWriter:
    """Writes a session file to a binary file, segment by segment.

    The file is whole only after `finish`; nothing is ever written behind what it already holds, so `file` need not be
    seekable.
    """

    def __init__(
        self,
        file: BinaryIO,
        profile: Profile,
        *,
        dtype: DType,
        rope: RopeSpec | None = None,
        start: int = 0,
        model: Mapping[str, str] | None = None,
        numerics: str = "",
        block_size: int = 16,
        tokens: TokenStorage = "ids",
    ) -> None:
        """Write the header.

        `tokens`: whether `add` gets token ids to store ("ids"), to store only their block hashes ("hashes"), or none.

        Raises:
            InputError: block_size does not divide 256 or start is no multiple of it, RoPE is wider than a head, or
                something exceeds the bounds in docs/format.md.
        """
        layers, _, kv_heads, head_dim = profile.scales.shape
        packed = profile.to_bytes()
        self._file = file
        self._coder = SegmentCoder(Geometry(dtype, layers, kv_heads, head_dim), profile, rope)
        self._hashes = BlockHashes(block_size)
        self.header = Header(
            model=dict(model or {}),
            numerics=numerics,
            predictor=self._coder.predictor.name,
            profile_fingerprint=fingerprint(packed),
            dtype=dtype,
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            heads_per_stream=streams.heads_per_stream(kv_heads, head_dim),
            block_size=block_size,
            segment_tokens=GRID,
            start=start,
            tokens=tokens,
            rope=rope,
            profile=packed,
        )
        self.position = start
        self.segments = 0
        self.coded_bytes = file.write(container.pack_header(self.header))

    def add(self, kv: NDArray[np.uint16], ids: Sequence[int] | NDArray | None = None) -> None:
        """Append tokens: uint16 [layers, 2, tokens, kv_heads, head_dim] and their ids.

        Becomes one segment for each 256 positions it touches, so few large calls make a smaller file.

        Raises:
            InputError: a shape or number of ids that does not fit.
        """
        header = self.header
        layers, _, kv_heads, head_dim = expected = (header.layers, 2, header.kv_heads, header.head_dim)
        if kv.ndim != 5 or (kv.shape[:2] + kv.shape[3:]) != expected:
            raise InputError(f"KV of shape {kv.shape}, expected ({layers}, 2, tokens, {kv_heads}, {head_dim})")
        if (ids is None) != (header.tokens == "none") or (ids is not None and len(ids) != kv.shape[2]):
            given = "no" if ids is None else str(len(ids))
            raise InputError(f"{given} token ids for {kv.shape[2]} tokens in a file that stores {header.tokens!r}")
        numbers = np.asarray([] if ids is None else ids, dtype=np.uint32)
        first = self.position
        for span in grid_spans(first, kv.shape[2]):
            part = slice(span.start - first, span.start - first + span.count)
            self._add_segment(span, kv[:, :, part].copy(), numbers[part])

    def _add_segment(self, span: Segment, kv: NDArray[np.uint16], ids: NDArray[np.uint32]) -> None:
        header = self.header
        known = None if header.tokens == "none" else ids
        coded = self._coder.encode(Segment(span.start, span.count, known), kv)
        index = np.zeros(header.streams, container.INDEX_ENTRY)
        for i, stream in enumerate(coded):
            index[i] = (len(stream.data), container.checksum(stream.data.data), stream.checksum)
        hashes = self._hashes.add(ids)
        stored = ids if header.tokens == "ids" else ids[:0]
        entry = SegmentEntry(span.start, span.count, stored, hashes, index, 0)
        payload = b"".join(stream.data.data for stream in coded)
        self.coded_bytes += self._file.write(container.pack_segment(entry, len(payload)))
        self.coded_bytes += self._file.write(payload)
        self.position += span.count
        self.segments += 1

    def finish(self, metadata: bytes = b"") -> None:
        """Write the trailer, which makes the file whole. `metadata`: anything of the caller's, up to 16 MiB.

        Raises:
            InputError: the metadata is larger.
        """
        if len(metadata) > container.MAX_METADATA:
            raise InputError(f"{len(metadata)} bytes of metadata, at most {container.MAX_METADATA} fit")
        self.coded_bytes += self._file.write(container.pack_trailer(metadata, self.position, self.segments))
