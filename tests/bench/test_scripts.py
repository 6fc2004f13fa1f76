"""The scripts of `benchmarks/` that drive the engine: they run on a tiny model, and their figures agree."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from prolepsis.model.gguf_file import GGUFFile

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import kv_evict
import peers
import traffic


def report_of(script: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """What it prints with --json."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["script", *map(str, arguments), "--json"])
        script.main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_traffic_of_half_a_simulated_minute(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompt-tokens", "100", "--new-tokens", "60", "--kv-memory", "0.3", "--rate", "6", "--cancel", "0.3"]
    found = report_of(traffic, capsys, "--model", tiny, "--minutes", "0.6", "--slices", "3", "--virtual-clock", *sizes)
    rows = found["rows"]
    assert [row["minute"] for row in rows] == [0.2, 0.4, 0.6]
    assert 140 < sum(row["arrived"] for row in rows) < 290  # a Poisson process of 216
    for name in ("arrived", "cancelled", "tokens/s", "ms/token", "running", "blocks", "prefix hits", "preemptions"):
        assert all(row[name] > 0 for row in rows), name
    assert all(row["blocks"] <= found["pool_blocks"] for row in rows)
    assert all(0 < row["waste"] < 0.5 for row in rows)
    assert found["last_to_second_slice"]["tokens/s"] == pytest.approx(rows[2]["tokens/s"] / rows[1]["tokens/s"])


def test_peers_takes_turns_and_leaves_out_who_fails(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "installed", lambda: ["prolepsis", "prolepsis-fast"])
    for memory in ("copy_bandwidth", "memory_bandwidth"):
        monkeypatch.setattr(peers, memory, lambda *_: 1e9)
    sizes = ["--prefill", "50", "--contexts", "40,60", "--new-tokens", "8", "--requests", "3x20x5", "--runs", "1"]
    missing = ["--python", f"openvino={tmp_path / 'missing'}"]
    found = report_of(peers, capsys, "--model", tiny, "--threads", "1", *sizes, *missing)
    works = ["prefill of 50", "decode after 40", "decode after 60", "3 requests, 20 + 5"]
    pairs = [(work, engine) for work in works for engine in ("prolepsis", "prolepsis-fast")]
    assert [(row["work"], row["engine"]) for row in found["rows"]] == pairs
    for row, decodes in zip(
        found["rows"], [each for each in (False, True, True, False) for _ in range(2)], strict=True
    ):
        assert row["tokens/s"] > 0
        assert row["ours is" if row["engine"] == "prolepsis" else "fast is"] == 1
        assert (row["GB/s"] is not None) == decodes
        assert row["of copy"] == row["of read"] == row["GB/s"]
    assert found["peak_rss_mb"]["prolepsis"] > 0


def test_bytes_a_token(tiny: Path) -> None:
    """Of one layer with 2 KV heads of 64: everything but the embedding, of which a token reads one row."""
    tensors = GGUFFile.open(tiny).tensors
    of = peers.bytes_a_token(GGUFFile.open(tiny))
    assert of(10) - of(0) == 10 * 2 * 2 * 64 * 2
    assert of(0) == sum(tensor.data.nbytes for name, tensor in tensors.items() if name != "token_embd.weight")


def test_what_is_lost_where_sequences_forget(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A block is a fixed number of tokens, and a sequence holds a table of blocks. " * 30)
    found = report_of(kv_evict, capsys, text, "--model", tiny, "--context", "512", "--windows", "1", "--shares", "25")
    rows = [(row["budget"], row["kept"]) for row in found["rows"]]
    assert rows == [(512, "all"), (128, "h2o"), (128, "first and recent"), (128, "recent")]
    assert found["rows"][0]["mean KL"] == 0
    assert found["rows"][0]["same top"] == 1
    assert all(row["mean KL"] > 0 and row["same top"] < 1 for row in found["rows"][1:])
