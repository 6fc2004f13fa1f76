"""The engines that can be measured: ours, and each peer that is installed."""

import importlib.util
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

from prolepsis.bench.measure import Engine


@dataclass(frozen=True)
class Setup:
    """An engine to be started."""

    engine: str
    model: str
    threads: int
    context: int
    """Tokens of the longest sequence."""


class _Entry(NamedTuple):
    module: str
    """What must be installed."""
    adapter: str
    """Imported only in the process that runs the engine."""
    reads_gguf: bool = True


ENGINES = {
    "prolepsis": _Entry("prolepsis", "prolepsis.bench.engine_prolepsis:Prolepsis"),
    "prolepsis-fast": _Entry("prolepsis", "prolepsis.bench.engine_prolepsis:Fast"),
    "llama.cpp": _Entry("llama_cpp", "prolepsis.bench.engine_llama_cpp:LlamaCpp"),
    "openvino": _Entry("openvino_genai", "prolepsis.bench.engine_openvino:OpenVINO"),
    "vllm": _Entry("vllm", "prolepsis.bench.engine_vllm:VLLM", reads_gguf=False),
}
OURS = {"high": "prolepsis", "fast": "prolepsis-fast"}
"""The names of this engine, by precision."""


def create(setup: Setup) -> Engine:
    """Start an engine in this process."""
    module, _, name = ENGINES[setup.engine].adapter.partition(":")
    engine: Engine = getattr(import_module(module), name)(setup)
    return engine


def installed() -> list[str]:
    """Names of the engines in this environment that read a GGUF file, ours first."""
    return [
        name
        for name, entry in ENGINES.items()
        if entry.reads_gguf and importlib.util.find_spec(entry.module) is not None
    ]
