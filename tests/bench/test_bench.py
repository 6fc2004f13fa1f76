"""Measuring: each engine in a process of its own, failures told, memory that is its own."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command import environment

from prolepsis.bench.engines import ENGINES, installed
from prolepsis.bench.measure import measure
from prolepsis.bench.worker import Job, run_apart
from prolepsis.errors import ProlepsisError

JOB = Job("prolepsis", "", threads=1, prompt=[5] * 20, new=[6, 7, 8], runs=2)


class Recorder:
    """An engine that notes what it is asked."""

    threads = 1

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def prefill(self, tokens: list[int]) -> None:
        self.asked.append(list(tokens))

    def decode(self, token: int) -> None:
        self.asked[-1].append(token)


def test_every_run_is_the_same_work_and_the_first_does_not_count() -> None:
    engine, told = Recorder(), []
    speed = measure(engine, [1, 2, 3], [4, 5], runs=2, on_run=lambda: told.append(None))
    assert engine.asked == [[1, 2, 3, 4, 5]] * 3
    assert len(told) == 3
    assert (speed.prompt_tokens, speed.new_tokens, speed.threads) == (3, 2, 1)


def test_a_worker_measures_and_tells_of_every_run(tiny: Path) -> None:
    told: list[None] = []
    speed = run_apart(replace(JOB, model=str(tiny)), lambda: told.append(None))
    assert len(told) == 3
    assert min(speed.prefill_tok_s, speed.decode_tok_s, speed.rss_mb) > 0


def test_a_worker_that_fails_is_an_error_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ProlepsisError, match=r"measuring prolepsis failed with exit code 1:\n(.|\n)*no such file"):
        run_apart(replace(JOB, model=str(tmp_path / "missing.gguf")), lambda: None)


def test_a_worker_ends_with_who_asked_for_it(tiny: Path) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_apart(replace(JOB, model=str(tiny), runs=100_000), interrupted)


def test_peak_memory_is_not_the_parents() -> None:
    code = "from prolepsis.bench.measure import peak_rss\nprint(peak_rss())"
    fat = bytearray(b"x" * (400 << 20))
    outcome = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert 5 << 20 < int(outcome.stdout) < len(fat)


def test_this_engine_is_always_there() -> None:
    assert installed()[0] == "prolepsis"
    assert set(installed()) <= set(ENGINES)
