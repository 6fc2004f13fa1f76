"""Servers that speak OpenAI's API, each a process of its own on a free port of the loopback, for `serve.py`."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from serving_load import Client

PATIENCE_S = 600  # for a server to load its model, and to compile it
_CONTEXT = 4096
_LAST_WORDS = 2000  # characters of what a server that failed wrote


class Recipe(NamedTuple):
    """How to start a server; its port is appended to `command`."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    model: str
    """What it calls the model."""
    extra: dict[str, Any]
    """Fields of every body, so that the output does not end early."""
    ready: str = "/health"
    """What answers 200 once it can work."""


def ours(model: str, threads: int, *options: str, name: str = "prolepsis") -> Recipe:
    """This one, with some more of its options."""
    command = (sys.executable, "-m", "prolepsis", "serve", model, "--threads", str(threads), *options, "--port")
    return Recipe(name, command, {}, "", {"ignore_eos": True})


def llama_cpp(python: str, model: str, threads: int, eos_ids: Sequence[int]) -> Recipe:
    """The server of llama-cpp-python: one request at a time, the others queue."""
    flags = {
        "n_threads": str(threads),
        "n_threads_batch": str(threads),
        "n_ctx": str(_CONTEXT),
        "n_gpu_layers": "0",
        "interrupt_requests": "false",  # else a new request breaks off the one that runs
    }
    command = (python, "-m", "llama_cpp.server", "--model", model, *_flags(flags), "--port")
    # It has no ignore_eos.
    extra = {"logit_bias": {str(token): -100 for token in eos_ids}, "logit_bias_type": "input_ids"}
    return Recipe("llama.cpp", command, {}, model, extra, ready="/v1/models")


def vllm(python: str, directory: str, threads: int) -> Recipe:
    """vLLM's own server, on weights as bfloat16."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }
    flags = ("--max-model-len", str(_CONTEXT), "--served-model-name", "model", "--port")
    command = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", directory, "--host", "127.0.0.1", *flags)
    return Recipe("vllm", command, environment, "model", {"ignore_eos": True})


def _flags(values: Mapping[str, str]) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", value)]


@contextmanager
def running(recipe: Recipe) -> Iterator[Client]:
    """The server while it runs, ready, and one who asks it. Raises RuntimeError with its last words where it fails."""
    port = _free_port()
    with tempfile.TemporaryFile("w+") as log:
        foreign = recipe.command[0] != sys.executable
        environment = {k: v for k, v in os.environ.items() if not (foreign and k == "PYTHONPATH")}
        process = subprocess.Popen(
            [*recipe.command, str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment, **recipe.environment},
            start_new_session=True,  # some have processes of their own, which are to end with them
        )
        try:
            _wait(process, port, recipe, log)
            yield Client(port, recipe.model or _model_at(port), recipe.extra)
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _wait(process: "subprocess.Popen[bytes]", port: int, recipe: Recipe, log: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{recipe.ready}", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    log.seek(0)
    raise RuntimeError(f"{recipe.name} does not answer; its last words: {log.read()[-_LAST_WORDS:]}")


def _model_at(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
        return str(json.load(answer)["data"][0]["id"])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask it to end, and after a while, or when told to hurry, end it with all that it has started."""
    try:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def safetensors_of(model: str, directory: Path) -> None:
    """Write the weights of a GGUF file as bfloat16, and its tokenizer, as vLLM reads them."""
    from reference import load_reference
    from transformers import AutoTokenizer

    load_reference(Path(model)).bfloat16().save_pretrained(directory)
    AutoTokenizer.from_pretrained(Path(model).parent, gguf_file=Path(model).name).save_pretrained(directory)
