"""A model's shapes and constants as Hugging Face's `config.json` says them, and as keys of a GGUF file."""

from typing import Any

import numpy as np

from prolepsis.errors import ModelFileError
from prolepsis.model.config import ModelConfig, RopeConfig, llama3_factors
from prolepsis.model.tokenizer import Tokenizer

# Factor, low and high frequency factor, original context: those of Llama 3.1 and 3.2.
_LLAMA3 = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))
_CLOSE = 1e-3


def config_json(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """`config.json` of a Llama whose weights are float16 where they are not quantised.

    Raises ModelFileError for RoPE factors that no key of it can say.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": float(np.float32(config.norm_eps).astype(str)),
        "rope_theta": config.rope.theta,
        "rope_scaling": rope_scaling(config.rope),
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": _one_or_all(tokenizer),
        "torch_dtype": "float16",
        "use_cache": True,
    }


def generation_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """`generation_config.json`: which tokens begin and end a text."""
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": _one_or_all(tokenizer)}


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """The entry `rope_scaling`; None for plain RoPE."""
    if rope.frequency_factors is None:
        return None if rope.scaling_factor == 1 else {"rope_type": "linear", "factor": rope.scaling_factor}
    for factor, low, high, context in _LLAMA3:
        expected = llama3_factors(rope.theta, rope.dim, factor, low, high, context)
        if np.allclose(rope.frequency_factors, expected, rtol=_CLOSE):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    raise ModelFileError(
        "the model's RoPE factors (rope_freqs.weight) are not those of Llama 3.1 or 3.2, and config.json has no words "
        "for others; write a GGUF file (--format gguf), or quantise the Hugging Face checkpoint"
    )


def _one_or_all(tokenizer: Tokenizer) -> int | list[int] | None:
    ids = sorted(tokenizer.eos_ids)
    return ids[0] if len(ids) == 1 else ids or None
