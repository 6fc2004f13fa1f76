"""A server that is killed at any moment, again and again, over one store: what it answers never changes."""

import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer

import httpx
import pytest
from server_process import ServerProcess

from prolepsis import LLM, SamplingParams

ROUNDS, TALKS, TOKENS = 10, 6, 24


def _prompt(talk: int) -> str:
    return f"Talk {talk}: once upon a time there was a cache that kept what it had seen. " * (8 + 3 * talk)


def _ask(url: str, talk: int) -> str | None:
    """The answer, or None if the server was killed meanwhile."""
    body = {"prompt": _prompt(talk), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    except httpx.TransportError:
        return None
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def _save(url: str, number: int) -> bool:
    """Whether the server said that it has kept a session. If it was killed before, it may or may not have."""
    body = {"id": f"round {number}", "prompt": _prompt(number % TALKS)}
    try:
        return httpx.post(f"{url}/v1/sessions", json=body, timeout=60).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.nightly
def test_answers_and_sessions_survive_kills_at_any_moment(tiny: Path, tmp_path: Path, tiny_llm: LLM) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    expected = [done.text for done in tiny_llm.generate([_prompt(talk) for talk in range(TALKS)], params)]
    chance = random.Random(8)
    kept: set[int] = set()
    answered = 0
    for number in range(ROUNDS):
        flags = ("--store", "memory:1MiB", "--store", f"disk:{tmp_path}:4MiB", "--kv-memory", "3MiB")
        with ServerProcess(tiny, *flags).await_ready() as server, ThreadPoolExecutor(4) as pool:
            url = server.url
            there = {each["id"] for each in httpx.get(f"{url}/v1/sessions").json()["data"]}
            assert there >= {f"round {each}" for each in kept}
            if number == 0:
                assert _save(url, number)
                kept.add(number)
            killer = Timer(chance.uniform(0.05, 6), server.signal, [signal.SIGKILL])
            killer.start()
            talks = [chance.randrange(TALKS) for _ in range(16)]
            answers = pool.map(lambda talk, url=url: _ask(url, talk), talks)
            if _save(url, number):
                kept.add(number)
            for talk, answer in zip(talks, answers, strict=True):
                assert answer in (None, expected[talk])
                answered += answer is not None
            killer.join()
            assert server.wait() == -signal.SIGKILL
    assert answered > 0
    with ServerProcess(tiny, "--store", f"disk:{tmp_path}:4MiB").await_ready() as server:
        for number in kept:
            path = f"{server.url}/v1/sessions/round {number}"
            assert httpx.get(path).json()["prompt"].endswith(_prompt(number % TALKS))
            assert httpx.post(f"{path}/restore", timeout=60).status_code == 200
        assert [_ask(server.url, talk) for talk in range(TALKS)] == expected
