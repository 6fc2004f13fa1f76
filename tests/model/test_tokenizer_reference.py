"""Our token ids against those of tokenizers that others wrote.

- `tokenizers` with the small model's own `tokenizer.json`;
- `transformers`, which builds SmolLM2's tokenizer from the same metadata (its conversion leaves out the digit
  splitting of SmolLM2's published pre-tokeniser, which is put back here);
- llama.cpp, for every pre-tokeniser and for the parsing of special tokens, where llama-cpp-python is installed.
"""

import json
import random
from pathlib import Path

import pytest
from gguf_bytes import ARRAY, I32, STRING, U32, gguf, key
from texts import CONTROL_CHARACTERS, HOSTILE

from prolepsis.model.byte_bpe import PRE_TOKENIZERS
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
# Bytes SmolLM2's vocabulary lacks are dropped by all, but llama.cpp does not merge across the gap.
MISSING = {4, 6, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}


def random_texts(count: int, seed: int) -> list[str]:
    """Mixtures of characters on whose class or boundaries pre-tokenisers depend."""
    rng = random.Random(seed)
    alphabet = [chr(code) for code in range(0x250)] + list("".join(HOSTILE.values()))
    alphabet += ["'s", "'LL", "'Re", "  ", "\n\n", "\r\n", " 123", "<|im_end|>", "\u3000", "\u2028"] * 20
    return ["".join(rng.choices(alphabet, k=rng.randint(1, 40))) for _ in range(count)]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [*HOSTILE.values(), *random_texts(500, seed=2)]


def test_small_model_equals_its_tokenizer_json(small, texts):
    from tokenizers import Tokenizer as Reference

    reference = Reference.from_file(str(DATA / "pair" / "tokenizer.json"))
    for text in texts:
        assert small.encode(text, parse_special=True) == reference.encode(text).ids
        assert small.decode(reference.encode(text).ids, skip_special=False) == text


def test_default_model_equals_transformers(smollm, texts):
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(DATA, gguf_file="smollm2-vocab.gguf")
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert smollm.eos_ids >= {reference.eos_token_id}
    for text in texts:
        ids = reference.encode(text)
        assert smollm.encode(text, parse_special=True) == ids
        assert smollm.decode(ids, skip_special=False) == reference.decode(ids, clean_up_tokenization_spaces=False)
        plain = reference.encode(text, split_special_tokens=True)
        assert smollm.encode(text) == plain


def comparable(text: str) -> bool:
    """Whether llama.cpp means the same: case folding also finds "'ſ" in the published expressions, not in its own."""
    return not MISSING & set(text.encode()) and "ſ" not in text


def with_pre_tokenizer(file: GGUFFile, pre: str, path: Path) -> Path:
    """A vocabulary-only GGUF file like `file` with another pre-tokeniser."""
    keys = [key("general.architecture", STRING, "llama"), key("tokenizer.ggml.model", STRING, "gpt2")]
    keys += [key("tokenizer.ggml.pre", STRING, pre), key("tokenizer.ggml.bos_token_id", U32, 1)]
    for name, kind in {"tokens": STRING, "token_type": I32, "merges": STRING}.items():
        keys.append(key(f"tokenizer.ggml.{name}", ARRAY, (kind, file.metadata[f"tokenizer.ggml.{name}"])))
    path.write_bytes(gguf(keys))
    return path


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_equals_llama_cpp(smollm_file, tmp_path, pre, texts):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python (extra `engines`) is not installed")
    path = with_pre_tokenizer(smollm_file, pre, tmp_path / "vocabulary.gguf")
    reference = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    ours = Tokenizer.from_gguf(GGUFFile.open(path))
    for text in filter(comparable, texts):
        for special in (False, True):
            expected = reference.tokenize(text.encode(), add_bos=False, special=special)
            assert ours.encode(text, parse_special=special, add_bos=False) == expected
    assert reference.tokenize(b"hi", add_bos=True) == ours.encode("hi")


# One name for each distinct set of expressions and flags.
@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm", "llama-bpe", "qwen2", "dbrx"])
def test_pre_tokenizers_equal_what_llama_cpp_has_said(smollm_file, tmp_path, pre):
    """The ids llama.cpp (llama-cpp-python 0.3.36) gave for the texts, so that the check needs no llama.cpp."""
    expected = json.loads((DATA / "llama_cpp_ids.json").read_text())[pre]
    ours = Tokenizer.from_gguf(GGUFFile.open(with_pre_tokenizer(smollm_file, pre, tmp_path / "vocabulary.gguf")))
    texts = {name: text for name, text in HOSTILE.items() if comparable(text)}
    assert {name: ours.encode(text, add_bos=False) for name, text in texts.items()} == expected


def test_control_characters_are_not_lost_where_the_vocabulary_has_them(small):
    assert small.decode(small.encode(CONTROL_CHARACTERS)) == CONTROL_CHARACTERS
