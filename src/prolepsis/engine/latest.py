"""Records of the latest segments below a parent: how sequences that end, or part, within one are found.

Whole segments are found by their names. For what agrees with one only in its first tokens, a record under the parent's
name keeps the token ids of the latest few.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from prolepsis.coding.profile import GRID
from prolepsis.engine.kv_names import SegmentName, segment

_KEPT = 8
_MAX_BYTES = 1 << 16  # many times what a record takes

_Ids = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(min_length=1, max_length=GRID)]
_Record = Annotated[list[_Ids], Meta(max_length=_KEPT)]


def read(data: bytes) -> list[list[int]]:
    """The token ids of the segments in a record, latest first. Raises ValueError for bytes that are none."""
    if len(data) > _MAX_BYTES:
        raise ValueError(f"a record of {len(data)} bytes, at most {_MAX_BYTES} are read")
    return msgspec.msgpack.decode(data, type=_Record)


def with_latest(known: Sequence[list[int]], ids: Sequence[int]) -> bytes:
    """A record of `ids` and of those of `known` that do not begin `ids`, as many as are kept."""
    latest = list(ids)
    others = [each for each in known if latest[: len(each)] != each]
    return msgspec.msgpack.encode([latest, *others][:_KEPT])


def superseded(known: Iterable[list[int]], ids: Sequence[int], parent: bytes, start: int) -> list[SegmentName]:
    """The segments of a record that hold nothing which `ids` does not."""
    latest = list(ids)
    return [segment(parent, start, each) for each in known if len(each) < len(ids) and latest[: len(each)] == each]


def best(known: Iterable[list[int]], wanted: Sequence[int]) -> tuple[list[int], int]:
    """Of `known`, the ids that agree with most of the first tokens of `wanted`, and how many; ([], 0) if none does."""
    found: list[int] = []
    most = 0
    for each in known:
        agree = agreement(each, wanted)
        if agree > most:
            found, most = each, agree
    return found, most


def agreement(ids: Sequence[int], others: Sequence[int]) -> int:
    """With how many equal ids both begin."""
    for count, (one, other) in enumerate(zip(ids, others, strict=False)):
        if one != other:
            return count
    return min(len(ids), len(others))
