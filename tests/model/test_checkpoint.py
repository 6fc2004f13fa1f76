"""Hugging Face directories as models: what each format's tensors become, and what is refused."""

import hashlib
import json
import math
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from checkpoints import LAYERS, SHAPES, VOCABULARY, write_checkpoint, write_tensors, write_tokenizer
from safetensors.numpy import load_file, save_file

from prolepsis.errors import ModelFileError
from prolepsis.model.model_file import GGUFModel, open_model
from prolepsis.quant.matrix import whole
from prolepsis.quantize.gguf_keys import tokenizer_keys

FOREIGN = Path(__file__).parents[1] / "data" / "hf"
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
METHODS = ["bf16", "gptq", "gptq-act", "gptq-v2", "gptq-3", "awq", "pack-quantized", "int-quantized", "exl2"]


def assert_same(directory: Path, values: dict[str, np.ndarray], names: dict[str, str] = NAMES) -> None:
    model = open_model(directory)
    for layer in range(LAYERS):
        for name, module in names.items():
            got = whole(model.matrix(f"blk.{layer}.{name}.weight", SHAPES[module]))
            np.testing.assert_array_equal(got, values[f"model.layers.{layer}.{module}"], err_msg=name)
        norm = model.vector(f"blk.{layer}.ffn_norm.weight", 64)
        np.testing.assert_array_equal(norm, values[f"model.layers.{layer}.post_attention_layernorm"])
    for name, module in {"token_embd": "model.embed_tokens", "output": "lm_head"}.items():
        np.testing.assert_array_equal(whole(model.matrix(f"{name}.weight", (VOCABULARY, 64))), values[module])


@pytest.mark.parametrize("method", METHODS)
def test_every_format_is_read_as_what_was_written(method, tmp_path):
    assert_same(tmp_path, write_checkpoint(tmp_path, method))


@pytest.mark.parametrize("name", ["gptq4-g64-act", "awq4-g128"])
def test_files_of_another_tool_are_the_numbers_it_makes_of_them(name):
    model, digests = open_model(FOREIGN / name), json.loads((FOREIGN / "digests.json").read_text())[name]
    for part, module in NAMES.items():
        values = whole(model.matrix(f"blk.0.{part}.weight", (64, 1024 if part == "ffn_down" else 512)))
        assert hashlib.sha256(values.tobytes()).hexdigest() == digests[module], module


def test_shards_and_a_file_of_them_are_one_model(tmp_path):
    values = write_checkpoint(tmp_path, shards=3)
    assert_same(tmp_path, values)
    assert_same(tmp_path / "model-00002-of-00003.safetensors", values)


@pytest.mark.parametrize("method", ["bf16", "gptq-act", "awq"])
def test_fused_layers_are_parts_of_one(method, tmp_path):
    values = write_checkpoint(tmp_path, method, fused=True)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for fused, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            start = 0
            for part in parts:
                module = f"{fused.split('.')[0]}.{part}_proj"
                values[prefix + module] = values[prefix + fused][start : start + SHAPES[module][0]]
                start += SHAPES[module][0]
    assert_same(tmp_path, values)


def test_rows_that_pad_a_quantised_head_are_left_out(tmp_path):
    values = write_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["lm_head.weight"]
    write_tensors(tmp_path, tensors | {"lm_head.weight": np.concatenate([head, head[:32]])})
    assert_same(tmp_path, values)


def test_biases_of_zeros_are_none(tmp_path):
    values = write_checkpoint(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    bias = "model.layers.1.mlp.up_proj.bias"
    write_tensors(tmp_path, tensors | {bias: np.zeros(96, np.float16)})
    assert_same(tmp_path, values)
    write_tensors(tmp_path, tensors | {bias: np.ones(96, np.float16)})
    with pytest.raises(ModelFileError, match="up_proj' has a bias"):
        assert_same(tmp_path, values)


def test_old_configurations_beside_config_json(tmp_path):
    values = write_checkpoint(tmp_path, "awq", quantization_config=None)
    (tmp_path / "quant_config.json").write_text(
        '{"zero_point": true, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}'
    )
    assert_same(tmp_path, values)
    values = write_checkpoint(tmp_path, "gptq", quantization_config=None)
    (tmp_path / "quant_config.json").unlink()
    with pytest.raises(ModelFileError, match="no quantization_config that says"):
        assert_same(tmp_path, values)
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 32}')
    assert_same(tmp_path, values)


def test_layers_may_have_other_bits_than_the_rest(tmp_path):
    values = write_checkpoint(tmp_path, "gptq")
    other = write_checkpoint(tmp_path / "other", "gptq-3")
    tensors, wide = (load_file(each / "model.safetensors") for each in (tmp_path, tmp_path / "other"))
    module = "model.layers.0.mlp.down_proj"
    write_tensors(tmp_path, tensors | {name: array for name, array in wide.items() if name.startswith(module)})
    assert_same(tmp_path, values | {module: other[module]})


def test_the_fingerprint_is_of_weights_and_configuration(tmp_path):
    def changed(file: str, old: bytes, new: bytes) -> str:
        path = tmp_path / file
        whole_file = path.read_bytes()
        path.write_bytes(whole_file.replace(old, new))
        told = open_model(tmp_path).fingerprint()
        path.write_bytes(whole_file)
        return told

    write_checkpoint(tmp_path, shards=2)
    write_tokenizer(tmp_path)
    first = open_model(tmp_path).fingerprint()
    raw = (tmp_path / "model-00002-of-00002.safetensors").read_bytes()[-8:]
    told = {
        first,
        changed("config.json", b"1e-05", b"2e-05"),
        changed("tokenizer.json", b"im_start", b"im_begin"),
        changed("model-00002-of-00002.safetensors", raw, bytes(8)),
    }
    assert len(told) == 4
    assert changed("tokenizer_config.json", b"role", b"part") == first == open_model(tmp_path).fingerprint()


def test_ids_mean_what_they_do_in_a_file_that_is_made_of_it(tmp_path):
    write_checkpoint(tmp_path)
    write_tokenizer(tmp_path)
    model = open_model(tmp_path)
    table = model.token_table
    assert table["tokenizer.ggml.tokens"][257:260] == ["</s>", "<|im_start|>", "[PAD259]"]
    made = tokenizer_keys(json.loads((tmp_path / "tokenizer.json").read_text()), model.tokenizer, None)
    assert table == {key: made[key] for key in table}


def test_tied_embeddings(tmp_path):
    write_checkpoint(tmp_path, tie_word_embeddings=True)
    assert open_model(tmp_path).config.tied_embeddings
    write_checkpoint(tmp_path)
    assert not open_model(tmp_path).config.tied_embeddings


# Hostile and unsupported.


def rewritten(directory: Path, **changed: np.ndarray | None) -> None:
    tensors = load_file(directory / "model.safetensors") | changed
    save_file({name: array for name, array in tensors.items() if array is not None}, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("qweight", None, "self_attn.q_proj.weight' is missing"),
        ("scales", None, "scales' is missing"),
        ("qweight", np.zeros((8, 64), np.float32), "is of type F32"),
        ("qweight", np.zeros((0, 64), np.int32), "not empty"),
        ("qweight", np.zeros((7, 64), np.int32), "GPTQ|does not fit"),
        ("g_idx", np.full(64, 7, np.int32), "g_idx names group 7, there are 2"),
        ("scales", np.full((2, 64), np.nan, np.float16), r"GPTQ, 4 bits, groups of 32\): a scale is not a finite"),
    ],
)
def test_tensors_that_cannot_be_are_told(part, value, said, tmp_path):
    write_checkpoint(tmp_path, "gptq")
    rewritten(tmp_path, **{f"model.layers.0.self_attn.q_proj.{part}": value})
    with pytest.raises(ModelFileError, match=said) as told:
        whole(open_model(tmp_path).matrix("blk.0.attn_q.weight", (64, 64)))
    assert "model.layers.0.self_attn.q_proj" in str(told.value)


def test_fp8_weights_are_refused_by_name(tmp_path):
    import ml_dtypes

    write_checkpoint(tmp_path)
    rewritten(tmp_path, **{"model.layers.0.mlp.up_proj.weight": np.zeros((96, 64), ml_dtypes.float8_e4m3fn)})
    with pytest.raises(ModelFileError, match=r"up_proj.weight' is of type F8_E4M3"):
        open_model(tmp_path).matrix("blk.0.ffn_up.weight", (96, 64))


def told(directory: Path, else_: str) -> str:
    """The error that opening the model and reading a matrix ends with."""
    try:
        whole(open_model(directory).matrix("blk.0.attn_q.weight", (64, 64)))
    except ModelFileError as error:
        return str(error)
    return else_


@pytest.mark.parametrize("method", METHODS)
def test_tensors_of_other_shapes_are_told(method, tmp_path):
    """Whatever a file says, there is no other error."""
    write_checkpoint(tmp_path, method)
    module = "model.layers.0.self_attn.q_proj"
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.startswith(module)]:
        for shape in [(), (0,), (1,), (2,), (0, 5), (5, 0), (1, 1), (64, 1), (1, 64), (3, 2, 64)]:
            rewritten(tmp_path, **{name: np.zeros(shape, tensors[name].dtype)})
            assert module in told(tmp_path, else_=module)  # one scale or zero point for all is sound
        rewritten(tmp_path, **{name: tensors[name]})


NONSENSE = ([], {}, [128], {"a": 1}, "x", "", -1, 0, 7, 10**30, 1.5, True, None)


@pytest.mark.parametrize("method", METHODS[1:])
def test_nonsense_about_the_quantisation_is_told(method, tmp_path):
    write_checkpoint(tmp_path, method)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    said = config["quantization_config"]
    weights = said.get("config_groups", {}).get("group_0", {}).get("weights", {})
    keys = [*said, "group_size", "q_group_size", "bits", "version", "transform_config", "sparsity_config"]
    changes = [said | {key: value} for key in keys for value in NONSENSE]
    changes += [
        said | {"config_groups": {"a": {"weights": weights | {key: value}}}} for key in weights for value in NONSENSE
    ]
    changes += [said | {"config_groups": {"a": value}} for value in NONSENSE] + [*NONSENSE]
    for changed in changes:
        path.write_text(json.dumps(config | {"quantization_config": changed}))
        assert str(tmp_path) in told(tmp_path, else_=str(tmp_path))  # much of it does not matter


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"architectures": ["PhiForCausalLM"]}, "PhiForCausalLM.*supported: LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None}, "architectures = None"),
        ({"attention_bias": True}, "attention_bias = True: models with biases"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"sliding_window": 128}, "sliding_window = 128 is less than max_position_embeddings = 256"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, expected a whole number from 1 to 1024"),
        ({"num_hidden_layers": 1000}, "num_hidden_layers = 1000, but tensor 'model.layers.999"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1"),
        ({"vocab_size": 289}, r"embed_tokens.weight' has shape \(288, 64\), expected \(289, 64\)"),
        ({"hidden_size": "64"}, "hidden_size = '64', expected a whole number"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 2 is not a multiple of num_key_value_heads = 3"),
        ({"rms_norm_eps": 2}, "rms_norm_eps = 2.0, expected less than 1"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps = 10{79}, expected a positive finite number"),
        ({"rope_theta": 10**400}, r"rope_theta = 10{79}, expected a positive finite number"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e-324}}, "rope_theta = 5e-324, expected 1 to"),
        ({"vocab_size": ["x" * 5_000]}, "vocab_size = 'x{79}, expected a whole number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_type = 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "RoPE key factor is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1e-9}}, "scaling factor 1e-09"),
        ({"rope_parameters": []}, r"rope_parameters = \[\], expected an object"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method = 'bitsandbytes' is not supported"),
        ({"quantization_config": "gptq"}, "config.json: quantization_config = 'gptq', expected an object"),
        (
            {"quantization_config": {"quant_method": "gptq", "group_size": [128]}},
            r"config.json: group_size = \[128\] is not supported; supported: a whole number",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "transform_config": "x"}},
            "config.json: transform_config = 'x' is not supported",
        ),
        ({"quantization_config": {"quant_method": "awq", "version": "gemv"}}, "version = 'gemv'.*supported: gemm"),
        (
            {"quantization_config": {"quant_method": "gptq", "checkpoint_format": "marlin"}},
            "checkpoint_format = 'marlin'",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"a": {"weights": {"type": "float", "num_bits": 8}}},
                }
            },
            "weights of type 'float'",
        ),
    ],
)
def test_configurations_that_are_not_supported_are_told(changed, said, tmp_path):
    write_checkpoint(tmp_path, **changed)
    with pytest.raises(ModelFileError, match=said) as told:
        open_model(tmp_path)
    assert str(tmp_path) in str(told.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_pipes_are_not_waited_for(name, tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelFileError, match=f"{name}: is not a regular file"):
        _ = open_model(tmp_path).chat_template


def test_the_template_named_default_is_taken(tmp_path):
    write_checkpoint(tmp_path)
    write_tokenizer(tmp_path)
    named = [{"name": ["x"], "template": "a"}, "b", {"name": "default", "template": "c"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_model(tmp_path).chat_template.source == "c"


def test_rope_of_both_versions(tmp_path):
    write_checkpoint(tmp_path, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0})
    rope = open_model(tmp_path).config.rope
    assert (rope.theta, rope.scaling_factor, rope.style, rope.dim) == (5e5, 4.0, "half", 32)
    write_checkpoint(tmp_path, rope_theta=None, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    assert open_model(tmp_path).config.rope.theta == 1e6


def llama_3_frequency(frequency: float, factor: float, low: float, high: float, context: int) -> float:
    """As `_compute_llama3_parameters` of transformers, for one pair."""
    length = 2 * math.pi / frequency
    if length < context / high:
        return frequency
    if length > context / low:
        return frequency / factor
    smooth = (context / length - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def test_llama_3_frequencies(tmp_path):
    said = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    write_checkpoint(tmp_path, rope_parameters=said | {"original_max_position_embeddings": 64, "rope_theta": 100.0})
    rope = open_model(tmp_path).config.rope
    plain = 100.0 ** (-2 * np.arange(16) / 32)
    expected = [llama_3_frequency(each, 8.0, 1.0, 4.0, 64) for each in plain.tolist()]
    np.testing.assert_allclose(plain / np.array(rope.frequency_factors), expected, rtol=1e-12)
    assert len(set(rope.frequency_factors)) > 3


def header(directory: Path, raw: bytes) -> None:
    (directory / "model.safetensors").write_bytes(raw)


def entry(**changed: object) -> bytes:
    text = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changed}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(16)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 200_000) + b"[" * 200_000,
        entry()[:-1],
        entry(shape=[-2, -2]),
        entry(shape=[1 << 40, 1 << 40]),
        entry(shape=[2, 3]),
        entry(data_offsets=[0, 1 << 62]),
        entry(data_offsets=[16, 0]),
        entry(dtype="X9"),
        struct.pack("<Q", 133) + (entry()[8:68] + b', "a": ' + entry()[13:68] + b"}").ljust(133) + bytes(16),
    ],
)
def test_damaged_safetensors_are_told(raw, tmp_path):
    write_checkpoint(tmp_path)
    header(tmp_path, raw)
    with pytest.raises(ModelFileError, match=r"model.safetensors: not a whole safetensors file"):
        open_model(tmp_path)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "config.json", 3])
def test_an_index_names_files_beside_it_alone(name, tmp_path):
    write_checkpoint(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelFileError, match=r"index.json: tensor 'a' is said to be in .* not a file beside it"):
        open_model(tmp_path)


def test_files_that_do_not_fit_together_are_told(tmp_path):
    write_checkpoint(tmp_path, shards=2)
    first, second = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    kept = second.read_bytes()
    save_file(load_file(second) | {"lm_head.weight": np.zeros(4)}, second)
    with pytest.raises(ModelFileError, match=r"lm_head.weight' is in another file"):
        open_model(tmp_path)
    save_file({"a": np.zeros(4)}, second)
    with pytest.raises(ModelFileError, match="is in none of the files it names"):
        open_model(tmp_path)
    second.unlink()
    with pytest.raises(ModelFileError, match=r"model-00002-of-00002.safetensors: no such file"):
        open_model(tmp_path)
    second.write_bytes(kept)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelFileError, match="which of these files is the model"):
        open_model(tmp_path)
    first.unlink()
    second.unlink()
    with pytest.raises(ModelFileError, match=r"holds no safetensors file"):
        open_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(
            ModelFileError, match=r"pytorch_model.bin: pickled checkpoints are not read.*save_pretrained"
        ):
            open_model(path)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "nonsense"])
def test_a_config_that_is_no_object_is_told(text, tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"config.json: (cannot be read|holds a list)"):
        open_model(tmp_path)


def test_a_gguf_file_is_a_model_too(tiny):
    model = open_model(tiny)
    assert isinstance(model, GGUFModel)
    assert model.matrix("blk.0.attn_q.weight", (256, 256)).shape == (256, 256)
    assert len(model.vector("output_norm.weight", 256)) == 256
    with pytest.raises(ModelFileError, match=r"'blk.0.attn_q.weight' has shape \(256, 256\), expected \(3, 256\)"):
        model.matrix("blk.0.attn_q.weight", (3, 256))
    with pytest.raises(ModelFileError, match=r"'blk.9.attn_q.weight' is missing"):
        model.matrix("blk.9.attn_q.weight", (256, 256))
