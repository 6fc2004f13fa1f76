"""The golden file of kivi4, which every later release must read. `python tests/coding/golden_kivi4.py` writes it anew:
for the time before the format is released, as `make_golden`."""

import hashlib
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
from kivi_samples import kivi_kv, spoil

from prolepsis.coding import RopeSpec, SessionWriter, kv_array, tables
from prolepsis.coding.cache_dtypes import KV, Geometry, arrays_of
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import Profile, measure
from prolepsis.coding.segment_coder import SegmentCoder

FILE = Path(__file__).parents[1] / "data" / "golden_kivi4.pkv"
START, TOKENS = 128, 256  # two saves, either side of a multiple of 256
IDS = np.arange(TOKENS, dtype=np.uint32) * 977 % 50_000
_ROPE = RopeSpec(500_000.0, 12, "interleaved", 2.0, (1.0, 1.5, 2.0, 3.0, 5.0, 8.0))


def digest(kv: KV) -> str:
    """SHA-256 of what the cache stores."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays_of(kv))).hexdigest()


def written(kv: KV, profile: Profile) -> bytes:
    """The file, in two saves."""
    file = BytesIO()
    writer = SessionWriter(
        file, profile, dtype="kivi4", rope=_ROPE, start=START, model={"weights": "golden"}, numerics="golden/2",
        block_size=128,
    )  # fmt: skip
    for first in (0, 128):
        writer.add(kv_array.part(kv, first, first + 128), IDS[first : first + 128])
        writer.finish(b'{"golden":2}')
    return file.getvalue()


def main() -> None:
    """Write it, with token tables of its own, and say its digest."""
    kv = kivi_kv(layers=1, tokens=TOKENS, heads=1, dim=32, rope=_ROPE, start=START)
    profile = measure(kv, "kivi4", _ROPE, START)
    counts = SegmentCoder(Geometry.of(kv, "kivi4"), profile, _ROPE).count(
        Segment(START, 128), kv_array.part(kv, 0, 128)
    )
    spoil(kv)
    FILE.write_bytes(written(kv, replace(profile, frequencies=tables.fit(counts, "kivi4"))))
    print(digest(kv))


if __name__ == "__main__":
    main()
