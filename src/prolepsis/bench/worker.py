"""An engine in a process of its own, so that memory is its own, no thread pools meet, and its Python may be another.

python -m prolepsis.bench.worker: a setup as one JSON line on standard input, then one line for each piece of work; each
is answered by one line on standard output. The process ends with its input.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import prolepsis
from prolepsis.bench.engines import ENGINES, Setup, create
from prolepsis.bench.measure import Answer, Seconds, peak_rss, time_answer, time_concurrent, time_single
from prolepsis.errors import ProlepsisError

_LAST_WORDS = 2000  # characters of what a failed engine wrote


class Worker:
    """An engine that is up, and idle until it is given work. It ends with the `with` block.

    Where it fails, whatever is called next raises ProlepsisError with its last words.
    """

    def __init__(self, setup: Setup, python: str = sys.executable) -> None:
        """python: an interpreter that has the engine in its environment; nothing of ours need be installed there."""
        self.setup = setup
        self._python = python

    def __enter__(self) -> "Worker":
        with ExitStack() as stack:
            self._trouble = stack.enter_context(tempfile.TemporaryFile("w+"))
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="prolepsis-worker-"))
            self._process = self._start(place)
            stack.push(self._end)
            self.version: str | None = self._ask(asdict(self.setup))
            """The engine's own."""
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, at)

    def _start(self, place: str) -> "subprocess.Popen[str]":
        environment = dict(os.environ)
        if self._python != sys.executable:
            # A directory that holds our package, and nothing of what happens to be installed beside it.
            os.symlink(Path(prolepsis.__file__).parent, Path(place) / "prolepsis")
            environment["PYTHONPATH"] = place
        try:
            return subprocess.Popen(
                [self._python, "-m", "prolepsis.bench.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._trouble,
                text=True,
                env=environment,
            )
        except OSError as error:
            raise ProlepsisError(
                f"measuring {self.setup.engine}: cannot run {self._python}: {error.strerror}"
            ) from error

    def _end(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            self._process.kill()
        try:
            self._process.communicate()
        except BrokenPipeError:
            self._process.wait()  # it is dead, and what was still to be written to it does not matter

    def single(self, prompt: Sequence[int], new: Sequence[int]) -> Seconds:
        """One prompt, and then `new` token by token."""
        return Seconds(*self._ask({"prompt": list(prompt), "new": list(new)}))

    def concurrent(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """Seconds until all prompts, which arrive at once, are continued by `new_tokens` each."""
        seconds: float = self._ask({"prompts": [list(prompt) for prompt in prompts], "new_tokens": new_tokens})
        return seconds

    def answer(self, prompt: Sequence[int], new_tokens: int) -> Answer:
        """The greedy continuation of a prompt."""
        return Answer(*self._ask({"prompt": list(prompt), "new_tokens": new_tokens}))

    def peak_rss(self) -> int:
        """Peak resident memory of the engine's process so far, in bytes."""
        size: int = self._ask({})
        return size

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return json.loads(answer)
        code = self._process.wait()
        self._trouble.seek(0)
        words = self._trouble.read()[-_LAST_WORDS:]
        raise ProlepsisError(f"measuring {self.setup.engine} failed with exit code {code}:\n{words}")


@dataclass(frozen=True)
class Speed:
    """Medians over several runs of one prompt and its continuation."""

    prefill_tok_s: float
    decode_tok_s: float
    threads: int
    prompt_tokens: int
    new_tokens: int
    rss_mb: float
    """Peak resident memory of the whole process, in units of 10^6 bytes."""


@dataclass(frozen=True)
class Job:
    """One prompt and its continuation, `runs` times after one that does not count."""

    engine: str
    model: str
    threads: int
    prompt: list[int]
    new: list[int]
    runs: int


def run_apart(job: Job, on_run: Callable[[], None]) -> Speed:
    """Measure in a new process; `on_run` is called after each run. Raises ProlepsisError if it fails."""
    seconds = []
    tokens = len(job.prompt) + len(job.new) + 1
    with Worker(Setup(job.engine, job.model, job.threads, tokens)) as worker:
        for _ in range(job.runs + 1):
            seconds.append(worker.single(job.prompt, job.new))
            on_run()
        rss = worker.peak_rss()
    return Speed(
        prefill_tok_s=round(len(job.prompt) / median(each.prefill for each in seconds[1:]), 1),
        decode_tok_s=round(len(job.new) / median(each.decode for each in seconds[1:]), 1),
        threads=job.threads,
        prompt_tokens=len(job.prompt),
        new_tokens=len(job.new),
        rss_mb=round(rss / 1e6, 1),
    )


def _main() -> None:
    # Engines may print what they like: only our lines go to the real standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    questions = map(json.loads, sys.stdin)
    setup = Setup(**next(questions))
    engine = create(setup)
    version = getattr(sys.modules[ENGINES[setup.engine].module], "__version__", None)
    print(json.dumps(version), file=answers, flush=True)
    for asked in questions:
        if "prompts" in asked:
            answer: Any = time_concurrent(engine, **asked)
        elif "new_tokens" in asked:
            answer = time_answer(engine, **asked)
        else:
            answer = time_single(engine, **asked) if asked else peak_rss()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _main()
