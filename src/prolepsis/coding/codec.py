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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.container import TokenStorage
from prolepsis.coding.floats import as_bits
from prolepsis.coding.profile import measure
from prolepsis.coding.reader import SessionReader
from prolepsis.coding.rope import RopeSpec
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
) -> bytes:
    """Code a KV cache, losslessly, as the bytes of a session file.

    kv: [layers, 2 (K, V), tokens, kv_heads, head_dim]; uint16 bit patterns with `dtype` "bf16" or "fp16", NumPy
    float16, or a torch bfloat16 / float16 tensor. rope: how K was turned; without it K is coded as V is, at a lower
    ratio. start: position of the first token. The rest is kept for the reader.

    Raises:
        InputError: a shape, dtype or parameter that cannot be coded.
    """
    bits, name = as_bits(kv, dtype)
    if bits.ndim != 5 or bits.shape[1] != 2 or 0 in bits.shape[:2] + bits.shape[3:]:
        raise InputError(f"KV of shape {bits.shape}, expected (layers, 2, tokens, kv_heads, head_dim)")
    file = BytesIO()
    tokens: TokenStorage = "none" if token_ids is None else "ids"
    writer = SessionWriter(
        file, measure(bits, name, rope, start), dtype=name, rope=rope, start=start, model=model, numerics=numerics,
        block_size=1 if start % 16 else 16, tokens=tokens,
    )  # fmt: skip
    writer.add(bits, token_ids)
    writer.finish(metadata)
    return file.getvalue()


def decode(data: bytes | bytearray | memoryview) -> NDArray[np.uint16]:
    """The KV that `encode` was given, as uint16 bit patterns, every value checked.

    Raises:
        SegmentError: the data are truncated, damaged, foreign or of a newer version.
    """
    return SessionReader(BytesIO(data), "the coded data").read_all()
