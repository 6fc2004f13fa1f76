"""A model on disk, whatever its format: the one thing that the engine opens."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from prolepsis.model.chat_template import ChatTemplate
from prolepsis.model.checkpoint import PICKLES, Checkpoint, is_checkpoint, refused_pickle
from prolepsis.model.config import ModelConfig
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.tokenizer import Tokenizer
from prolepsis.quant.matrix import Matrix

_TOKEN_KEYS = ("tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges")


class ModelFile(Protocol):
    """An opened model. Everything here raises ModelFileError for what is missing, damaged or not supported.

    path: of the file or directory. size: bytes of its weights. token_table: what its token ids mean, for comparison
    with another model's, under the names that GGUF metadata has for it; empty where it has no tokenizer.
    """

    @property
    def path(self) -> Path: ...

    @property
    def size(self) -> int: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def has_tokenizer(self) -> bool: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> ChatTemplate: ...

    @property
    def token_table(self) -> dict[str, Any]: ...

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """The matrix [rows, columns] of a GGUF name, such as "blk.0.attn_q.weight"."""
        ...

    def vector(self, name: str, width: int) -> NDArray[np.float32]:
        """The vector of a GGUF name, float32 [width]."""
        ...

    def fingerprint(self) -> str:
        """Hash of weights and configuration alike, 32 hex digits."""
        ...


class GGUFModel:
    """A GGUF file as a model."""

    def __init__(self, file: GGUFFile) -> None:
        """Raises ModelFileError as `ModelConfig.from_gguf`."""
        self.file = file
        self.path = file.path
        self.config = ModelConfig.from_gguf(file)

    @property
    def size(self) -> int:
        """See `GGUFFile.size`."""
        return self.file.size

    @property
    def has_tokenizer(self) -> bool:
        """Whether the file names a tokenizer."""
        return _TOKEN_KEYS[0] in self.file.metadata

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """See `Tokenizer.from_gguf`."""
        return Tokenizer.from_gguf(self.file)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """See `ChatTemplate.from_gguf`."""
        return ChatTemplate.from_gguf(self.file)

    @property
    def token_table(self) -> dict[str, Any]:
        """See `ModelFile`."""
        if "tokenizer.ggml.tokens" not in self.file.metadata:
            return {}
        return {key: self.file.metadata.get(key) for key in _TOKEN_KEYS}

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `ModelFile`."""
        return self.file.matrix(name, shape)

    def vector(self, name: str, width: int) -> NDArray[np.float32]:
        """See `ModelFile`."""
        return self.file.vector(name, width)

    def fingerprint(self) -> str:
        """See `GGUFFile.fingerprint`."""
        return self.file.fingerprint()


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Open the model at `path`: a GGUF file, a directory of a Hugging Face checkpoint, or a safetensors file in one.

    Raises:
        ModelFileError: it is none of these, damaged, or asks for what is not supported; pickled checkpoints are never
            read.
    """
    path = Path(path)
    if path.suffix in PICKLES:
        raise refused_pickle(path)
    return Checkpoint(path) if is_checkpoint(path) else GGUFModel(GGUFFile.open(path))
