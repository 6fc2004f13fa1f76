"""SentencePiece BPE on a vocabulary made from the small model's: its pieces, equal scores for seven at a time."""

from itertools import pairwise
from pathlib import Path

import pytest
from gguf_bytes import ARRAY, F32, I32, STRING, U32, gguf, key
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import HOSTILE

from prolepsis.errors import ModelFileError
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.sentencepiece_bpe import SentencePieceBPE
from prolepsis.model.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ACROSS_WORDS = ["a▁", "of▁the", "▁the▁"]


def write_vocabulary(path: Path, small: Tokenizer, extra: list[str], **changes: bytes | None) -> Path:
    spelled = (small.token_bytes(i) for i in range(3, small.vocab_size))
    pieces = [raw.decode().replace(" ", "▁") for raw in spelled if raw.isascii() and raw != b"\0"]
    pieces = extra + [piece for piece in pieces if extra or "▁" not in piece.lstrip("▁")]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces]
    keys = {
        "general.architecture": (STRING, "llama"),
        "tokenizer.ggml.model": (STRING, "llama"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.scores": (ARRAY, (F32, [0.0] * 259 + [float(-(i // 7)) for i in range(len(pieces))])),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [2, 3, 3] + [6] * 256 + [1] * len(pieces))),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.eos_token_id": (U32, 2),
        "tokenizer.ggml.unknown_token_id": (U32, 0),
    } | changes
    path.write_bytes(gguf([key(name, *entry) for name, entry in keys.items() if entry is not None]))
    return path


@pytest.fixture(scope="module", params=[[], ACROSS_WORDS], ids=["words apart", "pieces across words"])
def path(request, small, tmp_path_factory):
    return write_vocabulary(tmp_path_factory.mktemp("spm") / "vocabulary.gguf", small, request.param)


@pytest.fixture(scope="module")
def tokenizer(path):
    return Tokenizer.from_gguf(GGUFFile.open(path))


def by_definition(tokenizer: Tokenizer, text: str) -> list[int]:
    """Merge the neighbours of the highest score, the leftmost of equals, until none can merge."""
    model = tokenizer._model
    symbols = list((" " + text if text else "").replace(" ", "▁"))
    while True:
        joined = [left + right for left, right in pairwise(symbols)]
        scores = [model._scores[model._pieces[piece]] if piece in model._pieces else None for piece in joined]
        if not any(score is not None for score in scores):
            break
        best = scores.index(max(score for score in scores if score is not None))
        symbols[best : best + 2] = [joined[best]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [model._pieces[symbol]] if symbol in model._pieces else [3 + byte for byte in symbol.encode()]
    return ids


texts = st.text(st.sampled_from("  aeinorst,.-<>/s1\nTé한👍▁")) | st.lists(
    st.sampled_from([" the", " of", "a ", "er", "  "])
).map("".join)


@settings(max_examples=200, deadline=None)
@given(texts)
def test_merges_as_defined(tokenizer, text):
    assert tokenizer.encode(text, add_bos=False) == by_definition(tokenizer, text)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_equals_llama_cpp(path, tokenizer, text):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python (extra `engines`) is not installed")
    reference = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for special in (False, True):
        for sample in (text, f"<s>{text}</s> {text}"):
            expected = reference.tokenize(sample.encode(), add_bos=True, special=special)
            assert tokenizer.encode(sample, parse_special=special) == expected


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_text_comes_back_and_streams(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join(stream.push(token) for token in ids) + stream.finish() == text


def test_bytes_and_special_tokens(tokenizer):
    assert tokenizer.token_bytes(3 + 0xE9) == b"\xe9"
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, {2}, True)
    assert not set(tokenizer.encode("<s> </s>", add_bos=False)) & {1, 2}
    assert tokenizer.encode("</s>", parse_special=True) == [1, 2]
    assert tokenizer.encode("") == [1]


def test_a_byte_without_a_token_is_unknown():
    model = SentencePieceBPE({"a": 1}, [0.0, 0.0], {}, 0, add_space_prefix=False)
    assert model.encode("aé") == [1, 0, 0]
    assert SentencePieceBPE({"a": 1}, [0.0, 0.0], {}, None, add_space_prefix=False).encode("aé") == [1]


def test_scores_are_needed(small, tmp_path):
    path = write_vocabulary(tmp_path / "v.gguf", small, [], **{"tokenizer.ggml.scores": None})
    with pytest.raises(ModelFileError, match=r"tokenizer.ggml.scores does not give one number"):
        Tokenizer.from_gguf(GGUFFile.open(path))
