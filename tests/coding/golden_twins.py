"""Golden files that twins have coded, in two saves, which every later release must read.

`python tests/coding/golden_twins.py` writes them anew; that is for the time before their release. The model they belong
to is drawn at random with a fixed seed, and its fingerprint is in the profiles.
"""

import hashlib
import tempfile
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
from twin_samples import ROPE, Model, Text, model

from prolepsis.coding import SessionWriter, kv_array
from prolepsis.coding.cache_dtypes import KV, DType, arrays_of
from prolepsis.coding.profile_file import CalibratedProfile, from_bytes, to_bytes
from prolepsis.coding.twin_profile import TwinProfile

GOLDEN = Path(__file__).parents[1] / "data" / "golden_twins"
TWINS: tuple[tuple[str, DType], ...] = (
    ("twin-int8", "bf16"), ("twin-int8a16", "fp16"), ("twin-int4", "fp8_e4m3"), ("twin-int8", "int8"),
    ("twin-mixed", "fp8_e4m3"),
)  # fmt: skip
NAMES = [f"{variant}_{dtype}" for variant, dtype in TWINS]
SAVES = (250, 280)


def digest(kv: KV) -> str:
    """SHA-256 of what the cache stores."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays_of(kv))).hexdigest()


def profile_of(name: str, small: Model) -> TwinProfile:
    """The profile of a golden file, with its model."""
    profile = from_bytes((GOLDEN / f"{name}.profile").read_bytes(), name).profile
    assert isinstance(profile, TwinProfile)
    return profile.bound_to(small.target)


def written(text: Text, profile: TwinProfile) -> bytes:
    """The session file of a text."""
    file = BytesIO()
    writer = SessionWriter(file, profile, dtype=profile.geometry.dtype, rope=ROPE)
    for start, stop in zip((0, *SAVES), SAVES, strict=False):
        writer.add(kv_array.part(text.kv, start, stop), text.ids[start:stop])
        writer.finish(b'{"golden":2}')
    return file.getvalue()


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    digests = {}
    with tempfile.TemporaryDirectory() as directory:
        small = model(Path(directory) / "model.gguf")
        for name, (variant, dtype) in zip(NAMES, TWINS, strict=True):
            profile, text = small.twin(variant, dtype), small.text(7, SAVES[-1], dtype)
            saved = CalibratedProfile(profile, profile.geometry, ROPE, {}, 600)
            (GOLDEN / f"{name}.profile").write_bytes(to_bytes(saved))
            (GOLDEN / f"{name}.pkv").write_bytes(written(text, profile))
            digests[name] = digest(text.kv)
    (GOLDEN / "digests.json").write_bytes(msgspec.json.format(msgspec.json.encode(digests)) + b"\n")


if __name__ == "__main__":
    main()
