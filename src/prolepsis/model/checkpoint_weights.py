"""Weights of a Hugging Face checkpoint by their GGUF names, whatever packs them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import ModelFileError
from prolepsis.model.config import ModelConfig
from prolepsis.model.safetensors_file import FLOATS, Tensor
from prolepsis.quant.awq_layout import awq_matrix
from prolepsis.quant.compressed_tensors import int8_matrix, packed_matrix, words_of
from prolepsis.quant.exl2_layout import Exl2Matrix, Exl2Tensors
from prolepsis.quant.gptq_layout import GptqTensors, gptq_matrix
from prolepsis.quant.matrix import Form, HeldMatrix, Matrix, RowsOf, Words

TOP = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Layers that some exporters write as one, in this order.
_FUSED = {"self_attn.qkv_proj": ("attn_q", "attn_k", "attn_v"), "mlp.gate_up_proj": ("ffn_gate", "ffn_up")}
_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight|(\w+)\.weight")
_HEAD = "lm_head"
_SCHEMES = {"qweight": "GPTQ or AWQ", "q_weight": "EXL2", "weight_packed": "compressed-tensors"}


class Quantization:
    """What `quantization_config` (or quantize_config.json) says, as far as tensors do not say it themselves."""

    METHODS = ("gptq", "awq", "exl2", "compressed-tensors")

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        """`values`: what the file `path` says.

        Raises ModelFileError for a method, or a layout of one, that is not supported, and values of a wrong type.
        """
        self.path = path
        self.method = values.get("quant_method") or values.get("method") or ("gptq" if values else None)
        self._values = values
        if self.method is not None and self.method not in self.METHODS:
            raise self._fail("quant_method", self.method, ", ".join(self.METHODS))
        if self.method == "gptq":
            layout = values.get("checkpoint_format", "gptq")
            if layout not in ("gptq", "gptq_v2") or values.get("is_marlin_format"):
                raise self._fail("checkpoint_format", layout, "gptq, gptq_v2")
            self.version = 2 if layout == "gptq_v2" else 1
        if self.method == "awq" and str(values.get("version", "gemm")).lower() != "gemm":
            raise self._fail("version", values["version"], "gemm")
        if self.method == "compressed-tensors":
            self._check_compressed()
        self._group_sizes = self._numbers("group_size", "q_group_size")
        self.bits: tuple[int, ...] = tuple(bits for bits in self._numbers("num_bits") if bits is not None)
        """Of codes in "pack-quantized" layers: any of these."""

    def group(self) -> int | None:
        """Columns that share a scale, -1 for all; None where nothing is said, or not one thing for all layers."""
        return (self._group_sizes[0] or None) if len(set(self._group_sizes)) == 1 else None

    def _numbers(self, *keys: str) -> list[int | None]:
        """What each part says under the first of `keys` that it has."""
        found = [next(((key, part[key]) for key in keys if key in part), (keys[0], None)) for part in self._parts()]
        for key, value in found:
            if value is not None and type(value) is not int:
                raise self._fail(key, value, "a whole number")
        return [value for _, value in found]

    def _parts(self) -> list[dict[str, Any]]:
        if self.method != "compressed-tensors":
            return [self._values]
        groups = self._values.get("config_groups")
        found = [part.get("weights") for part in groups.values() if isinstance(part, dict)] if groups else []
        return [part for part in found if isinstance(part, dict)]

    def _check_compressed(self) -> None:
        if not isinstance(self._values.get("config_groups", {}), dict):
            raise self._fail("config_groups", self._values["config_groups"], "an object")
        for key in ("transform_config", "sparsity_config"):
            part = self._values.get(key)
            if part and not (isinstance(part, dict) and part.get("format") == "dense"):
                raise self._fail(key, part, "none, or of format dense")
        for part in self._parts():
            if part.get("type", "int") != "int" or part.get("strategy", "group") not in ("group", "channel", "tensor"):
                raise ModelFileError(
                    f"{self.path}: compressed-tensors weights of type {part.get('type')!r:.40} by "
                    f"{part.get('strategy')!r:.40} are not supported; supported: int by group, channel or tensor"
                )

    def _fail(self, key: str, value: Any, supported: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {key} = {value!r:.80} is not supported; supported: {supported}")


class CheckpointWeights:
    """The matrices and vectors of a checkpoint."""

    def __init__(self, path: Path, tensors: dict[str, Tensor], config: ModelConfig, quantization: Quantization) -> None:
        self.path = path
        self._tensors = tensors
        self._quantization = quantization
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._heights = {"attn_q": query, "attn_k": key, "attn_v": key}
        self._heights |= {"ffn_gate": config.intermediate_size, "ffn_up": config.intermediate_size}

    def vector(self, name: str, width: int) -> NDArray[np.float32]:
        """A norm's gains, float32 [width], by its GGUF name. Raises ModelFileError where it is not so."""
        tensor = self._tensor(f"{self._module(name)[0]}.weight", FLOATS)
        if tensor.shape != (width,):
            raise self._fail(name, f"has shape {tensor.shape}, expected ({width},)")
        return tensor.floats().astype(np.float32)

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """A matrix [rows, columns] by its GGUF name.

        Raises:
            ModelFileError: it is missing, of another shape, or packed in a way that is not supported.
        """
        module, (first, height) = self._module(name)
        self._refuse_bias(module)
        rows, columns = shape
        matrix = self._packed(module, columns)
        padded = module == _HEAD and matrix.shape[0] > rows
        whole = height or rows
        if matrix.shape != (whole, columns) and not (padded and matrix.shape[1] == columns):
            raise self._fail(module, f"has shape {matrix.shape}, expected {(whole, columns)}")
        return RowsOf(matrix, np.arange(first, first + rows)) if padded or height else matrix

    def _module(self, name: str) -> tuple[str, tuple[int, int]]:
        """Module of a GGUF name; and where it is one of several in a module, its first row and the rows of all."""
        match = _NAME.fullmatch(name)
        part = match and (match[2] or match[3])
        if match is None or part not in (TOP if match[1] is None else LAYER):
            raise ValueError(f"{name!r} names no weight of this model")
        if match[1] is None:
            return TOP[str(part)], (0, 0)
        prefix = f"model.layers.{match[1]}."
        for fused, parts in _FUSED.items():
            if part in parts and self._has(prefix + fused):
                heights = [self._heights[each] for each in parts]
                return prefix + fused, (sum(heights[: parts.index(str(part))]), sum(heights))
        return prefix + LAYER[str(part)], (0, 0)

    def _has(self, module: str) -> bool:
        return any(f"{module}.{part}" in self._tensors for part in ("weight", *_SCHEMES))

    def _packed(self, module: str, columns: int) -> Matrix:
        name = f"{self.path}: {module}"
        if f"{module}.q_weight" in self._tensors:
            return Exl2Matrix(name, self._exl2(module), columns)
        if f"{module}.qweight" in self._tensors:
            group, zeros = self._quantization.group(), self._ints(f"{module}.qzeros")
            qweight, scales = self._int32(f"{module}.qweight"), self._scales(f"{module}.scales")
            if self._quantization.method == "awq":
                return awq_matrix(name, qweight, zeros, scales, group)
            if self._quantization.method == "gptq":
                parts = GptqTensors(qweight, zeros, scales, self._ints(f"{module}.g_idx"))
                return gptq_matrix(name, parts, columns, group, self._quantization.version)
            raise self._fail(module, "has packed codes, but config.json has no quantization_config that says of what")
        if f"{module}.weight_packed" in self._tensors:
            return self._compressed(name, module, columns)
        tensor = self._tensor(f"{module}.weight", (*FLOATS, "I8"))
        assert tensor.data is not None
        if len(tensor.shape) != 2 or not all(tensor.shape):
            raise self._fail(module, f"has shape {tensor.shape}, expected 2 dimensions that are not empty")
        if tensor.dtype == "I8":
            points = self._ints(f"{module}.weight_zero_point", ("I8",))
            group = self._quantization.group()
            return int8_matrix(name, tensor.data, self._scales(f"{module}.weight_scale"), points, group)
        words: Words = tensor.data.view(np.uint32) if tensor.dtype == "F32" else tensor.data.view(np.uint16)
        return HeldMatrix(tensor.shape, (Form(tensor.dtype, words.shape[1]),), (words,))

    def _compressed(self, name: str, module: str, columns: int) -> Matrix:
        packed = self._int32(f"{module}.weight_packed")
        fitting = {bits for bits in self._quantization.bits if 2 <= bits <= 8} or {4, 8}
        fitting = {bits for bits in fitting if packed.shape[1] in words_of(columns, bits)}
        if len(fitting) != 1:
            raise self._fail(module, f"has {packed.shape[1]} words for {columns} columns, which fits no number of bits")
        return packed_matrix(
            name,
            packed,
            fitting.pop(),
            columns,
            self._scales(f"{module}.weight_scale"),
            self._ints(f"{module}.weight_zero_point", ("I32", "I8")),
            self._ints(f"{module}.weight_g_idx"),
            self._quantization.group(),
        )

    def _exl2(self, module: str) -> Exl2Tensors:
        groups, maximum = self._ints(f"{module}.q_groups", ("I16",)), self._ints(f"{module}.q_scale_max", ("F16",))
        if groups is None or maximum is None or groups.ndim != 1:
            raise self._fail(f"{module}.q_groups", "or q_scale_max is missing")
        return Exl2Tensors(
            self._int32(f"{module}.q_weight"),
            groups,
            self._int32(f"{module}.q_scale"),
            maximum,
            self._int32(f"{module}.q_invperm", 1),
        )

    def _refuse_bias(self, module: str) -> None:
        """Some tools write biases of zeros for layers that have none."""
        bias = self._tensors.get(f"{module}.bias")
        if bias is not None and (bias.data is None or bias.data.any()):
            raise self._fail(module, "has a bias, which is not supported")

    def _ints(self, name: str, dtypes: tuple[str, ...] = ("I32",)) -> NDArray[Any] | None:
        return self._tensor(name, dtypes).data if name in self._tensors else None

    def _int32(self, name: str, dimensions: int = 2) -> NDArray[np.int32]:
        tensor = self._tensor(name, ("I32",))
        if len(tensor.shape) != dimensions or not all(tensor.shape):
            raise self._fail(name, f"has shape {tensor.shape}, expected {dimensions} dimensions that are not empty")
        assert tensor.data is not None
        return tensor.data

    def _scales(self, name: str) -> NDArray[np.float16] | NDArray[np.float32]:
        return self._tensor(name, FLOATS).floats()

    def _tensor(self, name: str, dtypes: tuple[str, ...]) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self._fail(name, "is missing")
        if tensor.dtype not in dtypes or tensor.data is None:
            raise self._fail(
                name, f"is of type {tensor.dtype}, which is not supported; supported here: {', '.join(dtypes)}"
            )
        return tensor

    def _fail(self, name: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: tensor {name!r} {problem}")
