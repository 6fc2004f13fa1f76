"""Text to token ids and back, built from a GGUF file's own metadata.

Special tokens are handled here, the text between them by `byte_bpe` or `sentencepiece_bpe`. Two kinds of tokens
are matched as whole strings before anything else: *user-defined* ones always, *control* ones (end of turn and the
like) only where the caller asks for it with `parse_special`, so that text which merely spells one stays text.
Where several match, the leftmost wins, then the longest.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Any, Protocol

from prolepsis.errors import ContextLengthError, InputError, ModelFileError
from prolepsis.model.byte_bpe import PRE_TOKENIZERS, ByteLevelBPE
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.sentencepiece_bpe import SentencePieceBPE

# Values of `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

# Control tokens that end a turn or a text, whichever of them the file declares as its EOS.
ENDING_TEXTS = frozenset(
    ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "</s>", "<EOT>")
)
_ENDING_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class TextModel(Protocol):
    """Encodes text that holds no special tokens; `add_space_prefix`: it puts a space before every text."""

    add_space_prefix: bool

    def encode(self, text: str) -> list[int]: ...

    def spelled_bytes(self, token: str) -> bytes: ...


class StreamDecoder:
    """Turns ids into text one at a time; a character appears once its last byte is there, never in part.

    The pieces of `push` and `finish` joined are exactly `Tokenizer.decode` of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._drop_space = tokenizer.add_space_prefix
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; may be empty."""
        new = self._tokenizer.decoded_bytes(token_id, self._skip_special)
        if self._drop_space and new:
            self._drop_space = False
            new = new.removeprefix(b" ")
        return self._utf8.decode(new)

    def finish(self) -> str:
        """U+FFFD if the ids ended inside a character, else an empty string."""
        return self._utf8.decode(b"", final=True)


class Tokenizer:
    """The tokenizer of one model.

    Attributes:
        tokens: text of each, in the vocabulary's own spelling.
        vocab_size: number of tokens in the file; ids run from 0 to `vocab_size - 1`.
        bos_id: id of the token that begins a text, or None.
        eos_ids: ids that end generation; may be empty.
        special_tokens: text -> id of the control tokens.
        add_bos: whether `encode` puts `bos_id` first unless told otherwise.
        add_space_prefix: whether `encode` puts a space before a text, and `decode` takes one away.
    """

    def __init__(
        self,
        tokens: list[str],
        types: list[int],
        model: TextModel,
        *,
        bos_id: int | None,
        eos_ids: frozenset[int],
        add_bos: bool,
    ) -> None:
        self.vocab_size = len(tokens)
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.add_bos = add_bos
        self.add_space_prefix = model.add_space_prefix
        self.tokens = tokens
        self._longest = max(map(len, tokens), default=0)  # the spelling is never shorter than what it stands for
        self._model = model
        kinds = {index: kind for index, kind in enumerate(types) if kind != NORMAL and tokens[index]}
        self.special_tokens = {tokens[i]: i for i, kind in kinds.items() if kind in (CONTROL, UNKNOWN)}
        self._user_defined = {tokens[i]: i for i, kind in kinds.items() if kind == USER_DEFINED}
        self._literal_ids = frozenset((*self.special_tokens.values(), *self._user_defined.values()))
        self._special_ids = frozenset(self.special_tokens.values())
        self._any_user_defined = _matcher(self._user_defined)
        self._any_special = _matcher(self._user_defined | self.special_tokens)

    @staticmethod
    def from_gguf(file: GGUFFile) -> Tokenizer:
        """Build the tokenizer that `file` describes.

        Raises:
            ModelFileError: the file has no tokenizer, or one of a kind or with a pre-tokeniser that is not
                supported (named, with what is), or its tokenizer metadata contradicts itself.
        """
        try:
            return from_metadata(file.metadata)
        except ModelFileError as error:
            raise ModelFileError(f"{file.path}: {error}") from None

    def encode(
        self, text: str, *, parse_special: bool = False, add_bos: bool | None = None, continues: bool = False
    ) -> list[int]:
        """Token ids of `text`.

        `parse_special`: text that spells a control token becomes that token; without it, it stays text.
        `add_bos`: put the BOS token first; None does what the model file says.
        `continues`: the text follows a control token, so it is not the beginning of a text.

        Raises:
            InputError: `text` has an unpaired surrogate, or a BOS is asked for and the model has none.
        """
        ids: list[int] = []
        if self.add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise InputError("add_bos was asked for, but the model has no BOS token")
            ids.append(self.bos_id)
        require_encodable(text)
        return ids + self._text_ids(text, parse_special, continues)

    def require_at_most(self, max_tokens: int, text: str) -> None:
        """Raise ContextLengthError, long before `encode` were done, for a text that so many tokens cannot spell."""
        if len(text) > max_tokens * self._longest:
            raise ContextLengthError(
                f"the text has {len(text)} characters, but {max_tokens} tokens, all that the context holds, spell at "
                f"most {max_tokens * self._longest}: shorten it"
            )

    def _text_ids(self, text: str, parse_special: bool, continues: bool) -> list[int]:
        ids: list[int] = []
        for part in self.split_special(text, parse_special=parse_special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._model.encode(part)
        return ids

    def split_special(self, text: str, *, parse_special: bool) -> Iterable[str | int]:
        """The parts of `text` in order: ids of tokens matched as whole strings, and the text between them.

        Raises:
            InputError: `text` has an unpaired surrogate.
        """
        require_encodable(text)
        matcher = self._any_special if parse_special else self._any_user_defined
        if matcher is None:
            return [text] if text else []
        parts: list[str | int] = []
        for index, part in enumerate(matcher.split(text)):
            if index % 2:
                parts.append(self._id_of_literal(part))
            elif part:
                parts.append(part)
        return parts

    def _id_of_literal(self, text: str) -> int:
        found = self.special_tokens.get(text)
        return self._user_defined[text] if found is None else found

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes token `token_id` stands for; a special token's are its name in UTF-8.

        Raises:
            InputError: `token_id` is not in the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise InputError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        token = self.tokens[token_id]
        return token.encode("utf-8") if token_id in self._literal_ids else self._model.spelled_bytes(token)

    def decoded_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """What `token_id` adds to decoded text: `token_bytes`, or nothing for a skipped special token."""
        if skip_special and token_id in self._special_ids:
            return b""
        return self.token_bytes(token_id)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Raises:
            InputError: an id is not in the vocabulary.
        """
        joined = b"".join(self.decoded_bytes(i, skip_special) for i in ids)
        return (joined.removeprefix(b" ") if self.add_space_prefix else joined).decode("utf-8", "replace")

    def stream(self, *, skip_special: bool = True) -> StreamDecoder:
        """A decoder for ids that arrive one at a time."""
        return StreamDecoder(self, skip_special)


def require_encodable(text: str) -> None:
    """Raise InputError for text with an unpaired surrogate, which no UTF-8 can say."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text cannot be encoded: unpaired surrogate U+{ord(text[error.start]):04X} at position {error.start}"
        ) from None


def _matcher(literals: Iterable[str]) -> re.Pattern[str] | None:
    """One group that matches any of `literals`, the longest where several begin at a place."""
    ordered = sorted(literals, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None


def from_metadata(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describe. Raises ModelFileError as `Tokenizer.from_gguf`."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind in ("none", "no_vocab"):
        raise ModelFileError("the file holds no tokenizer (tokenizer.ggml.model); give token ids instead of text")
    if kind not in ("gpt2", "llama"):
        raise ModelFileError(f"tokenizer.ggml.model = {kind!r:.80} is not supported; supported: gpt2, llama")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise ModelFileError(f"tokenizer.ggml.tokens has {twice!r:.80} twice")
    types = _types(metadata, tokens)
    model, add_bos = (_byte_level if kind == "gpt2" else _sentencepiece)(metadata, vocabulary, types)
    return Tokenizer(
        tokens,
        types,
        model,
        bos_id=_token_id(metadata, "bos_token_id", len(tokens)),
        eos_ids=_eos_ids(metadata, vocabulary, types),
        add_bos=_flag(metadata, "tokenizer.ggml.add_bos_token", add_bos),
    )


def _byte_level(metadata: dict[str, Any], vocabulary: dict[str, int], types: list[int]) -> tuple[TextModel, bool]:
    """The text model of a "gpt2" file, and whether such a file means a BOS unless it says otherwise."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ModelFileError(
            f"tokenizer.ggml.pre = {name!r:.80} is not supported; supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    pre = PRE_TOKENIZERS[name]
    return ByteLevelBPE(vocabulary, _strings(metadata, "tokenizer.ggml.merges"), pre), pre.add_bos


def _sentencepiece(metadata: dict[str, Any], vocabulary: dict[str, int], types: list[int]) -> tuple[TextModel, bool]:
    """As `_byte_level`, for a "llama" file."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(types) or type(scores[0]) is not float:
        raise ModelFileError(f"tokenizer.ggml.scores does not give one number for each of {len(types)} tokens")
    model = SentencePieceBPE(
        {token: i for token, i in vocabulary.items() if types[i] in (NORMAL, USER_DEFINED)},
        scores,
        {token: i for token, i in vocabulary.items() if types[i] == BYTE},
        _token_id(metadata, "unknown_token_id", len(types)),
        _flag(metadata, "tokenizer.ggml.add_space_prefix", True),
    )
    return model, True


def _strings(metadata: dict[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelFileError(f"metadata key {key} is missing or not a list of strings")
    return value


def _types(metadata: dict[str, Any], tokens: list[str]) -> list[int]:
    """The kind of each token; where the file says nothing, only tokens that end a text are special."""
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [CONTROL if token in ENDING_TEXTS else NORMAL for token in tokens]
    if not isinstance(types, list) or len(types) != len(tokens) or type(types[0]) is not int:
        raise ModelFileError(f"tokenizer.ggml.token_type does not give one number for each of {len(tokens)} tokens")
    return types


def _token_id(metadata: dict[str, Any], name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < vocab_size):
        raise ModelFileError(f"{key} = {value!r:.80} is outside the vocabulary of {vocab_size}")
    return value


def _flag(metadata: dict[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise ModelFileError(f"{key} = {value!r:.80}, expected true or false")
    return value


def _eos_ids(metadata: dict[str, Any], vocabulary: dict[str, int], types: list[int]) -> frozenset[int]:
    declared = {_token_id(metadata, name, len(types)) for name in _ENDING_KEYS} - {None}
    known = {vocabulary[text] for text in ENDING_TEXTS if text in vocabulary}
    return frozenset(i for i in declared if i is not None) | {i for i in known if types[i] == CONTROL}
