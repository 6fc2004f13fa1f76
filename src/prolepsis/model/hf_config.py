"""`config.json` of Hugging Face checkpoints: the same facts as a GGUF file's metadata, under other names.

Names and defaults: `LlamaConfig` and `MistralConfig` of the `transformers` library, versions 4 and 5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prolepsis.errors import ModelFileError
from prolepsis.model.config import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_NAME,
    MAX_WIDTH,
    Keys,
    ModelConfig,
    RopeConfig,
    checked_heads,
    checked_rope,
    llama3_factors,
    rope_theta,
)

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
_CACHE_PREFIX = "models--"


def config_from_hf(path: Path, values: dict[str, Any]) -> ModelConfig:
    """The configuration that `values`, the content of the config.json at `path`, describe.

    Raises:
        ModelFileError: the architecture, or something in it, is not supported, or a key is missing, of the wrong type
            or out of range; the message names the key.
    """
    keys = Keys(path, {key: value for key, value in values.items() if value is not None}, "key")
    _refuse_others(keys)
    hidden_size, num_heads, num_kv_heads, head_dim = _widths(keys)
    context = keys.integer("max_position_embeddings", MAX_CONTEXT, default=2_048)
    window = keys.integer("sliding_window", MAX_CONTEXT, default=context)
    if window < context and keys.values.get("use_sliding_window", True):
        raise keys.fail(
            f"sliding_window = {window} is less than max_position_embeddings = {context}: attention over a window is "
            f"not supported; set max_position_embeddings to {window} to use the model up to there"
        )
    return ModelConfig(
        architecture="llama",
        name=_name(path)[:MAX_NAME],
        vocab_size=keys.integer("vocab_size", MAX_WIDTH),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", MAX_WIDTH),
        num_layers=keys.integer("num_hidden_layers", MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=keys.fraction("rms_norm_eps", default=1e-6),
        rope=_rope(keys, head_dim),
        max_context=context,
        tied_embeddings=bool(keys.values.get("tie_word_embeddings", False)),
    )


def _name(path: Path) -> str:
    """The directory's name, or the repository's where the directory is one of the hub client's cache."""
    for parent in path.parents:
        if parent.name.startswith(_CACHE_PREFIX):
            return parent.name.removeprefix(_CACHE_PREFIX).replace("--", "/")
    return path.resolve().parent.name


def _refuse_others(keys: Keys) -> None:
    named = keys.values.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise keys.fail(f"architectures = {named!r:.80} is not supported; supported: {', '.join(ARCHITECTURES)}")
    for key in ("attention_bias", "mlp_bias"):
        if keys.values.get(key, False) is not False:
            raise keys.fail(f"{key} = {keys.values[key]!r:.80}: models with biases are not supported")
    if keys.text("hidden_act", default="silu") not in ("silu", "swish"):
        raise keys.fail(f"hidden_act = {keys.values['hidden_act']!r:.80} is not supported; supported: silu")


def _widths(keys: Keys) -> tuple[int, int, int, int]:
    hidden_size = keys.integer("hidden_size", MAX_WIDTH)
    num_heads = keys.integer("num_attention_heads", MAX_HEADS)
    num_kv_heads = keys.integer("num_key_value_heads", MAX_HEADS, default=num_heads)
    checked_heads(keys, "num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    if "head_dim" not in keys.values and hidden_size % num_heads:
        raise keys.fail(f"hidden_size = {hidden_size} is not a multiple of num_attention_heads = {num_heads}")
    head_dim = keys.integer("head_dim", MAX_HEAD_DIM, default=hidden_size // num_heads)
    if keys.values.get("partial_rotary_factor", 1.0) != 1.0:
        raise keys.fail(f"partial_rotary_factor = {keys.values['partial_rotary_factor']!r:.80} is not supported")
    return hidden_size, num_heads, num_kv_heads, head_dim


def _rope(keys: Keys, head_dim: int) -> RopeConfig:
    """RoPE from `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of transformers 4."""
    merged: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        part = keys.values.get(name, {})
        if not isinstance(part, dict):
            raise keys.fail(f"{name} = {part!r:.80}, expected an object")
        merged |= part
    known = {key: keys.values[key] for key in ("rope_theta",) if key in keys.values}
    rope = Keys(keys.path, known | {key: value for key, value in merged.items() if value is not None}, "RoPE key")
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    theta = rope_theta(rope, "rope_theta")
    factor, factors = 1.0, None
    if kind == "linear":
        factor = rope.number("factor")
    elif kind == "llama3":
        factors = _llama3_factors(rope, theta, head_dim)
    elif kind != "default":
        raise keys.fail(f"rope_type = {kind!r:.80} is not supported; supported: default, linear, llama3")
    return checked_rope(keys, RopeConfig(theta, head_dim, "half", factor, factors))


def _llama3_factors(rope: Keys, theta: float, dim: int) -> tuple[float, ...]:
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor", default=1.0), rope.number("high_freq_factor", default=4.0)
    context = rope.number("original_max_position_embeddings", default=8_192.0)
    if high <= low:
        raise rope.fail(f"high_freq_factor = {high} must be more than low_freq_factor = {low}")
    return llama3_factors(theta, dim, factor, low, high, context)


def require_shapes(config: ModelConfig, path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise ModelFileError where the tensors' shapes show at once that they are of another model."""
    embedding, last = "model.embed_tokens.weight", f"model.layers.{config.num_layers - 1}.input_layernorm.weight"
    expected = (config.vocab_size, config.hidden_size)
    if shapes.get(embedding) != expected:
        raise ModelFileError(
            f"{path}: tensor {embedding!r} has shape {shapes.get(embedding)}, expected {expected} "
            "(vocab_size, hidden_size)"
        )
    if last not in shapes:
        raise ModelFileError(f"{path}: num_hidden_layers = {config.num_layers}, but tensor {last!r} is missing")
