"""What general-purpose compressors make of the same bytes, for comparison."""

import lzma
import zlib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import zstandard

_PIECES, _PIECE = 16, 1 << 18  # slow coders get 4 MiB: pieces spread evenly over the data


class _Peer(NamedTuple):
    name: str
    compress: Callable[[bytes], bytes]
    planes: bool = False
    sampled: bool = False


def ratios(raw: bytes | memoryview) -> dict[str, float]:
    """Name of each coder -> size of `raw` (16-bit values) / size of what it makes of it.

    "byte planes" says that all low bytes were put before all high bytes, which helps any of them with floats;
    "sample" that the coder is slow and saw 4 MiB of the data. lz4 and brotli take part where they are installed.
    """
    whole = bytes(raw)
    return {peer.name: _ratio(peer, whole) for peer in _peers()} if whole else {}


def _ratio(peer: _Peer, data: bytes) -> float:
    if peer.sampled and len(data) > _PIECES * _PIECE:
        starts = np.linspace(0, len(data) - _PIECE, _PIECES).astype(np.int64) // 2 * 2
        data = b"".join(data[s : s + _PIECE] for s in starts)
    size = len(data)
    if peer.planes:
        data = np.frombuffer(data, np.uint8).reshape(-1, 2).T.tobytes()
    return size / len(peer.compress(data))


def _peers() -> list[_Peer]:
    peers = [
        _Peer("zstd-3", zstandard.ZstdCompressor(level=3).compress),
        _Peer("zstd-3 byte planes", zstandard.ZstdCompressor(level=3).compress, planes=True),
        _Peer("zstd-19 sample", zstandard.ZstdCompressor(level=19).compress, sampled=True),
        _Peer("zstd-19 byte planes sample", zstandard.ZstdCompressor(level=19).compress, planes=True, sampled=True),
        _Peer("zlib-1", lambda data: zlib.compress(data, 1)),
        _Peer("lzma-1 sample", lambda data: lzma.compress(data, preset=1), sampled=True),
    ]
    if find_spec("lz4") is not None:
        peers.append(_Peer("lz4", import_module("lz4.frame").compress))
    if find_spec("brotli") is not None:
        brotli = import_module("brotli")
        peers.append(_Peer("brotli-5 sample", lambda data: brotli.compress(data, quality=5), sampled=True))
    return peers
