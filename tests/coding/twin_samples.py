"""A small model with every weight type, its KV, and a twin calibrated on some of it."""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import KV, DType, Geometry, quantise
from prolepsis.coding.calibration_sample import CalibrationSample
from prolepsis.coding.kv_array import part
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import grid_spans
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.twin_calibration import calibrate_twin
from prolepsis.coding.twin_choice import calibrate_mixed
from prolepsis.coding.twin_network import MIXED, Target
from prolepsis.coding.twin_profile import TwinProfile

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from decoding import HEAD_DIM, KV_HEADS, LAYERS, THETA, VOCAB, Session, TinyModel

ROPE = RopeSpec(THETA, HEAD_DIM, "half")


class Text(NamedTuple):
    """Token ids, uint32, and their KV from position 0."""

    ids: NDArray[np.uint32]
    kv: KV


class Model(NamedTuple):
    """target: as the twin needs it. session: what computes KV with it."""

    target: Target
    session: Session

    def text(self, seed: int, tokens: int, dtype: DType = "bf16") -> Text:
        """Random tokens, some of them again and again, as words are."""
        rng = np.random.default_rng(seed)
        ids = (rng.integers(0, VOCAB, tokens) * rng.random(tokens) ** 2).astype(np.int64)
        self.session.in_chunks(ids, [256])
        kv = self.session.kv(tokens)
        return Text(ids.astype(np.uint32), kv if dtype == "bf16" else quantise(kv, dtype))

    def geometry(self, dtype: DType = "bf16") -> Geometry:
        return Geometry(dtype, LAYERS, KV_HEADS, HEAD_DIM)

    def sample(self, dtype: DType = "bf16") -> CalibrationSample:
        """Two texts of 300 tokens."""
        sample = CalibrationSample(self.geometry(dtype), ROPE, 600)
        for seed in (1, 2):
            ids, kv = self.text(seed, 300, dtype)
            for span in grid_spans(0, 300):
                stop = span.start + span.count
                sample.add(Segment(span.start, span.count, ids[span.start : stop]), part(kv, span.start, stop))
        return sample

    def twin(self, variant: str, dtype: DType = "bf16") -> TwinProfile:
        """A profile fitted to `sample`."""
        with self.sample(dtype) as sample:
            if variant == MIXED:
                return calibrate_mixed(sample, self.target, 4.0)
            return calibrate_twin(sample, self.target, variant)


def model(path: Path, only: str | None = None) -> Model:
    """only: the type of all weights; by default every type is there."""
    session = Session(TinyModel.random(0, only=only).write(path))
    return Model(Target(session.decoder.plan, KV_HEADS, HEAD_DIM, VOCAB), session)
