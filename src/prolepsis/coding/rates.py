"""How many bytes KV takes under a profile."""

from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

from prolepsis.coding.cache_dtypes import KV, arrays_of
from prolepsis.coding.container import INDEX_ENTRY
from prolepsis.coding.past import follow
from prolepsis.coding.predictors import Segment
from prolepsis.coding.segment_coder import SegmentCoder


class Rate(NamedTuple):
    """stored_bytes: what the cache itself takes; coded_bytes: the streams and their index entries."""

    tokens: int
    stored_bytes: int
    coded_bytes: int

    @property
    def ratio(self) -> float:
        """Stored bytes per coded byte."""
        return self.stored_bytes / self.coded_bytes


def rate(coder: SegmentCoder, parts: Iterable[tuple[Segment, KV]], counted: Iterable[bool] = repeat(True)) -> Rate:
    """What `coder` makes of those segments of texts that are `counted`. Where it is sequential, `parts` must be all."""
    tokens = stored = coded = 0
    for (segment, kv, past), counts in zip(follow(coder.new_past, parts), counted, strict=False):
        if not counts:
            continue
        streams = coder.encode(segment, kv, past)
        tokens += segment.count
        stored += sum(array.nbytes for array in arrays_of(kv))
        coded += sum(len(stream.data) + INDEX_ENTRY.itemsize for stream in streams)
    return Rate(tokens, stored, coded)
