"""Models of every type of weights that GGUF has: their logits are those of the same numbers in float32."""

import json

import gguf
import numpy as np
import pytest
from decoding import DATA, Session, kl_divergence

from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.gguf_writer import TensorEntry, write_gguf
from prolepsis.quant.gguf_types import WORDS, block_size, encoded, readable_types
from prolepsis.quant.rounding import ROUNDED, rounded_codes

TYPES = [name for name in readable_types() if name not in WORDS]
IDS = json.loads((DATA / "ids.json").read_text())


def as_type(type_name, values):
    """uint8 [rows, bytes]: rounded where there is a quantiser, else random vectors of the same standard deviation."""
    if type_name in ROUNDED:
        return encoded(type_name, rounded_codes(type_name, values))
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name in ("TQ1_0", "TQ2_0", "MXFP4"):
        return gguf.quants.quantize(values, kind)
    per_block, size = block_size(type_name)
    blocks = np.random.default_rng(0).integers(0, 256, (values.size // per_block, size), dtype=np.uint8)
    set_scale(type_name, blocks, 1)
    set_scale(type_name, blocks, values.std() / gguf.quants.dequantize(blocks, kind).std())
    return blocks.reshape(len(values), -1)


def set_scale(type_name, blocks, scale):
    half = np.float16(scale).view(np.uint16)
    if type_name == "IQ1_M":  # a nibble in each of four words
        words = blocks[:, 48:].copy().view("<u2") & 0x0FFF
        nibbles = half >> np.arange(0, 16, 4, dtype=np.uint16) << 12
        blocks[:, 48:] = (words | nibbles).astype("<u2").view(np.uint8)
    else:
        blocks[:, :2] = np.array([half], "<u2").view(np.uint8)


def distance(tmp_path, type_of):
    """KL of the logits of weights in float32 to those of the same weights as `type_of` a matrix's number."""
    original = GGUFFile.open(DATA / "F32.gguf")
    packed, plain = [], []
    matrices = [name for name, tensor in original.tensors.items() if len(tensor.shape) == 2]
    for name, tensor in original.tensors.items():
        entry = TensorEntry(name, tensor.shape, tensor.type_name, [tensor.data])
        if name not in matrices:
            packed.append(entry)
            plain.append(entry)
            continue
        type_name = type_of(matrices.index(name))
        raw = as_type(type_name, tensor.data.view(np.float32).reshape(tensor.shape))
        numbers = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])
        packed.append(entry._replace(type_name=type_name, chunks=[raw]))
        plain.append(entry._replace(chunks=[numbers]))
    logits = []
    for i, tensors in enumerate((plain, packed)):
        with (tmp_path / f"{i}.gguf").open("wb") as file:
            write_gguf(file, original.encoded_metadata(), tensors)
        logits.append(Session(GGUFFile.open(tmp_path / f"{i}.gguf")).in_chunks(IDS, [256]))
    return kl_divergence(*logits).mean()


@pytest.mark.nightly
@pytest.mark.parametrize("type_name", TYPES)
def test_models_of_one_type(tmp_path, type_name):
    assert distance(tmp_path, lambda matrix: type_name) < 1e-6


@pytest.mark.parametrize("first", range(0, len(TYPES), 8))
def test_models_of_many_types(tmp_path, first):
    assert distance(tmp_path, lambda matrix: TYPES[(first + matrix) % len(TYPES)]) < 1e-6
