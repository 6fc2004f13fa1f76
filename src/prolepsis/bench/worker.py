"""Measures one engine in a process of its own, so that memory is its own and no thread pools meet.

python -m prolepsis.bench.worker: a job as one JSON line on standard input, the result as one on standard output.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass

from prolepsis.bench.engines import ENGINES
from prolepsis.bench.measure import Speed, measure
from prolepsis.errors import ProlepsisError


@dataclass(frozen=True)
class Job:
    """What one engine is to run."""

    engine: str
    model: str
    threads: int
    prompt: list[int]
    new: list[int]
    runs: int


def run_in_process(job: Job, on_run: Callable[[], None]) -> Speed:
    """Measure in this process."""
    engine = ENGINES[job.engine](job.model, job.threads, len(job.prompt) + len(job.new) + 1)
    return measure(engine, job.prompt, job.new, job.runs, on_run)


def run_apart(job: Job, on_run: Callable[[], None]) -> Speed:
    """Measure in a new process; `on_run` is called after each run. Raises ProlepsisError if it fails."""
    command = [sys.executable, "-m", "prolepsis.bench.worker"]
    last = ""
    with tempfile.TemporaryFile("w+") as task, tempfile.TemporaryFile("w+") as trouble:
        task.write(json.dumps(asdict(job)))
        task.seek(0)
        with subprocess.Popen(command, stdin=task, stdout=subprocess.PIPE, stderr=trouble, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line == "run\n":
                        on_run()
                    else:
                        last = line
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            trouble.seek(0)
            raise ProlepsisError(
                f"measuring {job.engine} failed with exit code {process.returncode}:\n{trouble.read()[-2000:]}"
            )
    return Speed(**json.loads(last))


def _main() -> None:
    job = Job(**json.load(sys.stdin))
    # Engines may print what they like: only our lines go to the real standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def on_run() -> None:
        print("run", file=answers, flush=True)

    print(json.dumps(asdict(run_in_process(job, on_run))), file=answers, flush=True)


if __name__ == "__main__":
    _main()
