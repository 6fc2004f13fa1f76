"""What `prolepsis demo` does, step by step, without a word of output."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from prolepsis.coding import peers
from prolepsis.demo.restore import CONTINUATION, continue_greedily
from prolepsis.engine.conversation import Conversation
from prolepsis.engine.llm import LLM
from prolepsis.engine.runner import Progress
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.session import save_session
from prolepsis.errors import ProlepsisError

QUESTION = "Name three ways to make the cache smaller."
_ANSWER = SamplingParams(temperature=0.0, max_tokens=96)


@dataclass(frozen=True)
class DemoResult:
    """The figures of a run. Times in seconds, sizes in bytes, `ratio` raw over coded.

    save_s: reading the KV out of the cache, coding it and writing the synced file; the second of two saves, as the
    first may still have to load compiled code. restore_s: reading the file, decoding, checking and writing the KV into
    the cache of the new process, again the second time. prefill_s: computing the same KV again from the tokens.
    """

    model: str
    tokens: int
    predictor: str
    raw_bytes: int
    coded_bytes: int
    ratio: float
    others: dict[str, float]
    """Ratio of other lossless coders on the same raw bytes."""
    bit_identical: bool
    same_continuation: bool
    save_s: float
    restore_s: float
    prefill_s: float
    answer: str


def document() -> str:
    """The text the demonstration asks about."""
    return files("prolepsis").joinpath("data/kv-cache-guide.md").read_text(encoding="utf-8")


def run(
    llm: LLM,
    threads: int | None,
    on_prefill: Progress,
    on_text: Callable[[str], None],
    on_step: Callable[[str], None],
) -> DemoResult:
    """Ask, save, restore in a new process, compare. `on_text` gets the answer as it comes, `on_step` what is done.

    threads: for the new process; None leaves it the choice. Raises InputError if the document does not fit the model's
    context, ProlepsisError if the new process fails.
    """
    conversation = Conversation(llm)
    answer = ""
    for delta in conversation.ask(f"{document()}\n\n{QUESTION}", _ANSWER, on_prefill):
        answer += delta.text
        on_text(delta.text)
    on_text("\n")
    sequence = conversation.sequence
    llm.runner.prefill(sequence)
    tokens = list(sequence.tokens)
    raw = llm.kv_cache.read(sequence.table, 0, len(tokens))
    with tempfile.TemporaryDirectory(prefix="prolepsis-demo-") as directory:
        path, original = Path(directory, "session.pkv"), Path(directory, "original.npy")
        on_step("saving the session")
        save_session(path, llm, sequence, conversation.messages)  # once more below: the first compiles
        path.unlink()  # or there would be nothing to add to it
        start = time.perf_counter()
        save_session(path, llm, sequence, conversation.messages)
        save_s = time.perf_counter() - start
        np.save(original, raw)
        on_step("continuing it")
        continuation = continue_greedily(llm, sequence, CONTINUATION)
        sequence.release()  # the cache need not have room for two
        on_step("computing it again, for comparison")
        prefill_s = _time_prefill(llm, tokens)
        on_step("restoring it in a new process")
        restored = _restore_apart(llm, threads, path, original)
        coded_bytes = path.stat().st_size
    on_step("measuring other coders")
    others = peers.ratios(raw.tobytes())
    return DemoResult(
        model=llm.name,
        tokens=len(tokens),
        predictor=restored["predictor"],
        raw_bytes=raw.nbytes,
        coded_bytes=coded_bytes,
        ratio=raw.nbytes / coded_bytes,
        others=others,
        bit_identical=restored["bit_identical"],
        same_continuation=restored["continuation"] == continuation,
        save_s=save_s,
        restore_s=restored["restore_s"],
        prefill_s=prefill_s,
        answer=answer,
    )


def _time_prefill(llm: LLM, tokens: list[int]) -> float:
    again = llm.runner.new_sequence(tokens)
    try:
        start = time.perf_counter()
        llm.runner.prefill(again)
        return time.perf_counter() - start
    finally:
        again.release()


def _restore_apart(llm: LLM, threads: int | None, session: Path, original: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "prolepsis.demo.restore", str(llm.path), str(session), str(original)]
    command += [] if threads is None else [str(threads)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        raise ProlepsisError(f"restoring in a new process failed:\n{outcome.stderr[-2000:]}")
    return dict(json.loads(outcome.stdout))
