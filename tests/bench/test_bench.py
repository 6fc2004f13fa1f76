"""Measuring: each engine in a process of its own, failures told, memory that is its own."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from command import environment

from prolepsis.bench.engines import ENGINES, Setup, installed
from prolepsis.bench.measure import time_concurrent, time_single
from prolepsis.bench.worker import Job, Worker, run_apart
from prolepsis.errors import ProlepsisError

JOB = Job("prolepsis", "", threads=1, prompt=[5] * 20, new=[6, 7, 8], runs=2)


class Recorder:
    """An engine that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def prefill(self, tokens: Sequence[int]) -> None:
        self.asked.append(list(tokens))

    def decode(self, token: int) -> None:
        self.asked[-1].append(token)

    def serve(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        self.asked += [[*prompt, *[-1] * new_tokens] for prompt in prompts]


def test_every_token_is_run_once() -> None:
    engine = Recorder()
    assert min(time_single(engine, [1, 2, 3], [4, 5])) >= 0
    assert time_concurrent(engine, [[6], [7, 8]], 2) >= 0
    assert engine.asked == [[1, 2, 3, 4, 5], [6, -1, -1], [7, 8, -1, -1]]


def test_a_worker_measures_and_tells_of_every_run(tiny: Path) -> None:
    told: list[None] = []
    speed = run_apart(replace(JOB, model=str(tiny)), lambda: told.append(None))
    assert len(told) == 3  # the first run does not count
    assert (speed.prompt_tokens, speed.new_tokens, speed.threads) == (20, 3, 1)
    assert min(speed.prefill_tok_s, speed.decode_tok_s, speed.rss_mb) > 0


def test_a_worker_stays_for_all_kinds_of_work(tiny: Path) -> None:
    with Worker(Setup("prolepsis", str(tiny), 1, 64)) as worker:
        assert worker.single([5] * 20, [6, 7]).decode > 0
        assert worker.concurrent([[5] * 20, [6] * 3], 4) > 0
        assert worker.single([5] * 63, []).prefill > 0
        assert worker.peak_rss() > 5 << 20


def test_a_worker_runs_in_the_python_it_is_given(tmp_path: Path) -> None:
    """One of another environment, which has neither our package nor what it needs."""
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(f'#!/bin/sh\necho "$@" > {log}\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o700)
    with pytest.raises(ProlepsisError, match=r"failed with exit code 1:\n(.|\n)*No module named 'llama_cpp'"):
        Worker(Setup("llama.cpp", "", 1, 64), str(python)).__enter__()
    assert log.read_text().split() == ["-m", "prolepsis.bench.worker"]


def test_a_python_that_cannot_be_run(tmp_path: Path) -> None:
    with pytest.raises(ProlepsisError, match=r"cannot run .*missing: No such file"):
        Worker(Setup("llama.cpp", "", 1, 64), str(tmp_path / "missing")).__enter__()


def test_a_worker_that_fails_is_an_error_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ProlepsisError, match=r"measuring prolepsis failed with exit code 1:\n(.|\n)*no such file"):
        run_apart(replace(JOB, model=str(tmp_path / "missing.gguf")), lambda: None)


def test_a_worker_that_fails_at_its_work(tiny: Path) -> None:
    with (
        Worker(Setup("prolepsis", str(tiny), 1, 64)) as worker,
        pytest.raises(ProlepsisError, match=r"measuring prolepsis failed with exit code 1:\n(.|\n)*context"),
    ):
        worker.concurrent([[5] * 20, [6] * 64], 4)


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
    assert set(installed()) <= {name for name, entry in ENGINES.items() if entry.reads_gguf}
