from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from texts import HOSTILE

from prolepsis.errors import ContextLengthError, InputError, ModelFileError
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.tokenizer import Tokenizer

# Any text that UTF-8 can hold: surrogates are not characters.
any_text = st.text(st.characters(exclude_categories=("Cs",)))
pieces_of_text = st.lists(
    st.sampled_from([*HOSTILE.values(), " ", "\n", "<|im_end|>", "<", "한", "\u0301", "\u200d", "1", "'s"]), max_size=6
).map("".join)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_text_comes_back(small, text):
    assert small.decode(small.encode(text), skip_special=False) == text
    assert small.decode(small.encode(text, parse_special=True), skip_special=False) == text


@settings(max_examples=150, deadline=None)
@given(any_text | pieces_of_text)
@example("\r\n" * 3 + " x")
def test_any_text_comes_back(small, text):
    assert small.decode(small.encode(text), skip_special=False) == text


@settings(max_examples=100, deadline=None)
@given(any_text | pieces_of_text)
def test_only_a_text_that_has_more_tokens_is_given_up_unread(small, text):
    small.require_at_most(len(small.encode(text)), text)


def test_what_is_far_too_long_is_given_up_unread(small):
    with pytest.raises(ContextLengthError, match="10000 characters, but 10 tokens"):
        small.require_at_most(10, "a " * 5000)


@settings(max_examples=100, deadline=None)
@given(any_text | pieces_of_text)
def test_any_text_comes_back_but_for_bytes_the_vocabulary_lacks(smollm, text):
    missing = {4, 6, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
    known = bytes(byte for byte in text.encode() if byte not in missing)
    assert smollm.decode(smollm.encode(text), skip_special=False) == known.decode("utf-8", "replace")


def test_special_text_is_text_unless_asked_for(smollm):
    text = "<|im_start|>user\nhi<|im_end|>"
    plain = smollm.encode(text)
    assert not set(plain) & set(smollm.special_tokens.values())
    assert smollm.decode(plain) == text
    parsed = smollm.encode(text, parse_special=True)
    assert parsed == [1, *smollm.encode("user\nhi"), 2]
    assert smollm.decode(parsed) == "user\nhi"
    assert smollm.decode(parsed, skip_special=False) == text


def test_leftmost_then_longest_special_token_wins(small):
    kinds = {"<a>": 3, "<a><b>": 3, "<b><c>": 3, "user": 4}
    special = Tokenizer([*kinds], [*kinds.values()], small._model, bos_id=None, eos_ids=frozenset(), add_bos=False)
    assert special.encode("<a><b><c>", parse_special=True)[:1] == [1]
    assert special.encode("<b><c><a>", parse_special=True) == [2, 0]
    assert special.encode("user<a>", parse_special=False)[0] == 3
    assert special.token_bytes(3) == b"user"


def test_special_ids(smollm, small):
    assert (smollm.bos_id, smollm.eos_ids, smollm.vocab_size) == (1, {0, 2}, 49_152)
    assert smollm.special_tokens["<|im_end|>"] == 2
    assert len(smollm.special_tokens) == 17
    assert (small.bos_id, small.eos_ids) == (0, {0, 2})


def test_bos(smollm):
    assert not smollm.add_bos
    assert smollm.encode("hi", add_bos=True) == [1, *smollm.encode("hi")]
    eager = Tokenizer(["a"], [1], smollm._model, bos_id=7, eos_ids=frozenset(), add_bos=True)
    assert eager.encode("") == [7]
    assert eager.encode("", add_bos=False) == []
    none = Tokenizer(["a"], [1], smollm._model, bos_id=None, eos_ids=frozenset(), add_bos=False)
    with pytest.raises(InputError, match="no BOS token"):
        none.encode("hi", add_bos=True)


def test_every_byte_is_a_token(small):
    ids = {small.token_bytes(i): i for i in range(small.vocab_size)}
    for byte in range(256):
        assert bytes([byte]) in ids


def test_every_id_decodes_to_the_bytes_of_its_token(smollm):
    for i in range(smollm.vocab_size):
        assert smollm.decode([i], skip_special=False) == smollm.token_bytes(i).decode("utf-8", "replace")


@pytest.mark.parametrize("bad", [-1, 49_152, 10**9])
def test_ids_outside_the_vocabulary(smollm, bad):
    with pytest.raises(InputError, match=f"token id {bad} is outside the vocabulary of 49152"):
        smollm.decode([1, bad])


@pytest.mark.parametrize("text", ["a\ud83d", "\udc00b", "\ud800\ud800"])
def test_unpaired_surrogates(smollm, text):
    with pytest.raises(InputError, match=r"unpaired surrogate U\+D"):
        smollm.encode(text)


@settings(max_examples=150, deadline=None)
@given(any_text | pieces_of_text)
def test_streamed_pieces_are_the_text_and_whole_characters(small, text):
    stream = small.stream()
    pieces = [stream.push(token) for token in small.encode(text)]
    assert stream.finish() == ""
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 1_023), max_size=40), st.booleans())
def test_streaming_any_ids_equals_decoding_them(small, ids, skip_special):
    stream = small.stream(skip_special=skip_special)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == small.decode(ids, skip_special=skip_special)


def test_a_character_appears_with_its_last_byte(small):
    ids = small.encode("뷁")
    assert len(ids) == 3
    stream = small.stream()
    assert [stream.push(token) for token in ids] == ["", "", "뷁"]
    stream.push(ids[0])
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("unit", ["a", " ", "\n", "é", "<", "7", "한", "<|im_end|>", "x "])
def test_long_texts(small, unit):
    text = unit * 20_000
    assert small.decode(small.encode(text)) == text


def changed(file: GGUFFile, **changes: object) -> GGUFFile:
    """`file` with `tokenizer.ggml.*` keys replaced, or removed by None."""
    metadata = file.metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return replace(file, metadata={name: value for name, value in metadata.items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "holds no tokenizer"),
        ({"model": "no_vocab"}, "holds no tokenizer"),
        ({"model": "rwkv"}, "tokenizer.ggml.model = 'rwkv' is not supported; supported: gpt2, llama"),
        ({"pre": "newest"}, "tokenizer.ggml.pre = 'newest' is not supported; supported: .*gpt-2.*smollm"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is missing or not a list of strings"),
        ({"tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens has 'a' twice"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges: 'ab' is not two tokens"),
        ({"merges": ["a b c"]}, "tokenizer.ggml.merges: 'a b c' is not two tokens"),
        ({"merges": ["a nosuchtoken"]}, "tokenizer.ggml.merges does not fit tokenizer.ggml.tokens"),
        ({"token_type": [1]}, "token_type does not give one number for each of 1024 tokens"),
        ({"token_type": ["x"] * 1024}, "token_type does not give one number"),
        ({"bos_token_id": 1024}, "bos_token_id = 1024 is outside the vocabulary of 1024"),
        ({"eos_token_id": "2"}, "eos_token_id = '2' is outside the vocabulary"),
        ({"add_bos_token": 1}, "add_bos_token = 1, expected true or false"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_metadata(small_file, changes, message):
    with pytest.raises(ModelFileError, match=message) as caught:
        Tokenizer.from_gguf(changed(small_file, **changes))
    assert str(caught.value).startswith(str(small_file.path))


def test_without_token_types_the_ends_of_texts_are_special(small_file):
    tokenizer = Tokenizer.from_gguf(changed(small_file, token_type=None))
    assert tokenizer.special_tokens == {"<|endoftext|>": 0, "<|im_end|>": 2}
