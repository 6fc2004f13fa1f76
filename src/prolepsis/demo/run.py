"""What `prolepsis demo` does, step by step, without a word of output."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prolepsis.coding import peers
from prolepsis.demo.calibrated import PREDICTOR, DemoProfile, profile_for
from prolepsis.demo.restore import CONTINUATION, continue_greedily
from prolepsis.engine.completion import Delta
from prolepsis.engine.conversation import Conversation
from prolepsis.engine.llm import LLM
from prolepsis.engine.runner import Progress
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.session import SaveReport, save_session
from prolepsis.errors import InputError, ProlepsisError
from prolepsis.kv.stored import values_of

QUESTION = "Name three ways to make the cache smaller."
_ANSWER = SamplingParams(temperature=0.0, max_tokens=96)


@dataclass(frozen=True)
class CodedSession:
    """What one predictor makes of the session. Times in seconds, sizes in bytes, `ratio` raw over coded.

    save_s: reading the KV out of the cache, coding it and writing the synced file; the second of two saves, as the
    first may still have to load compiled code. restore_s: reading the file, decoding, checking and writing the KV into
    the cache of the new process, again the second time. calibration_s: to make its profile; None where there was one
    before, or none is needed.
    """

    predictor: str
    coded_bytes: int
    ratio: float
    bit_identical: bool
    same_continuation: bool
    save_s: float
    restore_s: float
    calibration_s: float | None


@dataclass(frozen=True)
class DemoResult:
    """The figures of a run. prefill_s: computing the same KV again from the tokens."""

    model: str
    tokens: int
    raw_bytes: int
    sessions: list[CodedSession]
    others: dict[str, float]
    """Ratio of other lossless coders on the same raw bytes."""
    prefill_s: float
    answer: str


class Listener(NamedTuple):
    """Who is told: how far calibrating and reading the document are, the answer as it comes, and what is done next."""

    on_read: Progress
    on_fit: Progress
    on_prefill: Progress
    on_text: Callable[[str], None]
    on_step: Callable[[str], None]


class _Saved(NamedTuple):
    path: Path
    predictor: str
    seconds: float
    profile: DemoProfile | None


def document() -> str:
    """The text the demonstration asks about."""
    return files("prolepsis").joinpath("data/kv-cache-guide.md").read_text(encoding="utf-8")


def run(llm: LLM, threads: int | None, listener: Listener) -> DemoResult:
    """Ask, save, restore in a new process, compare: with `static`, and with the predictor of `calibrated`.

    threads: for the new process; None leaves it the choice. Raises InputError if the document does not fit the model's
    context, ProlepsisError if the new process fails.
    """
    conversation = Conversation(llm)
    answering = conversation.ask(f"{document()}\n\n{QUESTION}", _ANSWER, listener.on_prefill)
    with tempfile.TemporaryDirectory(prefix="prolepsis-demo-") as directory:
        scratch = Path(directory)
        profile = _profile(llm, scratch, listener)  # before the cache fills: it need not have room for both
        answer = _listen(answering, listener)
        sequence = conversation.sequence
        llm.runner.prefill(sequence)
        tokens = list(sequence.tokens)
        raw = values_of(llm.kv_cache.read(sequence.table, 0, len(tokens)))
        np.save(scratch / "original.npy", raw)
        listener.on_step("saving the session")
        saves = [_save(conversation, scratch, each) for each in ([None] if profile is None else [None, profile])]
        listener.on_step("continuing it")
        continuation = continue_greedily(llm, sequence, CONTINUATION)
        sequence.release()  # the cache need not have room for two
        listener.on_step("computing it again, for comparison")
        prefill_s = _time_prefill(llm, tokens)
        listener.on_step("restoring it in a new process")
        sessions = [_session(llm, threads, saved, raw.nbytes, continuation) for saved in saves]
    listener.on_step("measuring other coders")
    others = peers.ratios(raw.tobytes())
    return DemoResult(llm.name, len(tokens), raw.nbytes, sessions, others, prefill_s, answer)


def _profile(llm: LLM, scratch: Path, listener: Listener) -> DemoProfile | None:
    """None, and a word about it, where the predictor cannot take this model."""
    listener.on_step(f"finding a profile of {PREDICTOR} for this model, or calibrating one, once")
    try:
        return profile_for(llm, scratch, listener.on_read, listener.on_fit, listener.on_step)
    except InputError as error:
        listener.on_step(f"{PREDICTOR} is left out: {error}")
        return None


def _listen(answering: Iterable[Delta], listener: Listener) -> str:
    answer = ""
    for delta in answering:
        answer += delta.text
        listener.on_text(delta.text)
    listener.on_text("\n")
    return answer


def _save(conversation: Conversation, scratch: Path, profile: DemoProfile | None) -> _Saved:
    path = scratch / f"{'static' if profile is None else PREDICTOR}.pkv"

    def save() -> SaveReport:
        coded_with = None if profile is None else profile.profile
        return save_session(path, conversation.llm, conversation.sequence, conversation.messages, profile=coded_with)

    save()  # once more below: the first compiles
    path.unlink()  # or there would be nothing to add to it
    start = time.perf_counter()
    predictor = save().predictor
    return _Saved(path, predictor, time.perf_counter() - start, profile)


def _session(llm: LLM, threads: int | None, saved: _Saved, raw_bytes: int, continuation: list[int]) -> CodedSession:
    restored = _restore_apart(llm, threads, saved)
    coded_bytes = saved.path.stat().st_size
    return CodedSession(
        predictor=saved.predictor,
        coded_bytes=coded_bytes,
        ratio=raw_bytes / coded_bytes,
        bit_identical=restored["bit_identical"],
        same_continuation=restored["continuation"] == continuation,
        save_s=saved.seconds,
        restore_s=restored["restore_s"],
        calibration_s=None if saved.profile is None else saved.profile.seconds,
    )


def _time_prefill(llm: LLM, tokens: list[int]) -> float:
    again = llm.runner.new_sequence(tokens)
    try:
        start = time.perf_counter()
        llm.runner.prefill(again)
        return time.perf_counter() - start
    finally:
        again.release()


def _restore_apart(llm: LLM, threads: int | None, saved: _Saved) -> dict[str, Any]:
    original, profile = saved.path.with_name("original.npy"), "-" if saved.profile is None else str(saved.profile.path)
    command = [sys.executable, "-m", "prolepsis.demo.restore"]
    command += [str(llm.path), str(saved.path), str(original), profile]
    command += [] if threads is None else [str(threads)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        raise ProlepsisError(f"restoring in a new process failed:\n{outcome.stderr[-2000:]}")
    return dict(json.loads(outcome.stdout))
