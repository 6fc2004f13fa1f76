"""What a model's KV is and belongs to, as session files and profiles tell it."""

from prolepsis.coding.cache_dtypes import DType, Geometry
from prolepsis.engine.llm import LLM


def identity(llm: LLM) -> dict[str, str]:
    """The model, part by part."""
    return {"architecture": llm.config.architecture, "file": llm.fingerprint, "name": llm.config.name}


def geometry(llm: LLM, dtype: DType) -> Geometry:
    """Shape and dtype of one token's KV in a cache of `dtype`."""
    config = llm.config
    return Geometry(dtype, config.num_layers, config.num_kv_heads, config.head_dim)
