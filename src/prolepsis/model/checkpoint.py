"""Hugging Face checkpoints: a directory with config.json, tokenizer.json and safetensors files, as a model."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import ModelFileError
from prolepsis.model.chat_template import ChatTemplate
from prolepsis.model.checkpoint_weights import CheckpointWeights, Quantization
from prolepsis.model.config import ModelConfig
from prolepsis.model.gguf_file import FINGERPRINT_CHUNK
from prolepsis.model.hf_config import config_from_hf, require_shapes
from prolepsis.model.hf_tokenizer import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    HFTokenizer,
    load_tokenizer,
    token_text,
    tokenizer_settings,
)
from prolepsis.model.safetensors_file import check_index, open_tensors, read_json, read_small, regular_size, shard_files
from prolepsis.quant.matrix import Matrix

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
# Where tools that came before config.json's quantization_config wrote it, and what they meant.
_OLD_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_TEMPLATE = "chat_template.jinja"
_WEIGHTS, _INDEX = "model.safetensors", "*.safetensors.index.json"
_PART = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
_OTHER = ("consolidated", "adapter_model")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
MAX_TEMPLATE_BYTES = 1 << 20


class Checkpoint:
    """An opened checkpoint. Its files are mapped, and the maps live as long as this object does.

    Attributes:
        path: the directory.
        files: its safetensors files, in order.
    """

    def __init__(self, path: Path) -> None:
        """Open the checkpoint in the directory `path`, or the one that a safetensors file `path` belongs to.

        Raises:
            ModelFileError: a file is missing, damaged, inconsistent, or asks for what is not supported.
        """
        chosen = path if path.is_file() else None
        self.path = path.parent if chosen else path
        values = read_json(self.path / CONFIG)
        self.config: ModelConfig = config_from_hf(self.path / CONFIG, values)
        self._values = values
        quantization = Quantization(*self._quantization())
        index, self.files = _weight_files(self.path, chosen)
        tensors = open_tensors(self.files)
        if index is not None:
            check_index(index, tensors)
        require_shapes(self.config, self.path, {name: tensor.shape for name, tensor in tensors.items()})
        self._weights = CheckpointWeights(self.path, tensors, self.config, quantization)

    @property
    def size(self) -> int:
        """Bytes of all weights."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer.json."""
        return (self.path / TOKENIZER).exists()

    @cached_property
    def tokenizer(self) -> HFTokenizer:
        """The tokenizer. Raises ModelFileError where there is none that is supported."""
        path = self.path / GENERATION_CONFIG
        eos: list[Any] = []
        for values in (self._values, read_json(path) if path.exists() else {}):
            said = values.get("eos_token_id")
            eos += said if isinstance(said, list) else [said]
        roles = {"bos_token_id": self._values.get("bos_token_id"), "eos_token_id": eos}
        return load_tokenizer(self.path, self.config.vocab_size, roles)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template. Raises ModelFileError where there is none, and none can be assumed."""
        settings = tokenizer_settings(self.path)
        bos, eos = token_text(settings, "bos_token"), token_text(settings, "eos_token")
        return ChatTemplate.of(self._template(settings), str(self.path), self.tokenizer.special_tokens, bos, eos)

    @property
    def token_table(self) -> dict[str, Any]:
        """See `ModelFile.token_table`."""
        if not self.has_tokenizer:
            return {}
        # Converters give ids without a token this name.
        tokens = [token or f"[PAD{index}]" for index, token in enumerate(self.tokenizer.tokens)]
        table: dict[str, Any] = {"tokenizer.ggml.tokens": tokens}
        if self.tokenizer.byte_level:
            merges = read_json(self.path / TOKENIZER)["model"]["merges"]
            table["tokenizer.ggml.merges"] = [each if isinstance(each, str) else " ".join(each) for each in merges]
        return table

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `CheckpointWeights.matrix`."""
        return self._weights.matrix(name, shape)

    def vector(self, name: str, width: int) -> NDArray[np.float32]:
        """See `CheckpointWeights.vector`."""
        return self._weights.vector(name, width)

    def fingerprint(self) -> str:
        """xxh3-128 of config.json, the quantisation's configuration, tokenizer.json and all weights, 32 hex digits.

        Reads every byte. The chat template, generation_config.json and tokenizer_config.json are not part of it, as no
        K or V depends on them.
        """
        import xxhash

        digest = xxhash.xxh3_128()
        for path in (*(self.path / name for name in (CONFIG, *_OLD_CONFIGS, TOKENIZER)), *self.files):
            if not path.exists():
                continue
            digest.update(f"{path.name}\0{regular_size(path)}\0".encode())
            with path.open("rb") as file:
                while chunk := file.read(FINGERPRINT_CHUNK):
                    digest.update(chunk)
        return digest.hexdigest()

    def _quantization(self) -> tuple[Path, dict[str, Any]]:
        """The file that describes the quantisation, and what it says."""
        found = self._values.get("quantization_config")
        if isinstance(found, dict):
            return self.path / CONFIG, found
        if found is not None:
            raise ModelFileError(f"{self.path / CONFIG}: quantization_config = {found!r:.80}, expected an object")
        for name, method in _OLD_CONFIGS.items():
            if (path := self.path / name).exists():
                return path, {"quant_method": method} | read_json(path)
        return self.path / CONFIG, {}

    def _template(self, settings: dict[str, Any]) -> Any:
        path = self.path / _TEMPLATE
        if path.exists():
            return read_small(path, MAX_TEMPLATE_BYTES).decode("utf-8", "replace")
        found = settings.get("chat_template")
        if isinstance(found, list):
            named = (each for each in found if isinstance(each, dict) and each.get("name") == "default")
            return next(named, {}).get("template")
        return found


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is meant as a checkpoint: a directory, or a safetensors file."""
    return path.is_dir() or path.suffix == ".safetensors"


def files_of(names: list[str], chosen: str = "") -> list[str]:
    """Those of a directory's files that a checkpoint needs, `chosen` for the weights if it is one of several."""
    configs = (CONFIG, GENERATION_CONFIG, *_OLD_CONFIGS, TOKENIZER, TOKENIZER_CONFIG, _TEMPLATE)
    whole = chosen if chosen and not _PART.search(chosen) else _WEIGHTS
    if whole in names:
        return [name for name in names if name in configs or name == whole]
    weights = [name for name in names if name.endswith((".safetensors", _INDEX[1:])) and not name.startswith(_OTHER)]
    return [name for name in names if name in configs or name in weights]


def _weight_files(directory: Path, chosen: Path | None) -> tuple[Path | None, list[Path]]:
    """The index, if there is one, and the safetensors files of the model in a directory."""
    if chosen is not None and not _PART.search(chosen.name):
        return None, [chosen]
    whole = directory / _WEIGHTS
    if whole.exists():
        return None, [whole]
    indices = sorted(directory.glob(_INDEX))
    if len(indices) == 1:
        return indices[0], shard_files(indices[0])
    found = sorted(file for file in directory.glob("*.safetensors") if not file.name.startswith(_OTHER))
    if not found:
        raise _without_weights(directory)
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:8])
        raise ModelFileError(f"{directory}: which of these files is the model ({names})? Give the path of one of them")
    return None, found


def _without_weights(directory: Path) -> ModelFileError:
    pickles = [file.name for file in sorted(directory.iterdir()) if file.suffix in PICKLES]
    if pickles:
        return refused_pickle(directory / pickles[0])
    return ModelFileError(f"{directory}: holds no safetensors file; download the model again")


def refused_pickle(path: Path) -> ModelFileError:
    """The error for a checkpoint whose format can run code."""
    return ModelFileError(
        f"{path}: pickled checkpoints are not read, since they can run any code; convert it where you trust it: "
        "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) with transformers writes safetensors"
    )
