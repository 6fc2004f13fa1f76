"""From start to end of a server process: loading, signals, and what becomes of open streams."""

import asyncio
import json
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest
from command import assert_refused, call, stalling
from server_process import ServerProcess

from prolepsis import LLM
from prolepsis.serve.lifecycle import _new_engine

MOST = 2_000  # tokens, which take the tiny model some seconds


def test_the_port_answers_while_the_model_is_loaded(tiny: Path) -> None:
    command = stalling("prolepsis.engine.llm:LLM:__init__:1")
    with ServerProcess(tiny, "--host", "0.0.0.0", "--log-json", command=command) as server:
        server.await_line("stalled")
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        for answer in (httpx.get(f"{url}/health"), httpx.post(f"{url}/v1/completions", json={})):
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["code"] == "loading"
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        said = [json.loads(line) for line in server.said.splitlines() if line != "stalled"]
        assert said[-1]["message"].startswith("shutting down")
        assert "anyone who can reach this address" in next(
            each["message"] for each in said if each["level"] == "warning"
        )


def test_open_streams_end_whole_and_are_stored_before_the_server_ends(tiny: Path, tmp_path: Path) -> None:
    with (
        ServerProcess(tiny, "--store", f"disk:{tmp_path}:64MiB").await_ready() as server,
        server.streaming(max_tokens=600) as lines,
    ):
        for signum in (signal.SIGTERM, signal.SIGINT):  # so soon after the first, the second says nothing new
            server.signal(signum)
        server.await_line("shutting down; 1 open")
        *_, last, done = lines
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert done == "data: [DONE]"
        assert server.wait() == 0
    assert len([path for path in tmp_path.glob("kv/**/*") if path.is_file()]) == 3  # of 256 tokens each, but the last


def test_what_is_not_done_in_time_is_told_so(tiny: Path) -> None:
    with (
        ServerProcess(tiny, "--drain-timeout", "0", "--max-running", "1").await_ready() as server,
        server.streaming(max_tokens=MOST) as lines,
    ):
        server.signal(signal.SIGTERM)
        *_, last, done = lines
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["code"], done) == ("draining", "data: [DONE]")
        assert "--drain-timeout" in error["message"]
        assert server.wait() == 0


def test_a_second_signal_that_is_meant_ends_it_at_once(tiny: Path) -> None:
    with (
        ServerProcess(tiny, "--max-running", "1").await_ready() as server,
        server.streaming(max_tokens=MOST, n=16) as lines,
    ):
        assert server.signal_until_it_ends(signal.SIGINT) == 130
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)


def test_the_vocabulary_is_ready_for_grammars_before_the_server_is(tiny: Path) -> None:
    engine = _new_engine(lambda: LLM(tiny, kv_memory=1 << 20), None, "auto")
    asyncio.run(engine.close())
    assert engine.llm.grammars._ll_tokenizer is not None


# Runs the command with an engine whose first pass fails in a way that nobody foresaw.
FAILING = """
from prolepsis.engine.worker import Worker
def fail(self): raise MemoryError("for this test")
Worker._step = fail
from prolepsis.cli import main
main()
"""

UNLOADABLE = """
from prolepsis.cli import main, serve
def fail(*_, **__): raise KeyError("for this test")
serve.load = fail
main()
"""


def test_the_end_of_the_engine_is_the_servers(tiny: Path) -> None:
    with ServerProcess(tiny, command=[sys.executable, "-c", FAILING]).await_ready() as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Once"}, timeout=60)
        assert answer.status_code == 500
        assert server.wait() == 1
        assert "MemoryError: for this test" in server.said
        assert "prolepsis: error: the engine has failed" in server.said


def test_where_json_is_asked_for_failures_are_json_too(tiny: Path, tmp_path: Path) -> None:
    with ServerProcess(tiny, "--log-json", command=[sys.executable, "-c", FAILING]).await_ready() as server:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "Once"}, timeout=60)
        assert server.wait() == 1
        said = [json.loads(line) for line in server.said.splitlines()]
    (failure,) = (each for each in said if each.get("message") == "the thread prolepsis-engine has failed")
    assert "MemoryError: for this test" in failure["traceback"]
    assert (said[-1]["level"], said[-1]["message"][:21]) == ("error", "the engine has failed")
    outcome = call("serve", tmp_path / "none.gguf", "--port", "0", "--log-json")
    assert outcome.code == 2
    assert "none.gguf" in json.loads(outcome.err.splitlines()[-1])["message"]
    outcome = call("serve", tiny, "--log-json", "--max-body", "1x")
    assert outcome.code == 2
    assert "--max-body" in json.loads(outcome.err)["message"]


def test_what_nobody_foresaw_of_loading_is_json_too(tiny: Path) -> None:
    with ServerProcess(tiny, "--log-json", command=[sys.executable, "-c", UNLOADABLE]) as server:
        assert server.wait() == 1
        said = [json.loads(line) for line in server.said.splitlines()]
    assert (said[-1]["level"], said[-1]["message"]) == ("error", "KeyError: 'for this test'")
    assert "in fail" in said[-1]["traceback"]


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    broken, keys = tmp_path / "broken.gguf", tmp_path / "keys"
    broken.write_bytes(b"GGUF but no more")
    keys.write_text("only-for-this-test\n")
    keys.chmod(0o644)
    outcome = call("serve", broken, "--port", "0", "--host", "0.0.0.0", "--api-key-file", keys)
    assert outcome.code == 2
    assert f"prolepsis: error: {broken}" in outcome.err
    assert "WARNING" not in outcome.err
    assert "chmod 600" in outcome.err
    assert "only-for-this-test" not in outcome.err


def test_an_address_that_is_taken_is_named(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = call("serve", tiny, "--port", str(port))
    assert_refused(outcome, f"cannot listen on 127.0.0.1, port {port}: Address already in use; choose another --port")


@pytest.mark.parametrize(("name", "part"), [("foo", "auto, static, linear"), ("twin-int8", "use linear or static")])
def test_a_predictor_that_no_store_takes_is_refused_without_a_store_too(tiny: Path, name: str, part: str) -> None:
    assert_refused(call("serve", tiny, "--store-predictor", name), name, part)
