"""Builds GGUF bytes by hand, so that tests can also write what no correct writer would."""

import struct
from typing import Any

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", 11: "q", 12: "d"}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, data: Any) -> bytes:
    """A metadata value; an array's `data` is (element kind, list)."""
    if kind == STRING:
        return text(data)
    if kind == ARRAY:
        element, items = data
        return struct.pack("<IQ", element, len(items)) + b"".join(value(element, item) for item in items)
    return struct.pack("<" + _CODES[kind], data)


def key(name: str | bytes, kind: int, data: Any) -> bytes:
    return text(name) + struct.pack("<I", kind) + value(kind, data)


def info(name: str | bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A tensor's entry; `shape` in the file's order, fastest dimension first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf(
    keys: list[bytes],
    infos: list[bytes] | None = None,
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    order: str = "<",
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    infos = infos or []
    n_tensors, n_keys = counts or (len(infos), len(keys))
    head = magic + struct.pack(f"{order}IQQ", version, n_tensors, n_keys) + b"".join(keys) + b"".join(infos)
    return head + b"\0" * (-len(head) % alignment) * bool(infos) + data
