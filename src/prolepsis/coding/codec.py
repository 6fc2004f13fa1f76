"""The codec in two functions, for whoever has KV and wants fewer bytes.

>>> import numpy as np
>>> from prolepsis.coding import decode, encode
>>> kv = np.random.default_rng(0).normal(size=(2, 2, 40, 1, 64)).astype(np.float16).view(np.uint16)
>>> data = encode(kv, dtype="fp16")
>>> np.array_equal(decode(data), kv)
True
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from operator import index
from typing import Any

from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.cache_dtypes import KIVI_BLOCK, KV, as_stored
from prolepsis.coding.header import TokenStorage
from prolepsis.coding.profile import measure
from prolepsis.coding.reader import SessionReader
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.threads import pause
from prolepsis.coding.writer import SessionWriter
from prolepsis.errors import InputError


def encode(
    kv: Any,
    *,
    dtype: str | None = None,
    rope: RopeSpec | None = None,
    start: int = 0,
    token_ids: Sequence[int] | None = None,
    model: Mapping[str, str] | None = None,
    numerics: str = "",
    metadata: bytes = b"",
    profile: AnyProfile | None = None,
) -> bytes:
    """Code a KV cache, losslessly, as the bytes of a session file.

    kv: [layers, 2 (K, V), tokens, kv_heads, head_dim], in any form that `cache_dtypes.as_stored` takes: float16,
    bfloat16 and fp8 arrays or tensors, bit patterns with their `dtype` said ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2"),
    QuantisedKV, KiviKV. rope: how K was turned; without it K is coded as V is, at a lower ratio. start: position of the
    first token. profile: what to code with, by default one measured on `kv`; a calibrated one may need the token_ids,
    and where it builds upon all tokens, start 0. The rest is kept for the reader.

    Raises:
        InputError: a shape, dtype or parameter that cannot be coded.
    """
    stored, name = as_stored(kv, dtype)
    rope = None if rope is None else rope.checked()
    try:
        start = index(start)
    except TypeError as error:
        raise InputError(f"start must be a whole number, not {start!r}") from error
    file = BytesIO()
    tokens: TokenStorage = "none" if token_ids is None else "ids"
    profile = profile or measure(stored, name, rope, start)
    pause()
    block_size = KIVI_BLOCK if name == "kivi4" else 1 if start % 16 else 16
    writer = SessionWriter(
        file, profile, dtype=name, rope=rope, start=start, model=model,
        numerics=numerics, block_size=block_size, tokens=tokens,
    )  # fmt: skip
    pause()
    writer.add(stored, token_ids)
    pause()
    writer.finish(metadata)
    return file.getvalue()


def decode(data: bytes | bytearray | memoryview, *, profile: AnyProfile | None = None) -> KV:
    """The KV that `encode` was given, every value checked: bit patterns (uint16, uint8 of fp8), QuantisedKV or KiviKV.

    profile: the one it was coded with, where that is too large to be kept with the data.

    Raises:
        SegmentError: the data are truncated, damaged, foreign or of a newer version, or need another profile.
        InputError: no bytes.
    """
    try:
        memoryview(data)
    except TypeError as error:
        raise InputError(f"coded KV is bytes, not {type(data).__name__}") from error
    return SessionReader(data, "the coded data", profile=profile).read_all()
