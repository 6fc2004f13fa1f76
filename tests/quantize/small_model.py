"""A model of a few small layers with random weights, and a real tokenizer."""

from pathlib import Path

import numpy as np

from prolepsis.model.config import ModelConfig
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.gguf_writer import TensorEntry, write_gguf
from prolepsis.quantize.layer import NORMS, tensor_name

_TOKENIZER = Path(__file__).parents[1] / "data" / "gguf" / "F16.gguf"
LAYERS, HIDDEN, WIDE, HEADS, KV_HEADS = 3, 64, 96, 2, 1
_KEYS = {
    "block_count": LAYERS,
    "embedding_length": HIDDEN,
    "feed_forward_length": WIDE,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HIDDEN // HEADS,
    "attention.value_length": HIDDEN // HEADS,
    "rope.dimension_count": HIDDEN // HEADS,
}


def write_small_model(path: Path) -> Path:
    """Write it to `path`, the same each time."""
    source = GGUFFile.open(_TOKENIZER)
    metadata = {**source.encoded_metadata(), **{f"llama.{key}": value for key, value in _KEYS.items()}}
    rng = np.random.default_rng(5)
    vocabulary = ModelConfig.from_gguf(source).vocab_size
    sizes = {"token_embd.weight": (vocabulary, HIDDEN), "output.weight": (vocabulary, HIDDEN)}
    head_dim = HIDDEN // HEADS
    rows = {"attn_q": HIDDEN, "attn_k": head_dim, "attn_v": head_dim, "ffn_gate": WIDE, "ffn_up": WIDE}
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for layer in range(LAYERS):
        sizes |= {
            tensor_name(layer, part): (rows.get(part, HIDDEN), WIDE if part == "ffn_down" else HIDDEN) for part in parts
        }
    tensors = [
        TensorEntry(name, shape, "F32", [rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32)])
        for name, shape in sizes.items()
    ]
    norms = [tensor_name(layer, part) for layer in range(LAYERS) for part in NORMS]
    tensors += [
        TensorEntry(name, (HIDDEN,), "F32", [rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)])
        for name in (*norms, "output_norm.weight")
    ]
    with path.open("wb") as file:
        write_gguf(file, metadata, tensors)
    return path
