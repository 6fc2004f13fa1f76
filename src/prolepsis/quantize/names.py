"""Names of tensors in Hugging Face's files, by their canonical (GGUF) ones; and the order of rows under RoPE."""

import numpy as np
from numpy.typing import NDArray

from prolepsis.model.checkpoint_weights import LAYER, TOP
from prolepsis.model.config import ModelConfig


def checkpoint_name(name: str) -> str:
    """`blk.0.attn_q.weight` as `model.layers.0.self_attn.q_proj.weight`."""
    part = part_of(name)
    if not name.startswith("blk."):
        return f"{TOP[part]}.weight"
    return f"model.layers.{name.split('.')[1]}.{LAYER[part]}.weight"


def part_of(name: str) -> str:
    """`attn_q` of `blk.0.attn_q.weight`."""
    return name.split(".")[-2]


def rows_for(name: str, config: ModelConfig, style: str) -> NDArray[np.intp] | None:
    """Which row of a matrix of `config` each row is where RoPE turns pairs in `style`; None: they stay as they are."""
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(part_of(name))
    if heads is None or style == config.rope.style:
        return None
    within = np.arange(config.head_dim)
    turned = within[: config.rope.dim]
    pairs = turned.reshape(-1, 2).T if style == "half" else turned.reshape(2, -1).T
    within[: config.rope.dim] = pairs.reshape(-1).copy()
    return (np.arange(heads)[:, None] * config.head_dim + within).reshape(-1)
