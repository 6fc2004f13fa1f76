"""Hugging Face directories in the layouts of GPTQ and AWQ."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prolepsis.errors import InputError
from prolepsis.kernels.kinds import KINDS
from prolepsis.quant.awq_layout import pack_awq
from prolepsis.quant.gptq_layout import pack_gptq
from prolepsis.quant.matrix import Codes, HeldMatrix, Matrix
from prolepsis.quantize.layouts import Floats, gathered, halves, row_chunks
from prolepsis.quantize.names import checkpoint_name
from prolepsis.quantize.stored import Stored, write_safetensors
from prolepsis.store import replace_file

SHARD_BYTES = 4 << 30

_ROWS = {2: 16, 3: 32, 4: 8, 8: 4}  # rows whose zero points fill words


@dataclass(frozen=True)
class CheckpointLayout:
    """bits, group (0: whole rows), symmetric, act_order: of the codes. method: what made them, "rtn", "gptq" or "awq".
    files: the text files beside the tensors, by name, of which "config.json" gets the quantisation's keys.

    AWQ's own layout has 4 bits only; its matrices of other bits, whose scales are in other tensors all the same, are
    written as GPTQ's. Zero points that vary are written in version 2 of GPTQ's layout, as version 1 cannot say 0.
    """

    bits: int
    group: int
    symmetric: bool
    act_order: bool
    method: str
    files: Mapping[str, str | bytes]

    rope_style = "half"

    @property
    def is_awq(self) -> bool:
        """Whether it is AWQ's own layout."""
        return self.method == "awq" and self.bits == 4

    @property
    def version(self) -> int:
        """Of GPTQ's layout."""
        return 1 if self.symmetric else 2

    def check(self, shapes: dict[str, tuple[int, int]]) -> None:
        """See `Layout`."""
        for part, (rows, _) in shapes.items():
            if rows % _ROWS[self.bits]:
                raise InputError(
                    f"{part} has {rows} rows, which {self.bits} bits need a multiple of {_ROWS[self.bits]} of; choose "
                    "other --bits, or --format gguf"
                )

    def matrix(self, name: str, matrix: HeldMatrix) -> list[Stored]:
        """See `Layout`."""
        (part,) = matrix.parts
        assert isinstance(part, Codes)
        assert part.zeros is not None
        stem = checkpoint_name(name).removesuffix("weight")
        scales = Stored.of(stem + "scales", np.ascontiguousarray(part.scales.T))
        if self.is_awq:
            packed = {"qweight": pack_awq(part.codes), "qzeros": pack_awq(part.zeros)}
            return [*(Stored.of(stem + key, words) for key, words in packed.items()), scales]
        columns = matrix.shape[1]
        group_of = np.arange(columns, dtype=np.int32) // matrix.forms[0].group
        codes = part.codes
        if matrix.order is not None:
            codes = np.empty_like(codes)
            codes[:, matrix.order] = part.codes
            sorted_groups, group_of = group_of, np.empty_like(group_of)
            group_of[matrix.order] = sorted_groups
        words, zeros = pack_gptq(codes, part.zeros, KINDS[matrix.forms[0].kind].bits, self.version)
        named = {"qweight": words, "qzeros": zeros, "g_idx": group_of}
        return [*(Stored.of(stem + key, values) for key, values in named.items()), scales]

    def vector(self, name: str, values: Floats) -> Stored:
        """See `Layout`."""
        return Stored.of(checkpoint_name(name), halves(name, values))

    def embedding(self, name: str, matrix: Matrix) -> Stored:
        """See `Layout`."""
        return Stored.of(checkpoint_name(name), gathered(row_chunks(matrix), lambda rows: halves(name, rows)))

    def write(self, place: Path, tensors: Sequence[Stored]) -> None:
        """See `Layout`."""
        place.mkdir()
        shards = _shards(tensors)
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        if len(shards) == 1:
            names = ["model.safetensors"]
        for name, shard in zip(names, shards, strict=True):
            with replace_file(place / name) as file:
                write_safetensors(file, shard)
        files = dict(self.files)
        if len(shards) > 1:
            where = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            total = sum(tensor.nbytes for tensor in tensors)
            files["model.safetensors.index.json"] = _text({"metadata": {"total_size": total}, "weight_map": where})
        config = json.loads(files["config.json"])
        files["config.json"] = _text({**config, "quantization_config": self.quantization_config()})
        files["quantize_config.json"] = _text(self.quantization_config())
        for name, text in files.items():
            with replace_file(place / name) as file:
                file.write(text.encode() if isinstance(text, str) else text)

    def quantization_config(self) -> dict[str, Any]:
        """What `transformers`, vLLM and GPTQModel want to know."""
        group = self.group or -1
        if self.is_awq:
            return {
                "quant_method": "awq",
                "bits": self.bits,
                "group_size": group,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": None,
            }
        form = "gptq" if self.version == 1 else "gptq_v2"
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": group,
            "desc_act": self.act_order and self.method == "gptq",
            "sym": self.symmetric,
            "lm_head": False,
            "checkpoint_format": form,
            "pack_dtype": "int32",
            "true_sequential": True,
        }


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _shards(tensors: Sequence[Stored]) -> list[list[Stored]]:
    """Tensors in their order, of not much more than `SHARD_BYTES` together."""
    shards: list[list[Stored]] = [[]]
    size = 0
    for tensor in tensors:
        if size + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards
