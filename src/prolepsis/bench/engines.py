"""The engines that can be measured: ours, and each peer that is installed."""

import importlib.util
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple


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
    drafts: bool = False
    """Whether it is an engine that is there without, with drafts looked up in the text so far."""


ENGINES = {
    "prolepsis": _Entry("prolepsis", "prolepsis.bench.engine_prolepsis:Prolepsis"),
    "prolepsis-fast": _Entry("prolepsis", "prolepsis.bench.engine_prolepsis:Fast"),
    "prolepsis-ngram": _Entry("prolepsis", "prolepsis.bench.engine_prolepsis:Ngram", drafts=True),
    "prolepsis-fast-ngram": _Entry("prolepsis", "prolepsis.bench.engine_prolepsis:FastNgram", drafts=True),
    "llama.cpp": _Entry("llama_cpp", "prolepsis.bench.engine_llama_cpp:LlamaCpp"),
    "llama.cpp-lookup-2": _Entry("llama_cpp", "prolepsis.bench.engine_llama_lookup:Lookup2", drafts=True),
    "llama.cpp-lookup-10": _Entry("llama_cpp", "prolepsis.bench.engine_llama_lookup:Lookup10", drafts=True),
    "openvino": _Entry("openvino_genai", "prolepsis.bench.engine_openvino:OpenVINO"),
    "vllm": _Entry("vllm", "prolepsis.bench.engine_vllm:VLLM", reads_gguf=False),
}
OURS = {"high": "prolepsis", "fast": "prolepsis-fast"}
"""The names of this engine, by precision."""


def create(setup: Setup) -> Any:
    """Start an engine in this process: a `measure.Engine`, a `measure.Answering` or both."""
    module, _, name = ENGINES[setup.engine].adapter.partition(":")
    return getattr(import_module(module), name)(setup)


def installed(drafts: bool = False) -> list[str]:
    """Names of the engines in this environment that read a GGUF file, ours first; `drafts` adds those that draft."""
    return [
        name
        for name, entry in ENGINES.items()
        if entry.reads_gguf and (drafts or not entry.drafts) and importlib.util.find_spec(entry.module) is not None
    ]
