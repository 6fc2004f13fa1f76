"""Names of tensors in Hugging Face's files, by their canonical (GGUF) ones."""

from prolepsis.model.checkpoint_weights import LAYER, TOP


def checkpoint_name(name: str) -> str:
    """`blk.0.attn_q.weight` as `model.layers.0.self_attn.q_proj.weight`."""
    part = part_of(name)
    if not name.startswith("blk."):
        return f"{TOP[part]}.weight"
    return f"model.layers.{name.split('.')[1]}.{LAYER[part]}.weight"


def part_of(name: str) -> str:
    """`attn_q` of `blk.0.attn_q.weight`."""
    return name.split(".")[-2]
