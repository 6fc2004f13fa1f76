"""Profiles of a loaded model: calibrated on texts, kept in files, and refused for any other model."""

import os
from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding import kv_array
from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.cache_dtypes import KV, DType
from prolepsis.coding.calibration import Embedding, Progress, calibrate_linear
from prolepsis.coding.calibration_sample import CalibrationSample
from prolepsis.coding.linear_profile import LinearProfile
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import grid_spans, measure_parts
from prolepsis.coding.profile_file import CalibratedProfile, from_bytes
from prolepsis.coding.rates import rate
from prolepsis.coding.segment_coder import SegmentCoder
from prolepsis.coding.target_cache import compute_kv
from prolepsis.coding.twin_calibration import calibrate_twin
from prolepsis.coding.twin_choice import ALL, calibrate_mixed, mean_bits
from prolepsis.coding.twin_network import Target
from prolepsis.coding.twin_profile import TwinProfile
from prolepsis.engine.identity import geometry, identity
from prolepsis.engine.llm import LLM
from prolepsis.errors import InputError
from prolepsis.kernels.twin_pass import ATTENTION_OUT, DOWN, GATE_UP, QUERY

PredictorKind = Literal["marginal", "static", "linear", "twin-int4", "twin-mixed", "twin-int8", "twin-int8a16"]
MIXED_BITS = 4.5
"""What a weight of `twin-mixed` has on average, by default, scales included."""
MAX_PROFILE = 1 << 32  # bytes of a profile file


class WindowKV(NamedTuple):
    """A window of a text: token ids, uint32, and their KV from position 0."""

    ids: NDArray[np.uint32]
    kv: KV


def kv_of_texts(
    llm: LLM, texts: Many[Many[int]], dtype: DType, window: int, tokens: int, on_progress: Progress | None = None
) -> Iterator[WindowKV]:
    """The KV of texts, given as token ids, in windows of up to `window` tokens, until there are `tokens` of them.

    Each window is computed on its own, also with a dtype that the engine's cache does not have.
    on_progress(tokens done, tokens).
    """
    done, total = 0, min(tokens, sum(map(len, texts)))
    for ids in texts:
        for first in range(0, len(ids), window):
            part = list(ids[first : first + min(window, total - done)])
            if not part:
                return
            yield WindowKV(np.array(part, np.uint32), _compute(llm, part, dtype))
            done += len(part)
            if on_progress is not None:
                on_progress(done, total)


def _compute(llm: LLM, ids: list[int], dtype: DType) -> KV:
    if dtype != llm.kv_cache.dtype:
        return compute_kv(target_of(llm), np.array(ids, np.uint32), dtype)
    sequence = llm.runner.new_sequence(ids)
    try:
        llm.runner.prefill(sequence)
        return llm.kv_cache.read(sequence.table, 0, len(ids))
    finally:
        sequence.release()


def collect(llm: LLM, windows: Iterator[WindowKV], dtype: DType, tokens: int) -> CalibrationSample:
    """A sample of up to `tokens` tokens of the windows. The caller closes it."""
    sample = CalibrationSample(geometry(llm, dtype), llm.rope, tokens)
    try:
        for ids, kv in windows:
            for span in grid_spans(0, len(ids)):
                part = slice(span.start, span.start + span.count)
                sample.add(Segment(span.start, span.count, ids[part]), kv_array.part(kv, part.start, part.stop))
    except BaseException:
        sample.close()
        raise
    return sample


def calibrate(
    llm: LLM,
    sample: CalibrationSample,
    predictor: PredictorKind,
    on_progress: Progress | None = None,
    bits: float = MIXED_BITS,
) -> CalibratedProfile:
    """Fit a profile to `sample`. on_progress(layers done, layers). bits: of a weight of
    `twin-mixed`, on average.

    Raises:
        InputError: the predictor cannot take this model's heads, or the sample is empty.
    """
    profile: AnyProfile
    if predictor == "linear":
        embedding = Embedding(llm.runner.decoder.embedding_rows, llm.config.vocab_size, llm.config.norm_eps)
        profile = calibrate_linear(sample, embedding, on_progress)
    elif predictor == "static" or predictor == "marginal":
        profile = measure_parts(sample.parts, sample.geometry, sample.rope, predictor)
    elif predictor == "twin-mixed":
        profile = calibrate_mixed(sample, target_of(llm), bits, on_progress)
    else:
        profile = calibrate_twin(sample, target_of(llm), predictor, on_progress)
    return CalibratedProfile(profile, sample.geometry, sample.rope, identity(llm), sample.tokens)


def mixed_bits(llm: LLM, profile: AnyProfile) -> dict[str, float]:
    """Bits a weight that `twin-mixed` has, of each product and of all together; empty for other profiles."""
    if not isinstance(profile, TwinProfile) or profile.choice is None:
        return {}
    found = mean_bits(target_of(llm), profile.choice)
    names = {ALL: "all", QUERY: "queries", ATTENTION_OUT: "attention's output", GATE_UP: "gate and up", DOWN: "down"}
    return {name: found[key] for key, name in names.items()}


class Comparison(NamedTuple):
    """Of some KV: tokens; and stored bytes per coded byte with a profile, and with statistics of the KV itself."""

    tokens: int
    ratio: float
    uncalibrated_ratio: float


def compare(calibrated: CalibratedProfile, sample: CalibrationSample, *, held_out: bool | None = None) -> Comparison:
    """What the profile makes of a sample, or of the part of it that was held out of the fit.

    Beside it stands `static` measured on that very KV, without the bytes that its statistics take.
    """

    def parts() -> Iterator[tuple[Segment, KV]]:
        return sample.parts(held_out=held_out)

    own = measure_parts(parts, calibrated.geometry, calibrated.rope)
    rates = [
        rate(SegmentCoder(calibrated.geometry, profile, calibrated.rope), sample.parts(), sample.chosen(held_out))
        for profile in (calibrated.profile, own)
    ]
    return Comparison(rates[0].tokens, *(r.ratio for r in rates))


def read_profile(path: str | os.PathLike[str]) -> CalibratedProfile:
    """The profile file at `path`.

    Raises:
        InputError: it cannot be read, or is no sound profile file.
    """
    name = os.fspath(path)
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise InputError(f"{name} is not a regular file, as profiles are")
        with open(path, "rb") as file:
            data = file.read(MAX_PROFILE + 1)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from error
    if len(data) > MAX_PROFILE:
        raise InputError(f"{name} is larger than any profile: {MAX_PROFILE >> 30} GiB")
    return from_bytes(data, name)


def load_profile(path: str | os.PathLike[str], llm: LLM, dtype: DType) -> AnyProfile:
    """The profile at `path`, ready for this model's KV.

    Raises:
        InputError: as `read_profile`; or it was calibrated for another model or cache dtype.
    """
    calibrated = read_profile(path)
    calibrated.require(os.fspath(path), identity(llm), geometry(llm, dtype), llm.rope)
    return bind(calibrated.profile, llm)


def needs_model(profile: AnyProfile) -> bool:
    """Whether the profile predicts only with parts of the model that are not in it, which `bind` gives it."""
    return isinstance(profile, TwinProfile) or (isinstance(profile, LinearProfile) and profile.vocabulary > 0)


def target_of(llm: LLM) -> Target:
    """The model as a twin needs it."""
    config = llm.config
    return Target(llm.runner.decoder.plan, config.num_kv_heads, config.head_dim, config.vocab_size)


def bind(profile: AnyProfile, llm: LLM) -> AnyProfile:
    """The profile with what it needs of the model.

    Raises:
        InputError: it was calibrated with another model.
    """
    if isinstance(profile, TwinProfile):
        return profile.bound_to(target_of(llm))
    if isinstance(profile, LinearProfile) and needs_model(profile):
        return profile.bound_to(llm.runner.decoder.embedding_rows, llm.config.vocab_size)
    return profile


def kind_of(profile: AnyProfile) -> PredictorKind:
    """The predictor of a profile, without its version."""
    return cast(PredictorKind, profile.predictor_name.partition("/")[0])
