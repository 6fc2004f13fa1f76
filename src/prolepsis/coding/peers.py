"""What other lossless coders make of the same bytes, on one thread, for comparison."""

import lzma
import statistics
import time
import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import zstandard

from prolepsis.coding.cache_dtypes import FORMATS, DType
from prolepsis.errors import ProlepsisError

_PIECES, _PIECE = 16, 1 << 18  # slow coders get 4 MiB: pieces spread evenly over the data

_Coder = Callable[[bytes], Any]


class Peer(NamedTuple):
    """A coder: bytes to bytes and back.

    planes: it gets all low bytes of 16-bit values before all high bytes, which helps any coder with floats. sampled: it
    is slow, and sees 4 MiB of the data.
    """

    base: str
    compress: _Coder
    decompress: _Coder
    planes: bool = False
    sampled: bool = False

    @property
    def name(self) -> str:
        """What it is called, planes and sample included."""
        return self.base + " byte planes" * self.planes + " sample" * self.sampled


class PeerSpeed(NamedTuple):
    """ratio: size of the data per size of what the coder makes of them. MB/s: 10^6 bytes of the data a second."""

    coder: str
    ratio: float
    encode_mb_s: float
    decode_mb_s: float


def ratios(raw: bytes | memoryview) -> dict[str, float]:
    """Name of each general coder -> size of `raw` (16-bit values) / size of what it makes of it.

    lz4 and brotli take part where they are installed.
    """
    whole = bytes(raw)
    return {peer.name: _ratio(peer, _seen(peer, whole)) for peer in _general(16)} if whole else {}


def installed(dtype: DType) -> list[Peer]:
    """The coders that can be measured here on a cache of `dtype`, the general ones first."""
    return [*_general(FORMATS[dtype].bits), *_blosc2(dtype), *_zipnn(dtype), *_openzl(dtype)]


def measure(peer: Peer, raw: bytes, runs: int) -> PeerSpeed:
    """Median speeds of `runs` runs, of one where the peer is sampled.

    Raises:
        ProlepsisError: the peer fails, or does not give back what it was given.
    """
    data = _seen(peer, raw)
    encode, decode = [], []
    try:
        for _ in range(1 if peer.sampled else runs):
            start = time.perf_counter()
            coded = _encode(peer, data)
            middle = time.perf_counter()
            decoded = _decode(peer, coded)
            end = time.perf_counter()
            encode.append(middle - start)
            decode.append(end - middle)
            if decoded != data:
                raise ProlepsisError("it does not give back what it was given")
    except Exception as error:  # whatever a foreign coder may raise
        raise ProlepsisError(f"{peer.name} failed: {error}") from error
    megabytes = len(data) / 1e6
    speeds = (megabytes / statistics.median(seconds) for seconds in (encode, decode))
    return PeerSpeed(peer.name, len(data) / len(coded), *speeds)


def _ratio(peer: Peer, data: bytes) -> float:
    return len(data) / len(_encode(peer, data))


def _seen(peer: Peer, data: bytes) -> bytes:
    """What the peer gets to see of the data."""
    if not peer.sampled or len(data) <= _PIECES * _PIECE:
        return data
    starts = np.linspace(0, len(data) - _PIECE, _PIECES).astype(np.int64) // 2 * 2
    return b"".join(data[s : s + _PIECE] for s in starts)


def _encode(peer: Peer, data: bytes) -> Any:
    return peer.compress(_turned(data, -1, 2) if peer.planes else data)


def _decode(peer: Peer, coded: Any) -> Any:
    return _turned(peer.decompress(coded), 2, -1) if peer.planes else peer.decompress(coded)


def _turned(data: bytes, rows: int, columns: int) -> bytes:
    return np.frombuffer(data, np.uint8).reshape(rows, columns).T.tobytes()


def _general(bits: int) -> list[Peer]:
    """Those that know nothing of numbers, without and, for 16-bit values, with byte planes."""
    planes = (False, True) if bits == 16 else (False,)
    peers = [_zstd(3, p) for p in planes] + [_zstd(19, p, sampled=True) for p in planes]
    peers += [
        Peer("zlib-1", lambda data: zlib.compress(data, 1), zlib.decompress),
        Peer("lzma-1", lambda data: lzma.compress(data, preset=1), lzma.decompress, sampled=True),
    ]
    if (lz4 := _module("lz4.frame")) is not None:
        peers += [Peer("lz4", lz4.compress, lz4.decompress, p) for p in planes]
    if (brotli := _module("brotli")) is not None:
        peers.append(Peer("brotli-5", lambda data: brotli.compress(data, quality=5), brotli.decompress, sampled=True))
    return peers


def _zstd(level: int, planes: bool, *, sampled: bool = False) -> Peer:
    compress = zstandard.ZstdCompressor(level=level).compress
    return Peer(f"zstd-{level}", compress, zstandard.ZstdDecompressor().decompress, planes, sampled)


def _blosc2(dtype: DType) -> list[Peer]:
    """zstd-5 behind a transposition of each block's bits; of its bytes too, where values have two."""
    blosc2 = _module("blosc2")
    if blosc2 is None:
        return []
    width = max(1, FORMATS[dtype].bits // 8)

    def peer(name: str, kind: Any) -> Peer:
        options = {"codec": blosc2.Codec.ZSTD, "clevel": 5, "typesize": width, "filters": [kind], "nthreads": 1}
        return Peer(
            f"blosc2 zstd-5 {name}",
            lambda data: blosc2.compress2(data, **options),
            lambda coded: blosc2.decompress2(coded, nthreads=1),
        )

    bits, bytes_ = peer("bitshuffle", blosc2.Filter.BITSHUFFLE), peer("shuffle", blosc2.Filter.SHUFFLE)
    return [bits, bytes_] if width == 2 else [bits]


def _zipnn(dtype: DType) -> list[Peer]:
    """It takes floats alone; what it does with 8-bit ones suits other bytes as well."""
    zipnn = _module("zipnn")
    if zipnn is None:
        return []
    known = {"bf16": "bfloat16", "fp16": "float16", "fp8_e5m2": "float8_e5m2"}.get(dtype, "float8_e4m3fn")

    def coder() -> Any:
        return zipnn.ZipNN(bytearray_dtype=known, threads=1)

    # Given a copy, because it moves sign bits within its input.
    return [Peer(f"zipnn {known}", lambda data: coder().compress(bytearray(data)), lambda c: coder().decompress(c))]


def _openzl(dtype: DType) -> list[Peer]:
    """The graph it offers for numbers; and, of 16-bit floats, that with exponents apart."""
    zl = _module("openzl.ext")
    if zl is None:
        return []
    kind = np.uint16 if FORMATS[dtype].bits == 16 else np.uint8

    def peer(name: str, graph: Callable[[Any], Any]) -> Peer:
        compressor = zl.Compressor()
        compressor.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)
        compressor.select_starting_graph(graph(compressor))

        def compress(data: bytes) -> Any:
            context = zl.CCtx()
            context.ref_compressor(compressor)
            return context.compress([zl.Input(zl.Type.Numeric, np.frombuffer(data, kind))])

        return Peer(name, compress, lambda coded: zl.DCtx().decompress(coded)[0].content.as_nparray().tobytes())

    peers = [peer("openzl", zl.graphs.Compress())]
    apart = {"bf16": zl.nodes.BFloat16Deconstruct, "fp16": zl.nodes.Float16Deconstruct}.get(dtype)
    if apart is not None:
        generic = zl.graphs.Compress()
        peers.append(peer("openzl exponents", lambda c: apart()(c, generic(c), generic(c))))
    return peers


def _module(name: str) -> Any:
    """The module, or None where it, or what it needs, is not installed."""
    try:
        return import_module(name)
    except ImportError:
        return None
