"""Small Hugging Face checkpoints made up here, one for each way to pack weights."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from prolepsis.quant.awq_layout import pack_awq
from prolepsis.quant.bit_words import WORD, pack_words
from prolepsis.quant.compressed_tensors import words_of
from prolepsis.quant.exl2_layout import pack_exl2
from prolepsis.quant.gptq_layout import pack_gptq

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS, VOCABULARY = 64, 2, 1, 32, 96, 2, 288
GROUP = 32
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (WIDTH, HIDDEN),
    "mlp.up_proj": (WIDTH, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDTH),
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "max_position_embeddings": 256,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}
Tensors = dict[str, np.ndarray]
METHODS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "gptq-act": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
    "gptq-v2": {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
    "gptq-3": {"quant_method": "gptq", "bits": 3, "group_size": GROUP, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "pack-quantized": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": GROUP, "strategy": "group"}}},
    },
    "int-quantized": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}},
    },
    "exl2": {"quant_method": "exl2", "bits": 4.2},
}


def write_checkpoint(
    directory: Path, method: str = "bf16", shards: int = 1, fused: bool = False, **config: Any
) -> Tensors:
    """Write a checkpoint; returns its matrices and vectors in float32, by the names of their modules.

    method: "bf16", or one of `METHODS`. `config`: changes of config.json.
    """
    rng = np.random.default_rng(list(method.encode()))
    directory.mkdir(parents=True, exist_ok=True)
    values, stored = {}, {}
    for module, shape in _plain():
        matrix = (rng.standard_normal(shape) * 0.5 + (len(shape) == 1)).astype(ml_dtypes.bfloat16)
        stored[f"{module}.weight"], values[module] = matrix, matrix.astype(np.float32)
    for layer in range(LAYERS):
        for name, (rows, columns) in _linear(fused):
            module = f"model.layers.{layer}.{name}"
            parts, values[module] = _packed(rng, method, rows, columns)
            stored |= {f"{module}.{part}": np.ascontiguousarray(array) for part, array in parts.items()}
    said = CONFIG | ({"quantization_config": METHODS[method]} if method in METHODS else {}) | config
    (directory / "config.json").write_text(json.dumps(said))
    write_tensors(directory, stored, shards)
    return values


def write_tensors(directory: Path, tensors: Tensors, shards: int = 1) -> None:
    """model.safetensors, or that many files and their index."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    names, weight_map = sorted(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        some = names[shard::shards]
        save_file({name: tensors[name] for name in some}, directory / file)
        weight_map |= dict.fromkeys(some, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_tokenizer(directory: Path) -> None:
    """A tokenizer.json of bytes alone with three control tokens, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "</s>", "<|im_start|>")])
    backend.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _plain() -> list[tuple[str, tuple[int, ...]]]:
    norms = [
        f"model.layers.{i}.{name}" for i in range(LAYERS) for name in ("input_layernorm", "post_attention_layernorm")
    ]
    matrices = ("model.embed_tokens", "lm_head")
    return [(name, (VOCABULARY, HIDDEN)) for name in matrices] + [(name, (HIDDEN,)) for name in (*norms, "model.norm")]


def _linear(fused: bool) -> list[tuple[str, tuple[int, int]]]:
    if not fused:
        return list(SHAPES.items())
    q, k, v, o, gate, up, down = SHAPES.values()
    return [
        ("self_attn.qkv_proj", (q[0] + k[0] + v[0], HIDDEN)),
        ("self_attn.o_proj", o),
        ("mlp.gate_up_proj", (gate[0] + up[0], HIDDEN)),
        ("mlp.down_proj", down),
    ]


def _packed(rng: np.random.Generator, method: str, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    """Tensors of a linear layer, and the values they stand for."""
    if method == "bf16":
        matrix = (rng.standard_normal((rows, columns)) * 0.1).astype(ml_dtypes.bfloat16)
        return {"weight": matrix}, matrix.astype(np.float32)
    if method == "exl2":
        return _exl2(rng, rows, columns)
    settings = METHODS[method]
    bits = {"int-quantized": 8, "pack-quantized": 4}.get(method, settings.get("bits"))
    group = columns if method in ("gptq-v2", "int-quantized") else GROUP
    groups = columns // group
    codes, zeros = (rng.integers(0, 1 << bits, (rows, n)).astype(np.uint8) for n in (columns, groups))
    scales = rng.uniform(0.001, 0.02, (rows, groups)).astype(np.float16)
    g_idx = (np.arange(columns) // group).astype(np.int32)
    if method in ("gptq-act", "pack-quantized"):
        rng.shuffle(g_idx)
    if method in ("gptq", "int-quantized"):
        zeros[:] = 1 << bits - 1
    values = scales.astype(np.float32)[:, g_idx] * (codes.astype(np.float32) - zeros[:, g_idx])
    if method.startswith("gptq"):
        qweight, qzeros = pack_gptq(codes, zeros, bits, 2 if method == "gptq-v2" else 1)
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales.T, "g_idx": g_idx}, values
    if method == "awq":
        return {"qweight": pack_awq(codes), "qzeros": pack_awq(zeros), "scales": scales.T}, values
    if method == "int-quantized":
        return {"weight": (codes ^ 128).view(np.int8), "weight_scale": scales}, values
    points = pack_rows(np.ascontiguousarray(zeros.T), bits).T
    packed = {"weight_packed": pack_rows(codes, bits), "weight_scale": scales, "weight_zero_point": points}
    return packed | {"weight_g_idx": g_idx, "weight_shape": np.array([rows, columns])}, values


def pack_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `compressed_tensors.unpack_rows`, as one stream of bits, of whole words."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % WORD)))
    words = pack_words(padded.T, bits)[: words_of(codes.shape[1], bits)[0]]
    return np.ascontiguousarray(words.T).view(np.int32)


def _exl2(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    groups = [(5, 32), *[(3, 32)] * (columns // 32 - 1)]
    codes = np.concatenate([rng.integers(0, 1 << bits, (rows, n)).astype(np.uint8) for bits, n in groups], axis=1)
    scale_codes, most = (
        rng.integers(0, 16, (rows, len(groups))).astype(np.uint8),
        np.full(len(groups), 0.25, np.float16),
    )
    order = rng.permutation(columns).astype(np.int32)
    bias = np.repeat([1 << bits - 1 for bits, _ in groups], 32)
    scales = np.repeat((scale_codes.astype(np.float32) + 1) ** 2 * 0.25 / 256, 32, axis=1)
    values = np.empty((rows, columns), np.float32)
    values[:, order] = scales * (codes.astype(np.float32) - bias)
    return pack_exl2(codes, groups, scale_codes, most, order)._asdict(), values
