"""What the decoder needs to know about a model, read from GGUF metadata and checked.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section "LLM". An architecture is one entry
of `ARCHITECTURES`; nothing else here knows a family by name.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import ModelFileError
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.gguf_parser import NOT_A_MODEL

RopeStyle = Literal["interleaved", "half"]

MAX_LAYERS = 1_024
MAX_HEADS = 4_096
MAX_HEAD_DIM = 4_096
MAX_WIDTH = 1 << 22
MAX_CONTEXT = 1 << 31
# What real models stay far within, and what session files can say (`coding.rope`).
MAX_ROPE_THETA = 1e12
MIN_ROPE_FACTOR, MAX_ROPE_FACTOR = 1e-3, 1e9
MAX_NAME = 256

ROPE_FACTORS_TENSOR = "rope_freqs.weight"


@dataclass(frozen=True)
class Architecture:
    """What a family fixes that its metadata does not say.

    `rope_style`: which of a head's values RoPE turns together, in the weights' order of this file format:
    "interleaved" pairs (2i, 2i + 1), "half" pairs (i, i + dim / 2).
    """

    rope_style: RopeStyle


# llama.cpp's converter permutes the Q and K rows of Llama models so that the pairs of RoPE are neighbours.
ARCHITECTURES: dict[str, Architecture] = {"llama": Architecture(rope_style="interleaved")}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

    Pair i of the first `dim` values of a head turns by
    `position / scaling_factor * theta ** (-2 * i / dim) / frequency_factors[i]` radians.
    `scaling_factor` is 1.0 unless the file asks for linear scaling (Chen et al. 2023, arXiv:2306.15595);
    `frequency_factors` is None or has dim / 2 entries (Llama 3.1's long-context scaling, stored by the
    converter as a tensor).
    """

    theta: float
    dim: int
    style: RopeStyle
    scaling_factor: float = 1.0
    frequency_factors: tuple[float, ...] | None = None

    @property
    def divisors(self) -> list[float]:
        """By what the angle of each pair is divided, as `kernels.rope_table.inv_freq` takes them."""
        return [self.scaling_factor * factor for factor in self.frequency_factors or (1.0,) * (self.dim // 2)]


def llama3_factors(theta: float, dim: int, factor: float, low: float, high: float, context: float) -> tuple[float, ...]:
    """By what Llama 3.1 divides each pair's frequency: short waves stay, long ones are stretched by `factor`, and
    between them it is interpolated (`_compute_llama3_parameters` in transformers).

    low, high: turns within `context`, the tokens of the original training, that long and short waves make.
    """
    factors = []
    for pair in range(dim // 2):
        turns = context * theta ** (-2 * pair / dim) / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(factors)


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a decoder-only transformer. `max_context` is in tokens."""

    architecture: str
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_context: int
    tied_embeddings: bool

    @property
    def num_weights(self) -> int:
        """Weights in all matrices; a tied embedding counts once."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * query + 2 * key + 3 * self.intermediate_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + embeddings

    @staticmethod
    def from_gguf(file: GGUFFile) -> ModelConfig:
        """Read and check the configuration of `file`.

        Raises:
            ModelFileError: the architecture or a RoPE scaling is not supported, or a key is missing,
                of the wrong type or out of range; the message names the key.
        """
        keys = Keys(file.path, file.metadata)
        other = NOT_A_MODEL.get(keys.text("general.type", default="model"))
        if other:
            raise keys.fail(other)
        architecture = keys.text("general.architecture")
        family = ARCHITECTURES.get(architecture)
        if family is None:
            raise keys.fail(
                f"architecture {architecture!r:.80} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
            )
        prefix = architecture
        hidden_size = keys.integer(f"{prefix}.embedding_length", MAX_WIDTH)
        num_heads = keys.integer(f"{prefix}.attention.head_count", MAX_HEADS)
        num_kv_heads = keys.integer(f"{prefix}.attention.head_count_kv", MAX_HEADS, default=num_heads)
        counts = f"{prefix}.attention.head_count"
        checked_heads(keys, counts, num_heads, f"{counts}_kv", num_kv_heads)
        head_dim = _head_dim(keys, prefix, hidden_size, num_heads)
        _refuse_experts(keys, prefix)
        return ModelConfig(
            architecture=architecture,
            name=keys.text("general.name", default=file.path.stem)[:MAX_NAME],
            vocab_size=_vocab_size(keys, file, hidden_size),
            hidden_size=hidden_size,
            intermediate_size=keys.integer(f"{prefix}.feed_forward_length", MAX_WIDTH),
            num_layers=keys.integer(f"{prefix}.block_count", MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=keys.fraction(f"{prefix}.attention.layer_norm_rms_epsilon"),
            rope=_rope(keys, file, prefix, head_dim, family.rope_style),
            max_context=keys.integer(f"{prefix}.context_length", MAX_CONTEXT),
            tied_embeddings="output.weight" not in file.tensors,
        )


def rows_for(name: str, config: ModelConfig, style: RopeStyle) -> NDArray[np.intp] | None:
    """Which row of the matrix `name` (as GGUF names it) of `config` each row is where RoPE turns pairs in `style`.

    None: they stay as they are, as all but those of Q and K do.
    """
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None or style == config.rope.style:
        return None
    within = np.arange(config.head_dim)
    turned = within[: config.rope.dim].copy()
    pairs = turned.reshape(-1, 2) if style == "half" else turned.reshape(2, -1)
    within[: config.rope.dim] = pairs.T.reshape(-1)
    return (np.arange(heads)[:, None] * config.head_dim + within).reshape(-1)


class Keys:
    """Typed look-ups in a file's metadata whose errors name the file and the key; `what` the file calls them."""

    def __init__(self, path: Path, values: dict[str, Any], what: str = "metadata key") -> None:
        self.path = path
        self.values = values
        self.what = what

    def fail(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {problem}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if value is None:
            raise self.fail(f"{self.what} {key} is missing")
        if not isinstance(value, str):
            raise self.fail(f"{key} = {value!r:.80}, expected a string")
        return value

    def integer(self, key: str, limit: int, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if value is None:
            raise self.fail(f"{self.what} {key} is missing")
        if isinstance(value, list):
            # Some converters write one value a layer; the decoder has one shape for all layers.
            if not value or any(item != value[0] for item in value):
                raise self.fail(f"{key} differs between layers, which is not supported")
            value = value[0]
        if type(value) is not int or not 1 <= value <= limit:
            raise self.fail(f"{key} = {value!r:.80}, expected a whole number from 1 to {limit}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if value is None:
            raise self.fail(f"{self.what} {key} is missing")
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.fail(f"{key} = {value!r:.80}, expected a positive finite number")
        return float(value)

    def fraction(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value >= 1:
            raise self.fail(f"{key} = {value}, expected less than 1")
        return value


def checked_heads(keys: Keys, key: str, num_heads: int, kv_key: str, num_kv_heads: int) -> None:
    """Raise ModelFileError unless heads of queries share those of keys evenly."""
    if num_heads % num_kv_heads:
        raise keys.fail(f"{key} = {num_heads} is not a multiple of {kv_key} = {num_kv_heads}")


def rope_theta(keys: Keys, key: str) -> float:
    """The base of RoPE's frequencies. Raises ModelFileError where it is out of range."""
    theta = keys.number(key, default=10_000.0)
    if not 1 <= theta <= MAX_ROPE_THETA:
        raise keys.fail(f"{key} = {theta}, expected 1 to {MAX_ROPE_THETA:g}")
    return theta


def checked_rope(keys: Keys, rope: RopeConfig) -> RopeConfig:
    """`rope`; raises ModelFileError where a factor in it is out of range."""
    for factor in (rope.scaling_factor, *(rope.frequency_factors or ())):
        if not MIN_ROPE_FACTOR <= factor <= MAX_ROPE_FACTOR:
            within = f"{MIN_ROPE_FACTOR:g} to {MAX_ROPE_FACTOR:g}"
            raise keys.fail(f"the RoPE scaling factor {factor} is not within {within}")
    return rope


def _head_dim(keys: Keys, prefix: str, hidden_size: int, num_heads: int) -> int:
    key_length, value_length = f"{prefix}.attention.key_length", f"{prefix}.attention.value_length"
    if key_length in keys.values:
        head_dim = keys.integer(key_length, MAX_HEAD_DIM)
    elif hidden_size % num_heads:
        raise keys.fail(
            f"{prefix}.embedding_length = {hidden_size} is not a multiple of "
            f"{prefix}.attention.head_count = {num_heads}, and {key_length} is missing"
        )
    else:
        head_dim = hidden_size // num_heads
    if head_dim > MAX_HEAD_DIM:
        raise keys.fail(f"the head dimension {head_dim} is larger than the supported {MAX_HEAD_DIM}")
    if keys.integer(value_length, MAX_HEAD_DIM, default=head_dim) != head_dim:
        raise keys.fail(f"{value_length} differs from the key length {head_dim}, which is not supported")
    return head_dim


def _vocab_size(keys: Keys, file: GGUFFile, hidden_size: int) -> int:
    """Rows of the embedding: the number of token ids the model knows, whatever the metadata claims."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise keys.fail("tensor 'token_embd.weight' is missing")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
        raise keys.fail(f"tensor 'token_embd.weight' has shape {embedding.shape}, expected (vocabulary, {hidden_size})")
    return embedding.shape[0]


def _refuse_experts(keys: Keys, prefix: str) -> None:
    key = f"{prefix}.expert_count"
    if keys.values.get(key, 0) != 0:
        raise keys.fail(f"{key} = {keys.values[key]!r:.80}: mixture-of-experts models are not supported")


def _rope(keys: Keys, file: GGUFFile, prefix: str, head_dim: int, style: RopeStyle) -> RopeConfig:
    dim_key = f"{prefix}.rope.dimension_count"
    dim = keys.integer(dim_key, MAX_HEAD_DIM, default=head_dim)
    if dim % 2 or dim > head_dim:
        raise keys.fail(f"{dim_key} = {dim}, expected an even number up to the head dimension {head_dim}")
    scaling_key = f"{prefix}.rope.scaling.type"
    scaling = keys.text(scaling_key, default="linear")
    if scaling not in ("none", "linear"):
        raise keys.fail(f"{scaling_key} = {scaling!r:.80} is not supported; supported: none, linear")
    factor = 1.0
    if scaling == "linear":
        legacy = keys.number(f"{prefix}.rope.scale_linear", default=1.0)
        factor = keys.number(f"{prefix}.rope.scaling.factor", default=legacy)
    theta = rope_theta(keys, f"{prefix}.rope.freq_base")
    return checked_rope(keys, RopeConfig(theta, dim, style, factor, _frequency_factors(keys, file, dim)))


def _frequency_factors(keys: Keys, file: GGUFFile, dim: int) -> tuple[float, ...] | None:
    tensor = file.tensors.get(ROPE_FACTORS_TENSOR)
    if tensor is None:
        return None
    if tensor.type_name != "F32" or tensor.shape != (dim // 2,):
        raise keys.fail(
            f"tensor {ROPE_FACTORS_TENSOR!r} is {tensor.type_name} {tensor.shape}, expected F32 ({dim // 2},)"
        )
    factors = tensor.data.view("<f4")
    if not ((factors >= MIN_ROPE_FACTOR) & (factors <= MAX_ROPE_FACTOR)).all():
        raise keys.fail(
            f"tensor {ROPE_FACTORS_TENSOR!r} holds a value outside {MIN_ROPE_FACTOR:g} to {MAX_ROPE_FACTOR:g}"
        )
    return tuple(factors.tolist())
