"""The codec: KV caches to bytes and back, bit for bit."""

from prolepsis.coding.cache_dtypes import KiviKV, QuantisedKV
from prolepsis.coding.codec import decode, encode
from prolepsis.coding.profile import Profile, measure
from prolepsis.coding.reader import SessionReader
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.stream_reader import SessionStream
from prolepsis.coding.writer import SessionWriter

__all__ = [
    "KiviKV",
    "Profile",
    "QuantisedKV",
    "RopeSpec",
    "SessionReader",
    "SessionStream",
    "SessionWriter",
    "decode",
    "encode",
    "measure",
]
