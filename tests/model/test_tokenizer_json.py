"""`tokenizer.json` made of a GGUF file: the library's ids and texts are ours."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, Tokenizer, from_metadata
from prolepsis.model.tokenizer_json import tokenizer_config, tokenizer_json

TEXT = "It's 42 naïve cats — 你好 🎉!\n\n  def f(x):\n\treturn x  # <|im_end|> done"
DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("file", ["smollm2-vocab.gguf", "gguf/F16.gguf"])
def test_byte_level_tokenizers_give_the_same_ids(file: str) -> None:
    source = GGUFFile.open(DATA / file)
    ours = Tokenizer.from_gguf(source)
    theirs = Backend.from_str(tokenizer_json(source.metadata, ours))
    ids = theirs.encode(TEXT).ids
    assert ids == ours.encode(TEXT, parse_special=True)
    assert theirs.decode(ids, skip_special_tokens=False) == TEXT


def sentencepiece() -> dict[str, Any]:
    """Metadata of a small vocabulary with all bytes, whose scores differ from each other."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = [*"▁abcdehlnorstw.", "▁t", "he", "▁the", "lo", "hel", "▁a", "an", "▁an", "▁b", "or", "wor", "▁w"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_tokenizers_give_the_same_ids() -> None:
    metadata = sentencepiece()
    ours = from_metadata(metadata)
    theirs = Backend.from_str(tokenizer_json(metadata, ours))
    for text in ("the hello and  word", "an other b world.", "tab\tand é", " lead", "a"):
        ids = theirs.encode(text).ids
        assert ids == ours.encode(text), text
        assert theirs.decode(ids) == ours.decode(ids) == text


def test_the_configuration_names_roles_and_template() -> None:
    metadata = sentencepiece() | {"tokenizer.chat_template": "{{ messages }}"}
    config = tokenizer_config(metadata, from_metadata(metadata), 512)
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
    assert config["chat_template"] == "{{ messages }}"
    assert config["model_max_length"] == 512
