"""Prolepsis: an LLM inference engine that predicts its own future, tokens and KV cache.

from prolepsis import LLM, SamplingParams
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prolepsis.engine.async_engine import AsyncEngine as AsyncEngine
    from prolepsis.engine.beam_search import BeamParams as BeamParams
    from prolepsis.engine.llm import LLM as LLM
    from prolepsis.engine.sampling_params import SamplingParams as SamplingParams

_EXPORTS = {
    "AsyncEngine": "prolepsis.engine.async_engine",
    "BeamParams": "prolepsis.engine.beam_search",
    "LLM": "prolepsis.engine.llm",
    "SamplingParams": "prolepsis.engine.sampling_params",
}

__all__ = ["LLM", "AsyncEngine", "BeamParams", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Load the engine when it is first asked for: importing the package alone costs nothing."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'prolepsis' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
