"""Golden files: session files of every cache dtype and predictor, which every later release must read.

`python tests/coding/make_golden.py` writes them anew. That is for the time before a format is released: files that were
released are never written again, others may stand beside them.
"""

import hashlib
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
from kv_samples import realistic_kv
from linear_samples import EMBEDDING, VOCABULARY, linear_kv, rows, segments_of
from linear_samples import ROPE as HALF_ROPE

from prolepsis.coding import RopeSpec, SessionReader, SessionWriter, kv_array, tables
from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.cache_dtypes import FORMATS, KV, TOKEN_DTYPES, DType, Geometry, QuantisedKV, arrays_of, values_of
from prolepsis.coding.calibration import Embedding, calibrate_linear
from prolepsis.coding.calibration_sample import CalibrationSample
from prolepsis.coding.linear_profile import LinearProfile
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import measure
from prolepsis.coding.profile_file import CalibratedProfile, from_bytes, to_bytes
from prolepsis.coding.segment_coder import SegmentCoder

GOLDEN = Path(__file__).parents[1] / "data" / "golden_dtypes"
PREDICTORS = ("marginal", "static", "linear")
NAMES = [f"{predictor}_{dtype}" for predictor in PREDICTORS for dtype in TOKEN_DTYPES]
START, TOKENS = 240, 56  # the second segment begins behind a save, within a block
IDS = np.arange(TOKENS, dtype=np.uint32) * 977 % 50_000  # where only their hashes are stored
_SAVES = (START + 21, START + TOKENS)
_WITH_TABLES = ("bf16", "fp8_e4m3", "int8")
_METADATA = b'{"golden":2}'
_ROPE = RopeSpec(500_000.0, 12, "interleaved", 2.0, (1.0, 1.5, 2.0, 3.0, 5.0, 8.0))
_STORED = {"marginal": "none", "static": "hashes", "linear": "ids"}


def embedding_rows(ids: np.ndarray) -> np.ndarray:
    """Of the embedding that the linear profiles were fitted with: a file too, so that no random numbers matter."""
    return np.load(GOLDEN / "embedding.npy")[ids]


def outside_profile(name: str) -> AnyProfile | None:
    """The profile of a file that does not hold it."""
    if not name.startswith("linear"):
        return None
    read = from_bytes((GOLDEN / f"{name}.profile").read_bytes(), name).profile
    assert isinstance(read, LinearProfile)
    return read.bound_to(embedding_rows, VOCABULARY)


def digest(kv: KV) -> str:
    """SHA-256 of what the cache stores."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays_of(kv))).hexdigest()


def written(kv: KV, ids: np.ndarray, profile: AnyProfile, predictor: str, dtype: DType) -> bytes:
    """The file, in two saves."""
    file, rope = BytesIO(), HALF_ROPE if predictor == "linear" else _ROPE
    writer = SessionWriter(
        file, profile, dtype=dtype, rope=rope, start=START, model={"weights": "golden"}, numerics="golden/2",
        tokens=_STORED[predictor],
    )  # fmt: skip
    for stop in _SAVES:
        first = writer.position - START
        known = None if predictor == "marginal" else ids[first : stop - START]
        writer.add(kv_array.part(kv, first, stop - START), known)
        writer.finish(_METADATA)
    return file.getvalue()


def _spoil(kv: KV, dtype: DType) -> None:
    """Values that no statistics expect: of floats the largest and the smallest, NaN and infinities among them."""
    values, last = values_of(kv), (1 << FORMATS[dtype].bits) - 1
    if isinstance(kv, QuantisedKV):
        kv.steps[0, :, 5:8, 0], kv.steps[0, 0, -1, 0] = (0, 0x7C00, 0xFE00), 0x8001
        values[0, 1, 9] = -1 if dtype == "int8" else 0xFF
        return
    patterns = [0, 1, last >> 1, last, (last >> 1) + 1, {16: 0x7F80, 8: 0x7C}[FORMATS[dtype].bits]]
    values[0, :, 9, 0, :6] = patterns


def _samples(predictor: str, dtype: DType) -> tuple[KV, np.ndarray]:
    """(KV, token ids)."""
    if predictor != "linear":
        kv = realistic_kv(layers=1, tokens=TOKENS, heads=2, dim=24, dtype=dtype, rope=_ROPE, start=START)
        return kv, IDS
    kv, ids = linear_kv(START + TOKENS, dtype)
    return _small(kv_array.part(kv, START, START + TOKENS), dtype), ids[START:]


def _small(kv: KV, dtype: DType) -> KV:
    """Three layers, one head, 16 channels of it."""
    width = 8 if dtype == "int4" else 16
    values = values_of(kv)[:3, :, :, :1, :width].copy()
    return QuantisedKV(values, kv.steps[:3, :, :, :1].copy()) if isinstance(kv, QuantisedKV) else values


def _linear_profile(dtype: DType) -> LinearProfile:
    geometry, tokens = Geometry(dtype, 3, 1, 16), 1000
    with CalibrationSample(geometry, HALF_ROPE, tokens) as sample:
        kv, ids = linear_kv(tokens, dtype, seed=1)
        for segment in segments_of(kv, ids, tokens):
            part = kv_array.part(kv, segment.start, segment.start + segment.count)
            sample.add(segment, _small(part, dtype))
        return calibrate_linear(sample, Embedding(rows, VOCABULARY, 0.0))


def _profile(predictor: str, dtype: DType, kv: KV) -> AnyProfile:
    """Some static profiles have tables of their own."""
    if predictor == "linear":
        return _linear_profile(dtype)
    if predictor == "marginal":
        return measure(kv, dtype, _ROPE, START, "marginal")
    profile = measure(kv, dtype, _ROPE, START)
    if dtype not in _WITH_TABLES:
        return profile
    counts = SegmentCoder(Geometry.of(kv, dtype), profile, _ROPE).count(Segment(START, TOKENS), kv)
    return replace(profile, frequencies=tables.fit(counts, dtype))


def _make(predictor: str, dtype: DType) -> str:
    """Write the files of one dtype and predictor; returns the digest of the values."""
    kv, ids = _samples(predictor, dtype)
    profile, name = _profile(predictor, dtype, kv), f"{predictor}_{dtype}"
    _spoil(kv, dtype)
    (GOLDEN / f"{name}.pkv").write_bytes(written(kv, ids, profile, predictor, dtype))
    if predictor == "linear":
        saved = CalibratedProfile(profile, Geometry.of(kv, dtype), HALF_ROPE, {"weights": "golden"}, 1000)
        (GOLDEN / f"{name}.profile").write_bytes(to_bytes(saved))
    read = SessionReader((GOLDEN / f"{name}.pkv").read_bytes(), profile=outside_profile(name)).read_all()
    assert digest(read) == digest(kv)
    return digest(kv)


def main() -> None:
    """Write all of them, and the digests of their values."""
    GOLDEN.mkdir(exist_ok=True)
    np.save(GOLDEN / "embedding.npy", EMBEDDING)
    digests = {f"{p}_{dtype}": _make(p, dtype) for p in PREDICTORS for dtype in TOKEN_DTYPES}
    (GOLDEN / "digests.json").write_bytes(msgspec.json.format(msgspec.json.encode(digests)) + b"\n")


if __name__ == "__main__":
    main()
