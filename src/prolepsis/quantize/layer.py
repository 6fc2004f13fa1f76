"""One layer of a Llama-shaped decoder in float32 NumPy, as calibration needs it: with a look at every product's input.

Touvron et al. 2023, arXiv:2302.13971: RMSNorm, rotary position embeddings, grouped-query attention, SwiGLU.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import ModelFileError
from prolepsis.kernels.rope_table import inv_freq, rope_table
from prolepsis.model.config import ModelConfig
from prolepsis.model.weights import Source
from prolepsis.quant.matrix import whole

Floats = NDArray[np.float32]

STAGES = (("attn_q", "attn_k", "attn_v"), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",))
"""The products of a layer in their order; those of a stage have one input."""
NORMS = ("attn_norm", "ffn_norm")
_PIECE = 4096  # tokens at a time, so that memory stays bounded


def tensor_name(layer: int, part: str) -> str:
    """The GGUF name of a part of `STAGES` or `NORMS`."""
    return f"blk.{layer}.{part}.weight"


def shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(rows, columns) of each matrix of a layer, by its part."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, wide = config.hidden_size, config.intermediate_size
    rows = {"attn_q": query, "attn_k": key, "attn_v": key, "ffn_gate": wide, "ffn_up": wide}
    columns = {"attn_output": query, "ffn_down": wide}
    return {name: (rows.get(name, hidden), columns.get(name, hidden)) for stage in STAGES for name in stage}


@dataclass
class Layer:
    """A layer and the hidden states that come into it.

    weights, norms: float32 by part, what the layer computes with; a method may replace them. hidden: float32
    [sequences, length, hidden], or None without calibration; changed in place as the layer is done.
    """

    config: ModelConfig
    index: int
    weights: dict[str, Floats]
    norms: dict[str, Floats]
    hidden: Floats | None

    @classmethod
    def read(cls, source: Source, config: ModelConfig, index: int, hidden: Floats | None) -> "Layer":
        """Layer `index` of `source`. Raises ModelFileError for weights that are missing or not finite."""
        weights = {
            part: whole(source.matrix(tensor_name(index, part), shape)) for part, shape in shapes(config).items()
        }
        norms = {part: source.vector(tensor_name(index, part), config.hidden_size) for part in NORMS}
        for part, values in {**weights, **norms}.items():
            if not np.isfinite(values).all():
                raise ModelFileError(f"{tensor_name(index, part)} holds numbers that are not finite")
        return cls(config, index, weights, norms, hidden)

    def inputs(self, stage: int) -> Iterator[Floats]:
        """The input of a stage, with the weights that the layer has now: pieces of float32 [tokens, columns].

        For stages of the MLP, `attend` comes first.
        """
        for piece in self._pieces():
            yield _rows(self._attention_input(piece, stage) if stage < 2 else self._mlp_input(piece, stage))

    def all_inputs(self) -> Iterator[list[Floats]]:
        """The inputs of the four stages together, before the layer was begun: pieces of float32 [tokens, columns]."""
        for piece in self._pieces():
            attended = self._attention_input(piece, 1)
            between = _normalised(piece + attended @ self.weights["attn_output"].T, self.norms["ffn_norm"], self._eps)
            yield [_rows(x) for x in (self._attention_input(piece, 0), attended, between, self._gated(between))]

    def attend(self) -> None:
        """Add attention to the hidden states: its weights are what they will be."""
        for piece in self._pieces():
            piece += self._attention_input(piece, 1) @ self.weights["attn_output"].T

    def feed(self) -> None:
        """Add the MLP to the hidden states, which have attention: the layer is done."""
        for piece in self._pieces():
            piece += self._mlp_input(piece, 3) @ self.weights["ffn_down"].T

    @property
    def _eps(self) -> np.float32:
        return np.float32(self.config.norm_eps)

    def _pieces(self) -> Iterator[Floats]:
        """Views of some whole sequences each."""
        if self.hidden is not None:
            step = max(1, _PIECE // self.hidden.shape[1])
            for begin in range(0, len(self.hidden), step):
                yield self.hidden[begin : begin + step]

    def _attention_input(self, piece: Floats, stage: int) -> Floats:
        x = _normalised(piece, self.norms["attn_norm"], self._eps)
        return x if stage == 0 else self._attention(x)

    def _mlp_input(self, piece: Floats, stage: int) -> Floats:
        x = _normalised(piece, self.norms["ffn_norm"], self._eps)
        return x if stage == 2 else self._gated(x)

    def _gated(self, x: Floats) -> Floats:
        gate = x @ self.weights["ffn_gate"].T
        return gate * (0.5 + 0.5 * np.tanh(0.5 * gate)) * (x @ self.weights["ffn_up"].T)

    def _attention(self, x: Floats) -> Floats:
        """What the heads see, float32 [sequences, length, heads * head dim]."""
        config, (sequences, length, _) = self.config, x.shape
        shape = (sequences, length, -1, config.head_dim)
        query, key, value = ((x @ self.weights[part].T).reshape(shape) for part in STAGES[0])
        query, key = (_turned(heads, config) for heads in (query, key))
        group = config.num_heads // config.num_kv_heads
        hidden = np.triu(np.full((length, length), -np.inf, np.float32), 1)
        out = np.empty_like(query)
        for sequence in range(sequences):
            for head in range(config.num_heads):
                scores = query[sequence, :, head] @ key[sequence, :, head // group].T
                out[sequence, :, head] = _softmax(scores, hidden, config.head_dim) @ value[sequence, :, head // group]
        return out.reshape(sequences, length, -1)


def _rows(x: Floats) -> Floats:
    return x.reshape(-1, x.shape[-1])


def _normalised(x: Floats, gains: Floats, eps: np.float32) -> Floats:
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps) * gains


def _softmax(scores: Floats, hidden: Floats, head_dim: int) -> Floats:
    scores *= np.float32(head_dim**-0.5)
    scores += hidden
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    return scores


def _turned(heads: Floats, config: ModelConfig) -> Floats:
    """`heads` [sequences, length, heads, head dim] after rotary embedding of positions 0 to length - 1."""
    rope = config.rope
    frequencies = inv_freq(rope.theta, rope.dim, rope.divisors)
    cos, sin = (part[:, None] for part in rope_table(np.arange(heads.shape[1]), frequencies))
    half = rope.dim // 2
    first, second = (
        (slice(0, half), slice(half, rope.dim))
        if rope.style == "half"
        else (slice(0, rope.dim, 2), slice(1, rope.dim, 2))
    )
    out = heads.copy()
    out[..., first] = heads[..., first] * cos - heads[..., second] * sin
    out[..., second] = heads[..., second] * cos + heads[..., first] * sin
    return out
