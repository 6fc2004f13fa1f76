"""The model that is quantised: weights, tokenizer, and the texts that go beside them, from a file of either format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prolepsis.model.config import ModelConfig
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.tokenizer import Tokenizer
from prolepsis.model.tokenizer_json import tokenizer_config, tokenizer_json
from prolepsis.quantize.config_json import config_json, generation_json
from prolepsis.quantize.source import GGUFSource, Source

_RETYPED = ("general.file_type", "general.quantization_version")


@dataclass(frozen=True)
class Original:
    """path: of the file or directory; weights: by canonical names."""

    path: Path
    file: GGUFFile
    config: ModelConfig
    tokenizer: Tokenizer
    weights: Source

    @staticmethod
    def open(path: Path) -> "Original":
        """The model at `path`. Raises ModelFileError for one that cannot be read."""
        file = GGUFFile.open(path)
        config, tokenizer = ModelConfig.from_gguf(file), Tokenizer.from_gguf(file)
        return Original(path, file, config, tokenizer, GGUFSource(file))

    def fingerprint(self) -> str:
        """Hash of all of it."""
        return self.file.fingerprint()

    def checkpoint_files(self) -> Mapping[str, str | bytes]:
        """The text files of a Hugging Face directory, by name. Raises ModelFileError for what they cannot say."""
        metadata, tokenizer = self.file.metadata, self.tokenizer
        texts = {
            "config.json": config_json(self.config, tokenizer),
            "generation_config.json": generation_json(tokenizer),
            "tokenizer_config.json": tokenizer_config(metadata, tokenizer, self.config.max_context),
        }
        files = {name: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for name, value in texts.items()}
        return {**files, "tokenizer.json": tokenizer_json(metadata, tokenizer)}

    def gguf_metadata(self) -> Mapping[str, Any]:
        """The keys of a GGUF file, but those that tell how it is quantised."""
        return {key: value for key, value in self.file.encoded_metadata().items() if key not in _RETYPED}
