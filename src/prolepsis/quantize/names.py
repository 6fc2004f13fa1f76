"""Names of tensors in Hugging Face's files, by their canonical (GGUF) ones; and the order of rows under RoPE."""

import numpy as np
from numpy.typing import NDArray

from prolepsis.model.config import ModelConfig

_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_REST = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def checkpoint_name(name: str) -> str:
    """`blk.0.attn_q.weight` as `model.layers.0.self_attn.q_proj.weight`."""
    if name in _REST:
        return _REST[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_PARTS[part]}.weight"


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
