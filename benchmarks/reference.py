"""How close the engine's arithmetic is to plain float32: the same weights in `transformers`, on five languages.

The reference is LlamaForCausalLM in float32, with the matrices as the gguf package dequantises them. Needs the extra
`test` (torch, transformers).

    python benchmarks/reference.py [MODEL] [--json]
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from reference_texts import TEXTS
from rich import box
from rich.console import Console
from rich.table import Table

from prolepsis import LLM
from prolepsis.engine.perplexity import measure_perplexity
from prolepsis.model.config import ModelConfig
from prolepsis.model.gguf_file import GGUFFile

PERPLEXITY_TOKENS = 2_000
ROOT = Path(__file__).parents[1]


class Agreement(NamedTuple):
    """Of the engine's next-token distributions with the reference's, over the tokens of a text; KL in nats."""

    tokens: int
    mean_kl: float
    max_kl: float
    top1: float


class Perplexities(NamedTuple):
    """Of one text, by the engine and by the reference."""

    tokens: int
    engine: float
    reference: float


def load_reference(path: Path) -> Any:
    """LlamaForCausalLM in float32 with the weights of a GGUF file of architecture "llama"."""
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    file = GGUFFile.open(path)
    config = ModelConfig.from_gguf(file)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def matrix(name: str) -> np.ndarray:
        tensor = reader[name + ".weight"]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)

    def unpermuted(name: str, heads: int) -> np.ndarray:
        """Rows in the order of transformers: llama.cpp's converter interleaved the two halves of each head."""
        permuted = matrix(name)
        rows, columns = permuted.shape
        return permuted.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)

    state = {
        "model.embed_tokens": matrix("token_embd"),
        "model.norm": matrix("output_norm"),
        "lm_head": matrix("token_embd" if config.tied_embeddings else "output"),
    }
    for layer in range(config.num_layers):
        ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        state[theirs + "input_layernorm"] = matrix(ours + "attn_norm")
        state[theirs + "post_attention_layernorm"] = matrix(ours + "ffn_norm")
        state[theirs + "self_attn.q_proj"] = unpermuted(ours + "attn_q", config.num_heads)
        state[theirs + "self_attn.k_proj"] = unpermuted(ours + "attn_k", config.num_kv_heads)
        state[theirs + "self_attn.v_proj"] = matrix(ours + "attn_v")
        state[theirs + "self_attn.o_proj"] = matrix(ours + "attn_output")
        for name in ("gate", "up", "down"):
            state[theirs + f"mlp.{name}_proj"] = matrix(ours + f"ffn_{name}")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            max_position_embeddings=config.max_context,
            tie_word_embeddings=config.tied_embeddings,
        )
    )
    model.load_state_dict({name + ".weight": torch.from_numpy(np.array(value)) for name, value in state.items()})
    return model.to(torch.float32).eval()


def reference_logits(reference: Any, tokens: list[int]) -> np.ndarray:
    """Logits after each token, float32 [n, vocab]."""
    import torch

    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0].float().numpy()


def engine_logits(llm: LLM, tokens: list[int]) -> np.ndarray:
    """As `reference_logits`, by the engine."""
    sequence = llm.runner.new_sequence(tokens)
    parts = []
    while sequence.num_cached < len(tokens):
        parts.append(llm.runner.all_logits(sequence))
    sequence.release()
    return np.concatenate(parts)


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def agreement(llm: LLM, reference: Any, text: str) -> Agreement:
    """Compare the distributions after every token of `text`."""
    tokens = llm.encode(text)
    ours, theirs = engine_logits(llm, tokens), reference_logits(reference, tokens)
    p, q = _log_probabilities(theirs), _log_probabilities(ours)
    divergence = (np.exp(p) * (p - q)).sum(axis=1)
    same = ours.argmax(axis=1) == theirs.argmax(axis=1)
    return Agreement(len(tokens), float(divergence.mean()), float(divergence.max()), float(same.mean()))


def english_text() -> str:
    """The guide that ships with the package, then the licence."""
    return (ROOT / "src/prolepsis/data/kv-cache-guide.md").read_text() + (ROOT / "LICENSE").read_text()


def perplexities(llm: LLM, reference: Any) -> Perplexities:
    """Perplexity of the first 2,000 tokens of `english_text` as one context."""
    tokens = llm.tokenizer.encode(english_text())[:PERPLEXITY_TOKENS]
    ours = measure_perplexity(llm.runner, tokens, PERPLEXITY_TOKENS)
    scores = _log_probabilities(reference_logits(reference, tokens)[:-1])
    theirs = float(np.exp(-scores[np.arange(len(tokens) - 1), tokens[1:]].mean()))
    return Perplexities(len(tokens), ours.perplexity, theirs)


def compare(model: str) -> dict[str, Any]:
    """All figures: {"model", "texts": {language: Agreement}, "perplexity": Perplexities}, as plain dictionaries."""
    llm = LLM(model, max_context=2 * PERPLEXITY_TOKENS)
    reference = load_reference(llm.path)
    texts = {language: agreement(llm, reference, text)._asdict() for language, text in TEXTS.items()}
    return {"model": model, "texts": texts, "perplexity": perplexities(llm, reference)._asdict()}


def show(result: dict[str, Any]) -> None:
    """Print the figures as a table."""
    table = Table("text", "tokens", "mean KL", "max KL", "same top token", box=box.SIMPLE)
    for language, row in result["texts"].items():
        table.add_row(
            language, str(row["tokens"]), f"{row['mean_kl']:.5f}", f"{row['max_kl']:.5f}", f"{row['top1']:.1%}"
        )
    console = Console()
    console.print(f"{result['model']}: the engine against float32 on the same dequantised weights")
    console.print(table)
    score = result["perplexity"]
    change = score["engine"] / score["reference"] - 1
    console.print(
        f"perplexity of {score['tokens']} English tokens: {score['engine']:.4f}, reference {score['reference']:.4f} "
        f"({change:+.3%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    result = compare(arguments.model)
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
