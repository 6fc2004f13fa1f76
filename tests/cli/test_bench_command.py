"""`bench --concurrency`: figures of many requests at once; one request is in `test_commands.py`."""

from pathlib import Path

from command import assert_refused, call, json_of

MIXED = ["--concurrency", "3", "--prompt-tokens", "20", "--new-tokens", "5", "--runs", "1"]


def test_many_requests(tiny: Path) -> None:
    record = json_of(call("bench", tiny, *MIXED, "--threads", "1", "--json"))
    sizes = {name: record.pop(name) for name in ("concurrency", "requests", "prompt_tokens", "new_tokens", "threads")}
    assert sizes == {"concurrency": 3, "requests": 12, "prompt_tokens": 20, "new_tokens": 5, "threads": 1}
    assert record.pop("model") == str(tiny)
    assert list(record) == [
        "precision", "output_tok_s", "total_tok_s", "ttft_p50_ms", "ttft_p95_ms", "inter_token_p50_ms",
        "inter_token_p95_ms",
        "cached_share", "preemptions", "waste", "evicted_tokens", "rss_mb", "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
        "spec_decode_acceptance_rate_per_pos",
    ]  # fmt: skip
    assert record["preemptions"] == 0
    assert 0 < record["waste"] < 1


def test_a_table_of_many_requests(tiny: Path) -> None:
    outcome = call("bench", tiny, *MIXED)
    assert outcome.code == 0, outcome.err
    words = " ".join(outcome.out.split())
    assert "12 requests of about 20 + 5 tokens, 3 at once" in words
    for name in ("output tokens a second", "time to first token, ms", "slots of used blocks that hold no token"):
        assert name in words


def test_a_small_cache_shows_preemptions(tiny: Path) -> None:
    sizes = ["--prompt-tokens", "100", "--new-tokens", "60", "--runs", "1"]
    record = json_of(call("bench", tiny, "--concurrency", "8", *sizes, "--kv-memory", "320KiB", "--json"))
    assert record["preemptions"] > 0


def test_bad_input(tiny: Path) -> None:
    assert_refused(call("bench", tiny, "--concurrency", "0"), "--concurrency must be at least 1, not 0")
    assert_refused(call("bench", tiny, "--kv-memory", "1MiB"), "--kv-memory and --kv-evict are for --concurrency")
    assert_refused(call("bench", tiny, *MIXED, "--prompt-tokens", "1400"), "--prompt-tokens 1400", "context of 2048")
