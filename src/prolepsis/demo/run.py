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

import numpy as np

from prolepsis.coding import peers
from prolepsis.demo.restore import CONTINUATION, continue_greedily
from prolepsis.engine.conversation import Conversation
from prolepsis.engine.llm import LLM
from prolepsis.engine.runner import Progress
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.session import load_session, save_session
from prolepsis.errors import ProlepsisError

QUESTION = "Name three ways to make the cache smaller."
_ANSWER = SamplingParams(temperature=0.0, max_tokens=96)


@dataclass(frozen=True)
class DemoResult:
    """The figures of a run. Times in seconds, sizes in bytes, `ratio` raw over coded."""

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
    on_prefill: Progress,
    on_text: Callable[[str], None],
    on_step: Callable[[str], None],
) -> DemoResult:
    """Ask, save, restore in a new process, compare. `on_text` gets the answer as it comes, `on_step` what is done."""
    conversation = Conversation(llm)
    answer = ""
    for delta in conversation.ask(f"{document()}\n\n{QUESTION}", _ANSWER, on_prefill):
        answer += delta.text
        on_text(delta.text)
    on_text("\n")
    sequence = conversation.sequence
    llm.runner.prefill(sequence)
    raw = llm.kv_cache.read(sequence.table, 0, sequence.num_cached)
    with tempfile.TemporaryDirectory(prefix="prolepsis-demo-") as directory:
        path, original = Path(directory, "session.pkv"), Path(directory, "original.npy")
        on_step("saving the session")
        save_session(path, llm, sequence, conversation.messages)  # once more below: the first compiles
        start = time.perf_counter()
        save_session(path, llm, sequence, conversation.messages)
        save_s = time.perf_counter() - start
        np.save(original, raw)
        on_step("computing it again, for comparison")
        prefill_s = _time_prefill(llm, sequence.tokens)
        on_step("restoring it in a new process")
        restored = _restore_apart(llm, path, original)
        coded_bytes = path.stat().st_size
    on_step("measuring other coders")
    others = peers.ratios(memoryview(raw).cast("B"))
    return DemoResult(
        model=llm.name,
        tokens=sequence.num_cached,
        predictor=restored["predictor"],
        raw_bytes=raw.nbytes,
        coded_bytes=coded_bytes,
        ratio=raw.nbytes / coded_bytes,
        others=others,
        bit_identical=restored["bit_identical"],
        same_continuation=restored["continuation"] == continue_greedily(llm, sequence, CONTINUATION),
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


def _restore_apart(llm: LLM, session: Path, original: Path) -> dict:
    command = [sys.executable, "-m", "prolepsis.demo.restore", str(llm.path), str(session), str(original)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        raise ProlepsisError(f"restoring in a new process failed:\n{outcome.stderr[-2000:]}")
    return json.loads(outcome.stdout)
