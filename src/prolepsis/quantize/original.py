"""The texts that go beside a model's weights, in either format, made of a model file of either format."""

import json
from collections.abc import Mapping
from typing import Any

from prolepsis.errors import ModelFileError
from prolepsis.model.chat_template import ChatTemplate
from prolepsis.model.checkpoint import CONFIG, Checkpoint
from prolepsis.model.hf_tokenizer import TOKENIZER
from prolepsis.model.model_file import GGUFModel, ModelFile
from prolepsis.model.safetensors_file import read_json
from prolepsis.model.tokenizer_json import tokenizer_config, tokenizer_json
from prolepsis.quantize.config_json import config_json, generation_json
from prolepsis.quantize.gguf_keys import model_keys, tokenizer_keys

_RETYPED = ("general.file_type", "general.quantization_version")
_NOT_OF_THIS = ("quantization_config", "dtype", "torch_dtype")
_COPIED = (
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)

MODEL_FILES = frozenset((*_COPIED, CONFIG, "quantize_config.json", "quant_config.json", "model.safetensors.index.json"))
"""Names of files of a Hugging Face directory, beside those that end in ".safetensors"."""


def checkpoint_files(model: ModelFile) -> Mapping[str, str | bytes]:
    """The files of a Hugging Face directory beside the weights, by name: float16 where those are not quantised.

    Raises ModelFileError for what they cannot say.
    """
    if isinstance(model, Checkpoint):
        paths = {name: model.path / name for name in _COPIED}
        config = {key: value for key, value in read_json(model.path / CONFIG).items() if key not in _NOT_OF_THIS}
        copied = {name: path.read_bytes() for name, path in paths.items() if path.exists()}
        return {**copied, CONFIG: json.dumps({**config, "torch_dtype": "float16"})}
    assert isinstance(model, GGUFModel)
    metadata, tokenizer = model.file.metadata, model.tokenizer
    texts = {
        CONFIG: config_json(model.config, tokenizer),
        "generation_config.json": generation_json(tokenizer),
        "tokenizer_config.json": tokenizer_config(metadata, tokenizer, model.config.max_context),
    }
    files = {name: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for name, value in texts.items()}
    return {**files, TOKENIZER: tokenizer_json(metadata, tokenizer)}


def gguf_metadata(model: ModelFile) -> Mapping[str, Any]:
    """The keys of a GGUF file, but those that tell how it is quantised.

    Raises ModelFileError for what they cannot say.
    """
    if isinstance(model, GGUFModel):
        return {key: value for key, value in model.file.encoded_metadata().items() if key not in _RETYPED}
    assert isinstance(model, Checkpoint)
    values, config = read_json(model.path / TOKENIZER), read_json(model.path / CONFIG)
    keys = model_keys(model.config) | tokenizer_keys(values, model.tokenizer, config.get("eos_token_id"))
    template = _template(model)
    return keys if template is None else keys | {"tokenizer.chat_template": template.source}


def _template(model: ModelFile) -> ChatTemplate | None:
    try:
        return model.chat_template
    except ModelFileError:
        return None
