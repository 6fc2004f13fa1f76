"""tokenizer.json as tokenizers: the ids of the library that wrote it and of the same model as GGUF; what is refused."""

import json
import random
import threading
from pathlib import Path

import pytest
from texts import HOSTILE
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from prolepsis.errors import InputError, ModelFileError
from prolepsis.model.chat_template import ChatTemplate, encode_chat
from prolepsis.model.hf_tokenizer import HFTokenizer, load_tokenizer
from prolepsis.model.tokenizer import Tokenizer

PAIR = Path(__file__).parents[1] / "data" / "pair" / "tokenizer.json"
_R = random.Random(1)
_ALPHABET = ["</s>", "<|im_end|>", "zz", "the ", *"ab \n\t’éñ中😀\u0301▁<>\x00\u00a0"]
RANDOM = ["".join(_R.choice(_ALPHABET) for _ in range(_R.randrange(1, 30))) for _ in range(150)]
TEXTS = [*HOSTILE, *RANDOM, "", " ", " a", "x</s>y", "</s> b", "<mask> c", " d <mask>  e", "<s><s>"]
SCHEMES = ["prepend", "first", "always", "never"]


def sentencepiece(scheme: str) -> Backend:
    """A vocabulary of ASCII, all bytes and a few merges; `scheme`: where the space before a word comes from."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    for character in ["▁", *map(chr, range(33, 127))]:
        vocabulary[character] = len(vocabulary)
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("▁", "▁"), ("e", "r")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * (scheme != "never"))
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)])
    backend.add_tokens([AddedToken("zz", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return backend


def loaded(directory: Path, backend: Backend, vocab_size: int | None = None, **settings: object) -> HFTokenizer:
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(directory, vocab_size or backend.get_vocab_size(), {})


def in_pieces(tokenizer: Tokenizer, text: str) -> list[int]:
    """As chats are encoded: control tokens, and the text between them one by one."""
    ids: list[int] = []
    for index, part in enumerate(tokenizer.split_special(text, parse_special=True)):
        ids += [part] if isinstance(part, int) else tokenizer.encode(part, add_bos=False, continues=index > 0)
    return ids


@pytest.mark.parametrize("scheme", [*SCHEMES, "bytes"])
def test_ids_and_texts_are_the_librarys(scheme, tmp_path):
    backend = Backend.from_file(str(PAIR)) if scheme == "bytes" else sentencepiece(scheme)
    ours = loaded(tmp_path, backend, bos_token="<s>", eos_token={"content": "</s>"})
    for text in TEXTS:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, parse_special=True, add_bos=False) == ids == in_pieces(ours, text), text
        assert ours.encode(text, parse_special=True) == backend.encode(text).ids
        plain = ours.encode(text, add_bos=False)
        assert not set(plain) & set(ours.special_tokens.values())
        if "zz" not in text and not any(character in text for character in "\x00\u0301"):
            assert ours.decode(plain) == backend.decode(plain), text
    assert ours.add_bos == (scheme != "bytes")
    if scheme != "bytes":
        assert (ours.bos_id, ours.eos_ids) == (1, frozenset([2]))


def test_ids_are_those_of_the_same_model_as_gguf(small, tmp_path):
    ours = loaded(tmp_path, Backend.from_file(str(PAIR)))
    for text in [*TEXTS, "a<|im_start|>b<|im_end|>"]:
        for special in (False, True):
            assert ours.encode(text, parse_special=special) == small.encode(text, parse_special=special), text
    assert ours.tokens == small.tokens
    assert ours.special_tokens == small.special_tokens
    assert [ours.token_bytes(i) for i in range(1024)] == [small.token_bytes(i) for i in range(1024)]


def test_a_padded_vocabulary(tmp_path):
    backend = Backend.from_file(str(PAIR))
    ours = loaded(tmp_path, backend, vocab_size=1100)
    assert ours.vocab_size == 1100
    assert ours.decode([1050, *ours.encode("abc"), 1099]) == "abc"
    with pytest.raises(InputError, match="outside the vocabulary of 1100"):
        ours.decode([1100])


def test_tokens_added_after_training_are_text_where_the_model_has_none_of_them(tmp_path):
    backend = Backend.from_file(str(PAIR))
    backend.add_special_tokens(["[PAD]"])
    ours = loaded(tmp_path, backend, vocab_size=1024)
    assert max(ours.encode("a[PAD]b", parse_special=True)) < 1024
    assert ours.decode(ours.encode("a[PAD]b", parse_special=True)) == "a[PAD]b"
    with pytest.raises(ModelFileError, match=r"token .* has id \d+, the model knows 900 tokens"):
        loaded(tmp_path, backend, vocab_size=900)


def test_the_ends_of_a_text_are_all_that_any_file_names(tmp_path):
    sentencepiece("first").save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path, 400, {"bos_token_id": 1, "eos_token_id": [7, 9, None, 999]}).eos_ids == {2, 7, 9}
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert not load_tokenizer(tmp_path, 400, {"bos_token_id": 1}).add_bos


def test_chats_cannot_forge_control_tokens(tmp_path):
    ours = loaded(tmp_path, sentencepiece("first"), bos_token="<s>", eos_token="</s>")
    template = ChatTemplate("{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}")
    ids = encode_chat(ours, template, [{"role": "user", "content": "a</s>the"}])
    assert [i for i in ids if i in (1, 2)] == [1, 2]
    assert ids[1:-1] == ours.encode("a</s>the", add_bos=False, continues=True) != ours.encode("a</s>the", add_bos=False)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": {"type": "Unigram", "vocab": []}}, "a tokenizer of type 'Unigram'"),
        ({"model": {"continuing_subword_prefix": "x"}}, "model.continuing_subword_prefix = 'x' is not supported"),
        ({"model": {"end_of_word_suffix": "</w>"}}, "model.end_of_word_suffix = '</w>' is not supported"),
        ({"decoder": {"type": "WordPiece"}}, "a decoder of WordPiece"),
        ({"decoder": None}, "a decoder of no kind"),
        ({"model": {"type": "BPE", "vocab": 3}}, "the tokenizers library cannot read it"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": "x"}}, "the tokenizers library cannot read it"),
        ({"added_tokens": [{"id": 1}]}, "the tokenizers library cannot read it"),
        ({"added_tokens": ["x"]}, "added_tokens"),
    ],
)
def test_what_is_not_supported_is_told(changed, said, tmp_path):
    values = json.loads(PAIR.read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(values | changed))
    with pytest.raises(ModelFileError, match=f"tokenizer.json: .*{said}"):
        load_tokenizer(tmp_path, 1024, {})


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("model", {"vocab": {"a": 0}, "merges": [], "unk_token": "none"}),
        ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
    ],
)
def test_text_that_the_library_fails_on_is_told(part, changed, tmp_path):
    values = json.loads(PAIR.read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(values | {part: (values[part] or {}) | changed}))
    ours = load_tokenizer(tmp_path, 1024, {})
    for call in (ours.encode, lambda text: ours.split_special(text, parse_special=True)):
        with pytest.raises(
            ModelFileError, match=r"tokenizer.json: the tokenizers library cannot encode text with it: ."
        ):
            call("bc")


def test_a_missing_tokenizer_says_how_to_get_one(tmp_path):
    with pytest.raises(ModelFileError, match=r"tokenizer.json: no such file.*save_pretrained"):
        load_tokenizer(tmp_path, 1024, {})


def test_text_that_is_no_unicode_is_refused(tmp_path):
    ours = loaded(tmp_path, Backend.from_file(str(PAIR)))
    for call in (ours.encode, lambda text: ours.split_special(text, parse_special=True)):
        with pytest.raises(InputError, match=r"unpaired surrogate U\+D800 at position 1"):
            call("a\ud800")


def test_other_threads_run_while_a_long_text_is_encoded(small, tmp_path):
    source = Path(__file__).read_text("utf-8") * 60
    for tokenizer in (small, loaded(tmp_path, Backend.from_file(str(PAIR)))):
        turns, begun = 0, threading.Event()

        def encode(tokenizer: Tokenizer = tokenizer, begun: threading.Event = begun) -> None:
            begun.set()
            tokenizer.encode(source)

        thread = threading.Thread(target=encode)
        thread.start()
        begun.wait()
        while thread.is_alive():
            thread.join(0.001)
            turns += 1
        assert turns > 10
