"""The profile that the demonstration codes with: the model's own, or one calibrated on a text that Python brings."""

import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.profile_file import to_bytes
from prolepsis.engine.llm import LLM
from prolepsis.engine.profile_store import best_kept, keep
from prolepsis.engine.profiles import PredictorKind, calibrate, collect, kv_of_texts
from prolepsis.engine.runner import Progress
from prolepsis.errors import InputError
from prolepsis.store import replace_file

PREDICTOR: PredictorKind = "twin-int8"
_TOKENS = 2048  # to calibrate on: far fewer than `prolepsis calibrate` takes, for the sake of time
_TOPICS = ("execmodel", "objects", "import", "typesmapping", "exceptions")  # prose, some of it with code


class DemoProfile(NamedTuple):
    """A profile, its file, and the seconds that calibrating took; None where it was kept from before."""

    profile: AnyProfile
    path: Path
    seconds: float | None


def calibration_text() -> str:
    """English that every Python has: parts of its language reference."""
    return "\n\n".join(topics[name] for name in _TOPICS)


def profile_for(
    llm: LLM, scratch: Path, on_read: Progress, on_fit: Progress, on_skip: Callable[[str], None]
) -> DemoProfile:
    """The kept profile of this model; else a new one, which is kept, or written to `scratch` where that cannot be.

    on_read(tokens done, tokens), on_fit(layers done, layers); on_skip: that of `best_kept`.

    Raises:
        InputError: the predictor cannot take this model.
    """
    kept = best_kept(llm, "bf16", on_skip, [PREDICTOR])
    if kept is not None:
        return DemoProfile(kept.profile, kept.path, None)
    start = time.perf_counter()
    ids = llm.tokenizer.encode(calibration_text())
    windows = kv_of_texts(llm, [ids], "bf16", min(_TOKENS, llm.max_context), _TOKENS, on_read)
    with collect(llm, windows, "bf16", _TOKENS) as sample:
        calibrated = calibrate(llm, sample, PREDICTOR, on_fit)
    seconds = time.perf_counter() - start
    try:
        path = keep(calibrated)
    except InputError:  # no place for it; the demonstration needs it no longer than it runs
        path = scratch / "profile.safetensors"
        with replace_file(path) as file:
            file.write(to_bytes(calibrated))
    return DemoProfile(calibrated.profile, path, seconds)
