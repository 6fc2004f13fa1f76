"""Text to token ids with a checkpoint's `tokenizer.json`: the `tokenizers` library, which wrote the file, runs it.

Only what the library has no notion of is done here: whether text that spells a control token is one, bytes of a single
token, and texts that continue after a control token.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prolepsis.errors import ModelFileError
from prolepsis.model.byte_bpe import spelled_bytes as byte_level_bytes
from prolepsis.model.safetensors_file import read_json
from prolepsis.model.sentencepiece_bpe import SPACE
from prolepsis.model.tokenizer import CONTROL, ENDING_TEXTS, NORMAL, USER_DEFINED, Tokenizer, require_encodable

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_BYTE = re.compile("<0x([0-9A-F]{2})>")


class HFTokenizer(Tokenizer):
    """As `Tokenizer`, of a `tokenizer.json`."""

    def __init__(
        self,
        text_model: JsonTextModel,
        tokens: list[str],
        types: list[int],
        *,
        bos_id: int | None,
        eos_ids: frozenset[int],
        add_bos: bool,
    ) -> None:
        super().__init__(tokens, types, text_model, bos_id=bos_id, eos_ids=eos_ids, add_bos=add_bos)
        self._json = text_model
        self.byte_level = text_model.byte_level

    def _text_ids(self, text: str, parse_special: bool, continues: bool) -> list[int]:
        return self._json.ids(text, parse_special, continues)

    def split_special(self, text: str, *, parse_special: bool) -> Iterable[str | int]:
        """Ids of control tokens, where they are looked for, and the text between them, less whitespace they take with
        them. Tokens matched anywhere are left in the text for `encode`."""
        require_encodable(text)
        parts: list[str | int] = []
        end = 0
        for index, (start, stop) in self._json.literals(text, parse_special, self._special_ids):
            parts += [text[end:start]] if end < start else []
            parts.append(index)
            end = stop
        return [*parts, text[end:]] if end < len(text) else parts


class JsonTextModel:
    """The library's tokenizer, and how its tokens spell bytes."""

    def __init__(self, path: Path, values: dict[str, Any], vocab_size: int) -> None:
        """`values`: the content of the tokenizer.json at `path`; tokens from `vocab_size` on were added after the model
        was trained and are left out.

        Raises:
            ModelFileError: it is not BPE, its text cannot be decoded here, or the library refuses it.
        """
        model = _part(values, "model")
        kind = model.get("type", "BPE")
        if kind != "BPE":
            raise ModelFileError(f"{path}: a tokenizer of type {kind!r:.80} is not supported; supported: BPE")
        for field in ("continuing_subword_prefix", "end_of_word_suffix"):
            # No Llama model has them; with a prefix that does not fit its merges the library aborts the process.
            if model.get(field):
                raise ModelFileError(f"{path}: model.{field} = {model[field]!r:.80} is not supported; supported: none")
        steps = _steps(_part(values, "decoder"))
        names = [step.get("type") for step in steps]
        self.byte_level = "ByteLevel" in names
        if not (self.byte_level or "ByteFallback" in names or "Metaspace" in names):
            raise ModelFileError(
                f"{path}: a decoder of {', '.join(map(str, names)) or 'no kind'} is not supported; "
                "supported: ByteLevel, and ByteFallback or Metaspace"
            )
        self.add_space_prefix = not self.byte_level and any(
            step.get("type") == "Strip" or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        added = [token for token in _added(path, values) if token["id"] < vocab_size]
        self._first = values | {"added_tokens": added}
        self._path = path
        self.backend = _backend(path, self._first)
        self._continuing: Backend | None = None
        self._lock = threading.Lock()
        self.special = {token["id"]: bool(token.get("special")) for token in added}
        """Id of each added token, and whether it is a control token."""

    def encode(self, text: str) -> list[int]:
        """Ids of text in which no control token is looked for."""
        return self.ids(text, False, False)

    def ids(self, text: str, parse_special: bool, continues: bool) -> list[int]:
        """Ids of text. `continues`: it follows a control token, so where the tokenizer puts a space before the first
        word of a text, there is none."""
        return list(self._encoding(text, parse_special, continues).ids)

    def literals(
        self, text: str, parse_special: bool, literal_ids: frozenset[int]
    ) -> Iterable[tuple[int, tuple[int, int]]]:
        """Those tokens that are in the text: their ids, and where they begin and end."""
        encoding = self._encoding(text, parse_special, False)
        for index, span in zip(encoding.ids, encoding.offsets, strict=True):
            if index in literal_ids:
                yield index, span

    def spelled_bytes(self, token: str) -> bytes:
        """The bytes a token's text stands for."""
        if self.byte_level:
            return byte_level_bytes(token)
        match = _BYTE.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.replace(SPACE, " ").encode("utf-8")

    def _encoding(self, text: str, parse_special: bool, continues: bool) -> Any:
        with self._lock:
            backend = self._after_special() if continues else self.backend
            with _refusals(self._path, "encode text with"):
                backend.encode_special_tokens = not parse_special
                # As in `byte_bpe`: other threads run meanwhile. The fast call would tell no offsets.
                return backend.encode_batch([text], add_special_tokens=False)[0]

    def around(self) -> list[int]:
        """Ids that the tokenizer puts around a text of its own accord."""
        with self._lock, _refusals(self._path, "encode text with"):
            return list(self.backend.encode("", add_special_tokens=True).ids)

    def _after_special(self) -> Backend:
        """The tokenizer without a space before the first word, where only a text's first word has one."""
        if self._continuing is None:
            pre = self._first.get("pre_tokenizer")
            changed = _without_first_space(pre)
            self._continuing = (
                self.backend if changed == pre else _backend(self._path, self._first | {"pre_tokenizer": changed})
            )
        return self._continuing


def load_tokenizer(directory: Path, vocab_size: int, roles: dict[str, Any]) -> HFTokenizer:
    """The tokenizer of a checkpoint. `roles`: `bos_token_id` and `eos_token_id` of the model's configurations, the
    latter a list of ids.

    Raises:
        ModelFileError: there is no tokenizer.json, or one that is not supported.
    """
    path = directory / TOKENIZER
    if not path.exists():
        raise ModelFileError(
            f"{path}: no such file, so text cannot be read; give token ids, or write it with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    values = read_json(path)
    text_model = JsonTextModel(path, values, vocab_size)
    tokens, types = _vocabulary(path, text_model, vocab_size)
    settings = tokenizer_settings(directory)
    index = {token: i for i, token in enumerate(tokens) if token}
    bos_id = index.get(token_text(settings, "bos_token"), roles.get("bos_token_id"))
    bos_id = bos_id if type(bos_id) is int and 0 <= bos_id < vocab_size else None
    eos = {each for each in roles.get("eos_token_id", []) if type(each) is int and 0 <= each < vocab_size}
    eos |= {index[text] for text in (token_text(settings, "eos_token"),) if text in index}
    eos |= {i for text in ENDING_TEXTS if (i := index.get(text)) is not None and types[i] == CONTROL}
    add_bos = settings.get("add_bos_token")
    return HFTokenizer(
        text_model,
        tokens,
        types,
        bos_id=bos_id,
        eos_ids=frozenset(eos),
        add_bos=bos_id is not None and (add_bos if isinstance(add_bos, bool) else text_model.around()[:1] == [bos_id]),
    )


def tokenizer_settings(directory: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty where there is none."""
    path = directory / TOKENIZER_CONFIG
    return read_json(path) if path.exists() else {}


def token_text(settings: dict[str, Any], role: str) -> str:
    """What tokenizer_config.json says for a role such as "bos_token": a text, or an object with it; empty if absent."""
    value = settings.get(role)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _vocabulary(path: Path, text_model: JsonTextModel, vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and types of all tokens the model knows; those the tokenizer lacks have no text."""
    tokens, types = [""] * vocab_size, [NORMAL] * vocab_size
    for token, index in text_model.backend.get_vocab(with_added_tokens=True).items():
        if index >= vocab_size:
            raise ModelFileError(f"{path}: token {token!r:.80} has id {index}, the model knows {vocab_size} tokens")
        tokens[index] = token
    for index, special in text_model.special.items():
        types[index] = CONTROL if special else USER_DEFINED
    return tokens, types


def _backend(path: Path, values: dict[str, Any]) -> Backend:
    from tokenizers import Tokenizer as Backend

    with _refusals(path, "read"):
        backend = Backend.from_str(json.dumps(values))
    backend.no_truncation()
    backend.no_padding()
    return backend


@contextmanager
def _refusals(path: Path, doing: str) -> Iterator[None]:
    """Whatever the library raises, as a ModelFileError."""
    try:
        yield
    except BaseException as error:
        # A panic of the library is no Exception.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ModelFileError(f"{path}: the tokenizers library cannot {doing} it: {error!s:.200}") from None


def _added(path: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    added = values.get("added_tokens") or []
    if not isinstance(added, list) or any(
        not isinstance(each, dict) or type(each.get("id")) is not int for each in added
    ):
        raise ModelFileError(f"{path}: added_tokens is not a list of objects with ids")
    return added


def _part(values: dict[str, Any], name: str) -> dict[str, Any]:
    part = values.get(name)
    return part if isinstance(part, dict) else {}


def _steps(part: dict[str, Any]) -> list[dict[str, Any]]:
    """A part of a tokenizer.json, or the parts of a sequence."""
    if part.get("type") == "Sequence":
        inner = part.get("decoders")
        return [step for step in inner if isinstance(step, dict)] if isinstance(inner, list) else []
    return [part] if part else []


def _without_first_space(pre: Any) -> Any:
    """A pre-tokenizer that puts no space before the first word alone."""
    if not isinstance(pre, dict):
        return pre
    if pre.get("type") == "Sequence":
        return pre | {"pretokenizers": [_without_first_space(step) for step in pre.get("pretokenizers", [])]}
    if pre.get("type") == "Metaspace" and pre.get("prepend_scheme") == "first":
        return pre | {"prepend_scheme": "never"}
    return pre
