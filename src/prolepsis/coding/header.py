"""The beginning of a session file, byte by byte: docs/format.md."""

import struct
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from prolepsis.coding.cache_dtypes import FORMATS, KIVI_BLOCK, KIVI_RUN, STEP_BITS, DType, Geometry
from prolepsis.coding.hashes import checksum
from prolepsis.coding.profile import GRID
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.source import Source
from prolepsis.errors import InputError, SegmentError

MAGIC = b"\x89PKV\r\n\x1a\n"
VERSION, MINOR = 2, 0
MAX_HEADER = 1 << 26
MAX_POSITION = 1 << 40
MAX_CHANNELS = 1 << 21  # layers * 2 * kv_heads * head_dim
MAX_ROW = 4096  # heads_per_stream * head_dim: bit positions in a stream stay far below 2**31

PREAMBLE = struct.Struct("<8sHHIQ")  # magic, version, minor version, header length, checksum

_Size = Annotated[int, Meta(ge=1, le=4096)]
_Text = Annotated[str, Meta(max_length=1024)]
TokenStorage = Literal["ids", "hashes", "none"]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every segment of a file shares.

    model: what identifies the model, part by part (weights, config, tokenizer ...), for comparison.
    numerics: which arithmetic computed the KV. start: position of the first token. profile: the profile's bytes, or
    None where it is kept outside the file, under its fingerprint.
    """

    model: Annotated[dict[_Text, _Text], Meta(max_length=64)]
    numerics: _Text
    predictor: _Text
    profile_fingerprint: _Text
    dtype: DType
    layers: _Size
    kv_heads: _Size
    head_dim: _Size
    heads_per_stream: _Size
    block_size: _Size
    segment_tokens: Annotated[int, Meta(ge=GRID, le=GRID)]
    start: Annotated[int, Meta(ge=0, le=MAX_POSITION)]
    tokens: TokenStorage
    rope: RopeSpec | None
    profile: bytes | None

    @property
    def geometry(self) -> Geometry:
        """Shape and dtype of one token's KV."""
        return Geometry(self.dtype, self.layers, self.kv_heads, self.head_dim)

    @property
    def beside(self) -> tuple[str, ...]:
        """What streams of their own hold beside the values: the steps of integers, and the minimums of kivi4."""
        if self.dtype == "kivi4":
            return "steps", "minimums"
        return ("steps",) if FORMATS[self.dtype].limit else ()

    @property
    def values_per_token(self) -> list[int]:
        """Values of a token in each stream of a layer's K, or of its V: first those of what is `beside`."""
        groups = self.kv_heads // self.heads_per_stream
        of_a_head = self.head_dim // KIVI_RUN if self.dtype == "kivi4" else 1
        return [self.kv_heads * of_a_head] * len(self.beside) + [self.heads_per_stream * self.head_dim] * groups

    @property
    def streams(self) -> int:
        """Streams of each segment."""
        return self.layers * 2 * len(self.values_per_token)

    @property
    def raw_bits(self) -> int:
        """Bits of one token's KV when it is not coded."""
        values = self.layers * 2 * self.kv_heads * self.head_dim * FORMATS[self.dtype].bits
        return values + self.layers * 2 * STEP_BITS * sum(self.values_per_token[: len(self.beside)])

    def stream_name(self, stream: int) -> str:
        """Layer, K or V and heads of a stream, for messages."""
        unit, part = divmod(stream, len(self.values_per_token))
        where = f"layer {unit // 2}, {'KV'[unit % 2]}"
        if part < len(self.beside):
            return f"{where}, {self.beside[part]}"
        first = (part - len(self.beside)) * self.heads_per_stream
        return f"{where}, heads {first}-{first + self.heads_per_stream - 1}"


class Front(NamedTuple):
    """The beginning of a file. link: what the checksum of the first record begins with."""

    header: Header
    version: int
    link: bytes


def pack_header(header: Header) -> bytes:
    """Preamble and header.

    Raises:
        InputError: the header holds something that a reader would refuse.
    """
    body = msgspec.msgpack.encode(header)
    try:
        _unpack(body, MINOR)
    except ValueError as error:
        raise InputError(f"this cache cannot be saved: {error}") from error
    preamble = PREAMBLE.pack(MAGIC, VERSION, MINOR, len(body), 0)[:-8]
    return preamble + checksum(preamble, body) + body


def header_link(packed: bytes) -> bytes:
    """The link of a packed header."""
    return packed[PREAMBLE.size - 8 : PREAMBLE.size]


def read_front(source: Source) -> Front:
    """Read and check the beginning of a file.

    Raises:
        SegmentError: foreign, truncated, newer, damaged, or out of bounds.
    """
    name = source.name
    preamble = bytes(source.read(PREAMBLE.size))
    if not preamble:
        raise SegmentError(f"{name} is empty, so it is not a Prolepsis session file")
    if preamble[:8] != MAGIC[: len(preamble)]:
        raise SegmentError(f"{name} is not a Prolepsis session file: it begins with {preamble[:8]!r}")
    if len(preamble) < PREAMBLE.size:
        raise SegmentError(f"{name} is truncated: {len(preamble)} bytes, less than the preamble of {PREAMBLE.size}")
    _, version, minor, length, _ = PREAMBLE.unpack(preamble)
    if version > VERSION:
        raise SegmentError(
            f"{name} has format version {version}; this Prolepsis reads up to version {VERSION}: upgrade Prolepsis"
        )
    if version < 1 or (version == 1 and minor) or length > MAX_HEADER:
        raise SegmentError(f"{name}: the preamble is damaged (version {version}.{minor}, header of {length} bytes)")
    body = bytes(source.read(length))
    if len(body) < length:
        raise SegmentError(f"{name} is truncated: a header of {length} bytes was announced, {len(body)} are there")
    link = checksum(preamble[:-8], body)
    if link != preamble[-8:]:
        raise SegmentError(f"{name}: the header is damaged: its checksum differs")
    try:
        return Front(_unpack(body, minor), version, b"" if version == 1 else link)
    except (ValueError, RecursionError) as error:
        raise SegmentError(f"{name}: the header is not valid: {error}") from error


def _unpack(body: bytes, minor: int) -> Header:
    """Raises ValueError (which msgspec's errors are) for anything out of bounds."""
    if minor > MINOR:  # a newer minor version only adds keys that one may do without
        fields = msgspec.msgpack.decode(body, type=dict[str, object])
        header = msgspec.convert({k: v for k, v in fields.items() if k in Header.__struct_fields__}, Header)
    else:
        header = msgspec.msgpack.decode(body, type=Header)
    channels = header.layers * 2 * header.kv_heads * header.head_dim
    if channels > MAX_CHANNELS or len(body) > MAX_HEADER:
        raise ValueError(f"{channels} channels a token, more than the {MAX_CHANNELS} this version takes")
    if header.kv_heads % header.heads_per_stream or header.heads_per_stream * header.head_dim > MAX_ROW:
        raise ValueError(f"{header.kv_heads} heads cannot be cut into streams of {header.heads_per_stream}")
    if header.dtype == "int4" and header.head_dim % 2:
        raise ValueError(f"int4 packs two channels into a byte, which heads of {header.head_dim} do not fill")
    if header.dtype == "kivi4" and (header.head_dim % KIVI_RUN or header.block_size != KIVI_BLOCK):
        raise ValueError(
            f"kivi4 has runs of {KIVI_RUN} channels and blocks of {KIVI_BLOCK} tokens, not heads of {header.head_dim} "
            f"and blocks of {header.block_size}"
        )
    if GRID % header.block_size or header.start % header.block_size:
        raise ValueError(f"block size {header.block_size} must divide {GRID}, and the start {header.start}")
    if header.rope is not None and header.rope.dim > header.head_dim:
        raise ValueError(f"RoPE of {header.rope.dim} channels does not fit heads of {header.head_dim}")
    return header
