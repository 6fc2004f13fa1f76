"""`benchmarks/serve.py`: what it counts, and that it runs on a tiny model."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import serve
from serving_load import Told, closed_loop, figures, open_loop


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["serve.py", *map(str, arguments), "--threads", "1", "--json"])
        serve.main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_figures_are_of_what_came_in_time() -> None:
    ended = Told(0.0, [1.0, 1.1, 1.3], output_tokens=6)  # two tokens in each piece
    runs = Told(1.0, [3.0])
    waits = Told(2.0)
    failed = Told(2.0, [2.5], error="refused")
    found = figures([ended, runs, waits, failed], 0.0, 4.0)
    assert (found["requests"], found["failed"]) == (4, 1)
    assert found["tokens/s"] == pytest.approx((3 + 1) * 2 / 4)
    assert found["TTFT p50 ms"] == pytest.approx(2000)  # of 1, 2 and at least 2 seconds
    assert found["ITL p50 ms"] == pytest.approx(150)
    assert figures([waits], 0.0, 4.0)["ITL p99 ms"] is None


def test_loops_keep_everybody_at_work_until_time_is_up() -> None:
    async def ask(told: Told) -> None:
        await asyncio.sleep(0)
        told.times.append(time.perf_counter())
        if len(seen) < 10:
            seen.append(told)
        else:
            await asyncio.Event().wait()

    for work in (lambda: closed_loop(ask, 3, 0.05), lambda: open_loop(ask, 1000.0, 0.05, seed=1)):
        seen: list[Told] = []
        all_told, end = asyncio.run(work())
        assert all(told in all_told for told in seen)
        assert len(seen) == 10 < len(all_told)
        assert all(told.asked <= end for told in all_told)


@pytest.mark.nightly
def test_a_server_under_load(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--seconds", "0.7", "--clients", "2", "--rates", "20", "--prompt-tokens", "20", "--output-tokens", "8"]
    missing = ["--peer", f"llama.cpp={sys.executable}"] if not serve_of_llama_cpp() else []
    plot = tmp_path / "plot.svg"
    found = report_of(capsys, "--model", tiny, *sizes, *missing, "--chats", "0", "--plot", plot)
    assert [(row["server"], row["load"]) for row in found["rows"]] == [
        ("prolepsis", "2 clients"),
        ("prolepsis", "20.0/s arrive"),
    ]
    for row in found["rows"]:
        assert row["requests"] > 0
        assert row["failed"] == 0
        assert row["tokens/s"] > 0
        assert 0 < row["TTFT p50 ms"] <= row["TTFT p95 ms"] <= row["TTFT p99 ms"]
    assert plot.read_text().startswith("<?xml")


@pytest.mark.nightly
def test_chats_find_what_is_shared(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--seconds", "0.2", "--clients", "1", "--rates", "", "--output-tokens", "4"]
    rows = report_of(capsys, "--model", tiny, *sizes, "--chats", "2", "--turns", "2")["chats"]
    shared = {row["chats"]: row["in a cache"] for row in rows}
    assert shared["no prefix cache"] == 0
    assert 0 < shared["prefix cache"] <= shared["prefix cache, pool for all"] < 1
    assert shared["prefix cache and store"] >= shared["prefix cache"]


def serve_of_llama_cpp() -> bool:
    """Whether the environment of the tests has that server too."""
    try:
        import llama_cpp.server.app  # noqa: F401
    except ImportError:
        return False
    return True
