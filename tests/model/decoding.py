"""A model small enough to write on the spot, with every weight type in it, and its decoder in plain NumPy."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

from prolepsis.kv.cache import PagedKVCache
from prolepsis.kv.stored import QuantisedKV
from prolepsis.model.config import ModelConfig
from prolepsis.model.decoder import Decoder, Rows
from prolepsis.model.gguf_file import GGUFFile

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from weight_cases import gguf_values, random_blocks

DATA = Path(__file__).parents[1] / "data" / "gguf"
HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 256, 352, 6, 2, 32, 3, 500
EPS, THETA = 1e-5, 10_000.0

# Scales that give every type's random weights a standard deviation near 1 / 16.
_SCALES = {"Q4_0": 0.014, "Q4_1": 0.006, "Q8_0": 0.0009, "Q6_K": 0.00005, "F16": 0.0063, "BF16": 0.0063, "F32": 0.0063}
# NaN, and of integers the smallest number, which is never stored.
_NOTHING = {"bf16": 0x7FC1, "fp16": 0x7E01, "fp8_e4m3": 0x7F, "fp8_e5m2": 0x7F, "int8": -128, "int4": 0x88,
            "kivi4": 0xFF}  # fmt: skip
_MIXED = ("Q4_0", "Q4_1", "Q8_0", "F16", "BF16", "F32")  # in turn, where the width is not a multiple of 256


@dataclass
class TinyModel:
    """Tensors as GGUF bytes, by name: (type name, uint8 [rows, bytes])."""

    tensors: dict = field(default_factory=dict)
    norms: dict = field(default_factory=dict)
    factors: np.ndarray | None = None

    @classmethod
    def random(cls, seed=0, only=None, tied=False, factors=False):
        """`only`: one type for all matrices; by default all types are mixed."""
        rng = np.random.default_rng(seed)
        model = cls()
        query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        shapes = {"token_embd": (VOCAB, HIDDEN)}
        if not tied:
            shapes["output"] = (VOCAB, HIDDEN)
        for layer in range(LAYERS):
            for name, shape in (
                ("attn_q", (query, HIDDEN)), ("attn_k", (key, HIDDEN)), ("attn_v", (key, HIDDEN)),
                ("attn_output", (HIDDEN, query)), ("ffn_gate", (MLP, HIDDEN)), ("ffn_up", (MLP, HIDDEN)),
                ("ffn_down", (HIDDEN, MLP)),
            ):  # fmt: skip
                shapes[f"blk.{layer}.{name}"] = shape
            for name in ("attn_norm", "ffn_norm"):
                model.norms[f"blk.{layer}.{name}"] = 1 + 0.1 * rng.standard_normal(HIDDEN).astype(np.float32)
        model.norms["output_norm"] = 1 + 0.1 * rng.standard_normal(HIDDEN).astype(np.float32)
        for i, (name, (rows, columns)) in enumerate(shapes.items()):
            kind = only or ("Q6_K" if i % 4 == 1 and columns % 256 == 0 else _MIXED[i % len(_MIXED)])
            model.tensors[name] = (kind, random_blocks(kind, rows, columns, rng, _SCALES[kind]))
        if factors:
            model.factors = np.linspace(1, 8, HEAD_DIM // 2).astype(np.float32)
        return model

    def write(self, path):
        """As a GGUF file at `path`, opened."""
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(2048)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(MLP)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
        writer.add_layer_norm_rms_eps(EPS)
        writer.add_rope_freq_base(THETA)
        for name, (kind, raw) in self.tensors.items():
            if kind in ("F16", "F32"):
                writer.add_tensor(name + ".weight", raw.view(np.float16 if kind == "F16" else np.float32))
            else:
                writer.add_tensor(name + ".weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        for name, gains in self.norms.items():
            writer.add_tensor(name + ".weight", gains)
        if self.factors is not None:
            writer.add_tensor("rope_freqs.weight", self.factors)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return GGUFFile.open(path)

    def logits(self, tokens, kv_dtype="bf16"):
        """Logits after each token, float64 [n, VOCAB], by the formulas of the papers.

        Rounds where the engine rounds, to 16-bit activations before quantised matrices and to the cache's dtype, and
        nowhere else.
        """
        weights = {name: gguf_values(kind, raw) for name, (kind, raw) in self.tensors.items()}

        def product(name, x):
            return (x if self.tensors[name][0] in ("F16", "BF16", "F32") else _to_int16(x)) @ weights[name].T

        def norm(name, x):
            return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPS) * self.norms[name]

        n = len(tokens)
        x = weights["token_embd"][tokens]
        visible = np.tri(n, dtype=bool)
        for layer in range(LAYERS):
            block = f"blk.{layer}."
            h = norm(block + "attn_norm", x)
            q, k, v = (product(block + name, h).reshape(n, -1, HEAD_DIM) for name in ("attn_q", "attn_k", "attn_v"))
            k, v = _to_cache(self._rotated(k), kv_dtype), _to_cache(v, kv_dtype)
            k, v = (np.repeat(y, HEADS // KV_HEADS, axis=1) for y in (k, v))
            scores = np.einsum("rhd,thd->hrt", self._rotated(q), k) / np.sqrt(HEAD_DIM)
            scores = np.where(visible, scores, -np.inf)
            p = np.exp(scores - scores.max(axis=2, keepdims=True))
            p /= p.sum(axis=2, keepdims=True)
            x = x + product(block + "attn_output", np.einsum("hrt,thd->rhd", p, v).reshape(n, -1))
            h = norm(block + "ffn_norm", x)
            g = product(block + "ffn_gate", h)
            x = x + product(block + "ffn_down", g / (1 + np.exp(-g)) * product(block + "ffn_up", h))
        return product("output" if "output" in weights else "token_embd", norm("output_norm", x))

    def _rotated(self, x):
        """RoPE of x [n, heads, HEAD_DIM] in the file's order: neighbours (2i, 2i + 1) are a pair."""
        angles = np.arange(len(x))[:, None] * THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        if self.factors is not None:
            angles = angles / self.factors
        c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * c - odd * s, odd * c + even * s], axis=-1).reshape(x.shape)


def _to_int16(x):
    cells = x.astype(np.float32).astype(np.float64).reshape(len(x), -1, 32)
    scale = np.abs(cells).max(axis=2, keepdims=True) / 32639
    return (np.rint(cells / np.where(scale > 0, scale, 1)) * scale).reshape(x.shape)


def _to_cache(x, dtype):
    if dtype == "fp16":
        return x.astype(np.float16).astype(np.float64)
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


class Session:
    """A decoder with a cache of its own, for one or more sequences laid out in shuffled blocks."""

    def __init__(self, file, block_size=32, kv_dtype="bf16", tokens=512, sequences=1, seed=0, threads=None):
        self.config = ModelConfig.from_gguf(file)
        config = self.config
        self.decoder = Decoder.load(file, config, tokens, 256, threads)
        each = -(-tokens // block_size)
        self.cache = PagedKVCache(
            config.num_layers, config.num_kv_heads, config.head_dim, block_size, each * sequences + 3, kv_dtype
        )
        self.cache.k[:] = self.cache.v[:] = _NOTHING[kv_dtype]  # wherever nothing is
        self.cache.k_steps[:] = self.cache.v_steps[:] = _NOTHING["fp16"]
        if kv_dtype == "kivi4":
            self.cache.recent_k[:] = self.cache.recent_v[:] = _NOTHING["bf16"]
            self.cache.pool.recent[:] = np.random.default_rng(seed + 1).permutation(self.cache.pool.num_blocks)
        order = np.random.default_rng(seed).permutation(each * sequences + 3)[: each * sequences]
        self.tables = order.reshape(sequences, each).astype(np.int32)
        self.pool = self.decoder.pool_view(self.cache)

    def run(self, parts, logits="all"):
        """Forward [(sequence, tokens, start)] in one call."""
        batch = [Rows(np.asarray(ids, np.int64), start, self.tables[s], logits) for s, ids, start in parts]
        return self.decoder.forward(self.pool, batch).copy()

    def in_chunks(self, tokens, sizes, sequence=0):
        """Logits after each token, run in chunks of the given sizes, the last repeated."""
        out, start, sizes = [], 0, list(sizes)
        while start < len(tokens):
            count = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            part = tokens[start : start + count]
            out.append(self.run([(sequence, part, start)]))
            start += len(part)
        return np.concatenate(out)

    def kv(self, length, sequence=0):
        """K and V of a sequence in order of position, [layers, 2, tokens, kv_heads, head_dim]."""
        blocks, cache = self.tables[sequence], self.cache

        def in_order(k, v):  # [layers, blocks, slots, heads, ...]
            shape = (k.shape[0], -1, *k.shape[3:])
            return np.stack([k.reshape(shape), v.reshape(shape)], axis=1)[:, :, :length]

        values = in_order(cache.k[:, blocks].transpose(0, 1, 4, 2, 3), cache.v[:, blocks].swapaxes(2, 3))
        if not cache.k_steps.size:
            return values
        steps = in_order(*(array[:, blocks].swapaxes(2, 3) for array in (cache.k_steps, cache.v_steps)))
        return QuantisedKV(values, steps)


def log_softmax(logits):
    """In float64, along the last axis."""
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def kl_divergence(p, q):
    """KL(p || q) in nats of each row of two arrays of logits or log-probabilities."""
    p, q = log_softmax(p), log_softmax(q)
    return (np.exp(p) * (p - q)).sum(axis=-1)
