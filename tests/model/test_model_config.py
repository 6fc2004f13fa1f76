from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import ARRAY, F32, STRING, U32, gguf, info, key

from prolepsis.errors import ModelFileError
from prolepsis.model.config import ModelConfig, RopeConfig
from prolepsis.model.gguf_file import GGUFFile

CASE = Path(__file__).parents[1] / "data" / "gguf" / "Q4_0.gguf"

KEYS = {
    "general.architecture": (STRING, "llama"),
    "llama.block_count": (U32, 3),
    "llama.context_length": (U32, 256),
    "llama.embedding_length": (U32, 64),
    "llama.feed_forward_length": (U32, 128),
    "llama.attention.head_count": (U32, 4),
    "llama.attention.head_count_kv": (U32, 2),
    "llama.attention.layer_norm_rms_epsilon": (F32, 2**-17),
    "llama.rope.freq_base": (F32, 500_000.0),
}
EMBEDDING = ("token_embd.weight", (64, 5), 1280)


def config(tmp_path, changes=None, tensors=(EMBEDDING,), data=None) -> ModelConfig:
    """The configuration of a file with KEYS, `changes` applied (None removes a key), and F32 `tensors`."""
    keys = {name: entry for name, entry in (KEYS | (changes or {})).items() if entry is not None}
    infos, offset = [], 0
    for name, shape, size in tensors:
        infos.append(info(name, shape, 0, offset))
        offset += -(-size // 32) * 32
    path = tmp_path / "tiny.gguf"
    path.write_bytes(
        gguf([key(name, *entry) for name, entry in keys.items()], infos, bytes(offset) if data is None else data)
    )
    return ModelConfig.from_gguf(GGUFFile.open(path))


def test_a_real_file():
    read = ModelConfig.from_gguf(GGUFFile.open(CASE))
    assert (read.vocab_size, read.hidden_size, read.intermediate_size, read.num_layers) == (1024, 256, 512, 1)
    assert (read.num_heads, read.num_kv_heads, read.head_dim, read.max_context) == (4, 2, 64, 2048)
    assert read.norm_eps == pytest.approx(1e-6)
    assert read.rope == RopeConfig(theta=10_000.0, dim=64, style="interleaved")
    assert not read.tied_embeddings


def test_what_is_derived_and_defaulted(tmp_path):
    read = config(tmp_path, {"llama.rope.freq_base": None, "llama.attention.head_count_kv": None})
    assert read == ModelConfig(
        architecture="llama",
        name="tiny",
        vocab_size=5,
        hidden_size=64,
        intermediate_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        norm_eps=2**-17,
        rope=RopeConfig(theta=10_000.0, dim=16, style="interleaved"),
        max_context=256,
        tied_embeddings=True,
    )


def test_explicit_head_dim_and_output_tensor(tmp_path):
    changes = {"llama.attention.key_length": (U32, 32), "llama.rope.dimension_count": (U32, 8)}
    read = config(tmp_path, changes, (EMBEDDING, ("output.weight", (64, 5), 1280)))
    assert (read.head_dim, read.rope.dim, read.tied_embeddings) == (32, 8, False)


def test_the_same_value_for_every_layer_is_one_value(tmp_path):
    assert config(tmp_path, {"llama.attention.head_count_kv": (ARRAY, (U32, [2, 2, 2]))}).num_kv_heads == 2


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"llama.rope.scaling.type": (STRING, "none"), "llama.rope.scaling.factor": (F32, 4.0)}, 1.0),
        ({"llama.rope.scaling.type": (STRING, "linear"), "llama.rope.scaling.factor": (F32, 4.0)}, 4.0),
        ({"llama.rope.scale_linear": (F32, 8.0)}, 8.0),
    ],
)
def test_linear_rope_scaling(tmp_path, changes, factor):
    assert config(tmp_path, changes).rope.scaling_factor == factor


def test_rope_frequency_factors(tmp_path):
    factors = np.linspace(1, 8, 8, dtype="<f4")
    tensors = (EMBEDDING, ("rope_freqs.weight", (8,), 32))
    read = config(tmp_path, tensors=tensors, data=bytes(1280) + factors.tobytes())
    assert read.rope.frequency_factors == tuple(factors.tolist())
    with pytest.raises(ModelFileError, match=r"'rope_freqs.weight' holds a value outside"):
        config(tmp_path, tensors=tensors)
    with pytest.raises(ModelFileError, match=r"'rope_freqs.weight' is F32 \(4,\), expected F32 \(8,\)"):
        config(tmp_path, tensors=(EMBEDDING, ("rope_freqs.weight", (4,), 16)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": (STRING, "mamba")}, r"architecture 'mamba' is not supported; supported: llama"),
        ({"general.architecture": None}, "general.architecture is missing"),
        ({"general.architecture": (U32, 1)}, "general.architecture = 1, expected a string"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": (U32, 0)}, "llama.block_count = 0, expected a whole number from 1"),
        ({"llama.block_count": (U32, 2**31)}, "llama.block_count = 2147483648"),
        ({"llama.block_count": (F32, 3.0)}, "llama.block_count = 3.0"),
        ({"llama.context_length": (7, True)}, "llama.context_length = True"),
        ({"llama.embedding_length": (U32, 66)}, "llama.embedding_length = 66 is not a multiple"),
        (
            {"llama.embedding_length": (U32, 32)},
            r"'token_embd.weight' has shape \(5, 64\), expected \(vocabulary, 32\)",
        ),
        ({"llama.attention.head_count": (U32, 3)}, "head_count = 3 is not a multiple of .*head_count_kv = 2"),
        ({"llama.attention.head_count_kv": (ARRAY, (U32, [2, 4, 2]))}, "head_count_kv differs between layers"),
        ({"llama.attention.value_length": (U32, 8)}, "value_length differs from the key length 16"),
        ({"llama.attention.layer_norm_rms_epsilon": (F32, float("nan"))}, "rms_epsilon = nan"),
        ({"llama.attention.layer_norm_rms_epsilon": (F32, 0.0)}, "rms_epsilon = 0.0"),
        ({"llama.attention.layer_norm_rms_epsilon": (F32, 2.0)}, "rms_epsilon = 2.0, expected less than 1"),
        ({"llama.rope.freq_base": (F32, float("inf"))}, "freq_base = inf"),
        ({"llama.rope.freq_base": (F32, 0.5)}, "freq_base = 0.5, expected 1 to"),
        ({"llama.rope.freq_base": (F32, 1e13)}, "expected 1 to 1e\\+12"),
        ({"llama.rope.scaling.factor": (F32, 1e-6)}, "scaling factor 9"),
        ({"llama.rope.dimension_count": (U32, 7)}, "dimension_count = 7, expected an even number up to"),
        ({"llama.rope.dimension_count": (U32, 18)}, "dimension_count = 18, expected an even number up to"),
        ({"llama.rope.scaling.type": (STRING, "yarn")}, "rope.scaling.type = 'yarn' is not supported"),
        ({"llama.rope.scaling.factor": (F32, 0.0)}, "rope.scaling.factor = 0.0"),
        ({"llama.expert_count": (U32, 8)}, "llama.expert_count = 8: mixture-of-experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_metadata_names_the_key(tmp_path, changes, message):
    with pytest.raises(ModelFileError, match=message):
        config(tmp_path, changes)


def test_no_embedding(tmp_path):
    with pytest.raises(ModelFileError, match=r"'token_embd.weight' is missing"):
        config(tmp_path, tensors=())
