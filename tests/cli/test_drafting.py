"""`--draft`: the same answers, told of and measured."""

from pathlib import Path

from command import assert_refused, call, json_of

PAIR = Path(__file__).parents[1] / "data" / "pair"
PROMPT = "Permission is hereby granted, free of charge, to any person. Permission is hereby granted, free"


def test_an_answer_is_the_same_with_drafts(tiny: Path) -> None:
    options = ["--model", tiny, "--max-tokens", "30", "--ignore-eos"]
    plain = call("generate", PROMPT, *options)
    assert call("generate", PROMPT, *options, "--draft", "ngram") == plain
    record = json_of(call("generate", PROMPT, *options, "--draft", "twin", "--draft-tokens", "3", "--json"))
    assert record["text"] == plain.out.removesuffix("\n")
    told = record["statistics"]
    assert 1 < told["tokens_per_step"] <= 4
    assert told["spec_decode_num_accepted_tokens"] <= told["spec_decode_num_draft_tokens"]
    assert len(told["spec_decode_num_accepted_tokens_per_pos"]) <= 3


def test_a_draft_model(tiny: Path) -> None:
    options = ["--model", PAIR / "target-Q8_0.gguf", "--max-tokens", "20", "--ignore-eos"]
    plain = call("generate", PROMPT, *options)
    assert call("generate", PROMPT, *options, "--draft", f"model:{PAIR / 'draft-F16.gguf'}") == plain
    assert call("generate", PROMPT, *options, "--draft", "twin", "--draft-tokens", "4") == plain


def test_a_chat(tiny: Path) -> None:
    options = ["--temperature", "0", "--max-tokens", "30"]
    questions = b"Say free free free free.\nSay free free again.\n"
    plain = call("chat", tiny, *options, stdin=questions)
    assert plain.code == 0
    assert call("chat", tiny, *options, "--draft", "ngram", stdin=questions) == plain


def test_what_drafts_gain(tiny: Path) -> None:
    options = ["bench", tiny, "--draft", "ngram", "--new-tokens", "20", "--runs", "1", "--threads", "1"]
    record = json_of(call(*options, "--json"))
    assert record["draft"] == "ngram"
    assert len(record["questions"]) == 6
    for question in record["questions"]:
        assert question["same_tokens"]
        assert question["plain_tok_s"] > 0
        assert question["drafted_tok_s"] > 0
    table = call(*options, "--draft-tokens", "2")
    assert table.code == 0
    assert "all answers are the same with drafts and without" in table.err


def test_drafts_of_many_requests(tiny: Path) -> None:
    sizes = ["--concurrency", "3", "--prompt-tokens", "20", "--new-tokens", "9", "--runs", "1"]
    record = json_of(call("bench", tiny, *sizes, "--draft", "twin", "--draft-tokens", "2", "--json"))
    assert 0 < record["spec_decode_num_accepted_tokens"] <= record["spec_decode_num_draft_tokens"]


def test_bad_input(tiny: Path, tmp_path: Path) -> None:
    generate = ["generate", "x", "--model", tiny, "--draft"]
    assert_refused(call(*generate, "n-gram"), "draft must be none, ngram, twin or model:PATH, not 'n-gram'")
    assert_refused(call(*generate, "ngram", "--draft-tokens", "0"), "draft_tokens must be in 1 .. 32")
    assert_refused(call(*generate, "ngram", "--draft-tokens", "many"), "--draft-tokens 'many'", "auto")
    assert_refused(call(*generate, f"model:{tmp_path / 'no.gguf'}"), "no.gguf")
    vocabulary = Path(__file__).parents[1] / "data" / "smollm2-vocab.gguf"
    assert_refused(call(*generate, f"model:{vocabulary}"), "smollm2-vocab.gguf")
    assert_refused(call("generate", "x", "--model", tiny, "--precision", "low"), "--precision 'low'")
