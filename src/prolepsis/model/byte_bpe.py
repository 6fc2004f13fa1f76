"""Byte-level BPE (Radford et al. 2019), as GGUF files with `tokenizer.ggml.model = gpt2` describe it.

Text is cut into words by the regular expressions of the model's pre-tokeniser, each byte of a word becomes one
printable character, and characters are merged by rank. The `tokenizers` library does the work; this module
builds it from the file's tokens and merges. Handing it Python objects takes 0.03 s for 49,152 tokens, a JSON
string 0.08 s.

The regular expressions are those the models' authors published in their `tokenizer.json`; "default", which has
none, is the fallback of llama.cpp. Unicode normalisation is left out, as llama.cpp leaves it out: text comes
back as it went in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prolepsis.errors import ModelFileError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


def _llama3(digits: str) -> str:
    """Llama 3's expression; Qwen2's differs only in how many digits make a word."""
    return (
        rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words: each expression cuts further what the ones before it have cut.

    `ignore_merges`: a word that is itself a token is taken whole, merges or not.
    `add_bos`: what a file means that does not say whether to begin with the BOS token.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2_LIKE = PreTokenizer((_GPT2,))
_SMOLLM = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_llama3(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_llama3(r"\p{N}"),))

# The names are those of `tokenizer.ggml.pre`.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_LIKE,
    "phi-2": _GPT2_LIKE,
    "mpt": _GPT2_LIKE,
    "olmo": _GPT2_LIKE,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "codeshell": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": PreTokenizer(_LLAMA3.expressions),
    "smaug-bpe": PreTokenizer(_LLAMA3.expressions),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "stablelm2": _QWEN2,
}


def _byte_alphabet() -> dict[str, str]:
    """The character that stands for each byte -> the character whose code is that byte.

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(0x100 + index): chr(byte) for index, byte in enumerate(others)}
    return stand_ins | {chr(byte): chr(byte) for byte in printable}


_BYTE_OF = _byte_alphabet()
_TO_LATIN1 = str.maketrans(_BYTE_OF)


class ByteLevelBPE:
    """Ids of text without special tokens.

    A byte that has no token of its own in the vocabulary is dropped, as the reference tokenizers do: SmolLM2's
    lacks six control characters and the first bytes of unassigned planes.
    """

    add_space_prefix = False

    def __init__(self, vocabulary: dict[str, int], merges: list[str], pre: PreTokenizer) -> None:
        """Build the tokenizer.

        Raises:
            ModelFileError: a merge is not two tokens of the vocabulary whose joined text is a token.
        """
        self._backend = new_backend(vocabulary, merges, pre)

    def encode(self, text: str) -> list[int]:
        # Of the library's calls, those for batches let other threads run meanwhile.
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def spelled_bytes(self, token: str) -> bytes:
        """The bytes a token's text stands for."""
        return spelled_bytes(token)


def spelled_bytes(token: str) -> bytes:
    """The bytes that the text of a byte-level token stands for.

    A token with a character that stands for no byte (some files have such tokens as plain text) is its UTF-8.
    """
    if all(character in _BYTE_OF for character in token):
        return token.translate(_TO_LATIN1).encode("latin-1")
    return token.encode("utf-8")


def new_backend(vocabulary: dict[str, int], merges: list[str], pre: PreTokenizer) -> Backend:
    """The library's tokenizer: text in, ids out. Raises ModelFileError for a merge that does not fit."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    for merge, (left, right) in zip(merges, pairs, strict=True):
        if not left or not right or " " in right:
            raise ModelFileError(f"tokenizer.ggml.merges: {merge!r:.80} is not two tokens with a space between")
    try:
        model = models.BPE(vocabulary, pairs, ignore_merges=pre.ignore_merges)
    except Exception as error:
        # The library raises bare `Exception` for a merge whose parts or result are not in the vocabulary.
        raise ModelFileError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from None
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend
