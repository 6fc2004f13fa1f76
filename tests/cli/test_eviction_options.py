"""`--kv-evict`: what commands tell of it, and with what it cannot be."""

from pathlib import Path

from command import assert_refused, call, json_of

PROMPT = "The blocks of a cache. " * 30


def test_lossy_output_says_so(tiny: Path, text: Path) -> None:
    options = ["--model", tiny, "--max-tokens", "40", "--ignore-eos", "--kv-evict"]
    record = json_of(call("generate", PROMPT, *options, "h2o:128", "--json"))
    assert record["lossy"]
    assert record["evicted_tokens"] > 0
    shown = call("generate", PROMPT, *options, "h2o:128")
    assert shown.out == record["text"] + "\n"
    assert "tokens were dropped from the cache; this output is lossy" in shown.err
    whole = json_of(call("generate", PROMPT, *options, "h2o:100%", "--json"))
    assert (whole["lossy"], whole["evicted_tokens"]) == (False, 0)
    narrow = json_of(call("generate", "x", *options[:2], "--max-tokens", "2", "--kv-dtype", "int4", "--json"))
    assert (narrow["lossy"], narrow["evicted_tokens"]) == (True, 0)
    scored = [
        json_of(call("ppl", text, "--model", tiny, "--context", "512", "--kv-evict", budget, "--json"))["perplexity"]
        for budget in ("none", "h2o:100%", "h2o:25%")
    ]
    assert scored[0] == scored[1] != scored[2]
    assert (
        json_of(call("ppl", text, "--model", tiny, "--context", "9999", "--kv-evict", "h2o:128", "--json"))["context"]
        < 9999
    )
    sizes = ["--concurrency", "2", "--prompt-tokens", "150", "--new-tokens", "60", "--runs", "1"]
    assert json_of(call("bench", tiny, *sizes, "--kv-evict", "h2o:128", "--json"))["evicted_tokens"] > 0


def test_bad_input(tiny: Path, tmp_path: Path) -> None:
    assert_refused(call("generate", "x", "--model", tiny, "--kv-evict", "fifo"), "kv_evict must be none, or tokens or")
    chat = call("chat", tiny, "--session", tmp_path / "chat.pkv", "--kv-evict", "h2o:512")
    assert_refused(chat, "--session keeps K and V of every token, and --kv-evict drops some")
    assert_refused(call("bench", tiny, "--kv-evict", "h2o:512"), "--kv-memory and --kv-evict are for --concurrency")
