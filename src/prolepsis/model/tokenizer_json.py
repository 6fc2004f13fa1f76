"""A GGUF file's tokenizer as the `tokenizer.json` and `tokenizer_config.json` that Hugging Face's libraries read.

Byte-level BPE is what `byte_bpe` builds already. SentencePiece's BPE has no merges in a GGUF file; they are made of
its scores, as `transformers` makes them: every split of a piece into two pieces, the best scores first. Both libraries
then give the same ids wherever scores differ from each other, as those of trained vocabularies do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prolepsis.errors import ModelFileError
from prolepsis.model.byte_bpe import PRE_TOKENIZERS, new_backend
from prolepsis.model.sentencepiece_bpe import SPACE
from prolepsis.model.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_ROLES = ("bos", "eos", "unknown", "padding")
_NAMES = {"unknown": "unk", "padding": "pad"}


def tokenizer_json(metadata: dict[str, Any], tokenizer: Tokenizer) -> str:
    """The text of `tokenizer.json`. `metadata`: of a GGUF file that `tokenizer` was made of.

    Raises:
        ModelFileError: the vocabulary cannot be written in that form.
    """
    from tokenizers import AddedToken, processors

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    backend = (_byte_level if metadata["tokenizer.ggml.model"] == "gpt2" else _sentencepiece)(metadata, tokens, types)
    special = set(tokenizer.special_tokens.values())
    for index, token in enumerate(tokens):
        if token and (index in special or types[index] == USER_DEFINED):
            added = AddedToken(token, normalized=False, special=index in special)
            (backend.add_special_tokens if index in special else backend.add_tokens)([added])
            if backend.token_to_id(token) != index:
                raise ModelFileError(f"token {index} {token!r} cannot be written to tokenizer.json with its id")
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        bos = tokens[tokenizer.bos_id]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, tokenizer.bos_id)]
        )
    return backend.to_str(pretty=False)


def tokenizer_config(metadata: dict[str, Any], tokenizer: Tokenizer, max_context: int) -> dict[str, Any]:
    """What `tokenizer_config.json` says: roles of tokens, and the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_context,
        "add_bos_token": tokenizer.add_bos,
    }
    for role in _ROLES:
        index = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            config[f"{_NAMES.get(role, role)}_token"] = tokens[index]
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def _byte_level(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Backend:
    from tokenizers import decoders

    pre = PRE_TOKENIZERS[metadata.get("tokenizer.ggml.pre", "default")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = new_backend(vocabulary, metadata["tokenizer.ggml.merges"], pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    pieces = {token: i for i, token in enumerate(tokens) if types[i] in (NORMAL, USER_DEFINED)}
    vocabulary = pieces | {token: i for i, token in enumerate(tokens) if types[i] in (CONTROL, UNKNOWN, BYTE)}
    unknown = next((token for i, token in enumerate(tokens) if types[i] == UNKNOWN), None)
    merges = _merges(pieces, metadata["tokenizer.ggml.scores"])
    backend = Backend(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    text: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(SPACE))
        text.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(text)
    return backend


def _merges(pieces: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Pairs of pieces whose joined text is a piece, the highest score of that first."""
    found = [
        (-scores[index], pieces[piece[:cut]], pieces[piece[cut:]], piece[:cut], piece[cut:])
        for piece, index in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    return [(left, right) for *_, left, right in sorted(found)]
