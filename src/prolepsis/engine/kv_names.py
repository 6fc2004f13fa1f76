"""How K and V of prefixes are called in a store: by everything that they depend on, and by nothing else.

A *segment* is tokens start .. stop - 1 of a sequence, where start is a multiple of 256 and stop at most 256 further.
Its name is a hash of its token ids and of the name of the segment before it; the first one's parent is a root, which
stands for the model, its arithmetic, the cache and the salt. So equal names mean equal K and V.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from prolepsis.coding.profile import GRID
from prolepsis.engine.identity import geometry, identity
from prolepsis.engine.llm import LLM

FORMAT = 1
"""Of names and payloads; what another one stored is never found."""

_DIGEST = 32


class SegmentName(NamedTuple):
    """A segment of some sequence. `parent`, `digest`: 32 bytes each."""

    start: int
    stop: int
    parent: bytes
    digest: bytes

    @property
    def key(self) -> str:
        """Where its payload lies in a store."""
        return f"kv-{self.digest.hex()}"


class Names:
    """Names of the segments of one model's sequences, in one kind of cache."""

    def __init__(self, llm: LLM) -> None:
        here = {
            "format": FORMAT,
            "model": identity(llm),
            "numerics": llm.runner.decoder.numerics,
            "geometry": geometry(llm, llm.kv_cache.dtype)._asdict(),
            "rope": llm.rope,
        }
        self._base = msgspec.json.encode(here, order="deterministic")

    def root(self, salt: str) -> bytes:
        """The parent of first segments of sequences under this salt."""
        salted = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST).digest()
        return blake2b(salted + self._base, digest_size=_DIGEST).digest()

    def chain(self, tokens: Sequence[int], salt: str) -> Iterator[SegmentName]:
        """The segments that all `tokens` fall into, first to last; the last may be short."""
        parent = self.root(salt)
        for start in range(0, len(tokens), GRID):
            name = segment(parent, start, tokens[start : start + GRID])
            yield name
            parent = name.digest


def segment(parent: bytes, start: int, ids: Sequence[int]) -> SegmentName:
    """The segment of `ids`, at most 256, that begins at `start` and follows `parent`."""
    packed = array("i", ids)
    if packed.itemsize != 4:  # the names are the same on every machine
        raise AssertionError("array('i') does not have 4 bytes here")
    return SegmentName(
        start, start + len(ids), parent, blake2b(parent + packed.tobytes(), digest_size=_DIGEST).digest()
    )


def latest_key(parent: bytes) -> str:
    """Where the record of the latest segments below `parent` lies (`latest.Latest`)."""
    return f"tail-{parent.hex()}"
