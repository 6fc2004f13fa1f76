"""Load for a server that speaks OpenAI's API: streams of completions, and when each of their tokens came."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

PERCENTILES = (50, 95, 99)


@dataclass
class Told:
    """One request as its client saw it. Times are those of `time.perf_counter`."""

    asked: float
    times: list[float] = field(default_factory=list)
    """When each piece of text came: a token, or several that make up a character."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""


class Client:
    """Asks one server. The least that HTTP needs, so that the load costs the machine little."""

    def __init__(self, port: int, model: str, extra: dict[str, Any]) -> None:
        """extra: fields of every body that this server needs to go on for as long as it is asked to."""
        self._port, self._model, self._extra = port, model, extra

    @property
    def url(self) -> str:
        """Where the server is."""
        return f"http://127.0.0.1:{self._port}"

    async def ask(self, prompt: str, tokens: int, told: Told, **fields: Any) -> None:
        """Stream a completion of so many tokens into `told`; `fields` go into the body too."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
            **fields,
        }
        try:
            async for event in self._events(json.dumps(body).encode()):
                _take(event, told)
        except (OSError, ValueError) as error:
            told.error = told.error or str(error)
        told.output_tokens = told.output_tokens or len(told.times)

    async def _events(self, body: bytes) -> AsyncIterator[dict[str, Any]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        try:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise ValueError(f"{status.decode().strip()}: {(await reader.read(2000)).decode(errors='replace')}")
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
        finally:
            writer.close()


def _take(event: dict[str, Any], told: Told) -> None:
    if "error" in event:
        raise ValueError(str(event["error"]))
    usage = event.get("usage")
    if usage:
        told.prompt_tokens, told.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        told.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    text = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
    if text:
        told.times.append(time.perf_counter())
        told.text += text


Ask = Callable[[Told], Coroutine[Any, Any, None]]


async def closed_loop(ask: Ask, clients: int, seconds: float) -> tuple[list[Told], float]:
    """So many clients, each of which asks again once it is answered. Returns what they saw, and when time was up.

    What still runs then is broken off.
    """
    all_told: list[Told] = []

    async def one() -> None:
        while True:
            told = Told(time.perf_counter())
            all_told.append(told)
            await ask(told)
            if told.error:
                return

    tasks = [asyncio.create_task(one()) for _ in range(clients)]
    await asyncio.wait(tasks, timeout=seconds)
    return all_told, await _break_off(tasks)


async def open_loop(ask: Ask, rate: float, seconds: float, seed: int) -> tuple[list[Told], float]:
    """Requests that arrive at `rate` a second, by a Poisson process, whatever became of those before. See above."""
    all_told: list[Told] = []
    tasks: list[asyncio.Task[None]] = []
    source, start, arrival = random.Random(seed), time.perf_counter(), 0.0
    while (arrival := arrival + source.expovariate(rate)) < seconds:
        await asyncio.sleep(max(start + arrival - time.perf_counter(), 0))
        all_told.append(Told(start + arrival))
        tasks.append(asyncio.create_task(ask(all_told[-1])))
    await asyncio.sleep(max(start + seconds - time.perf_counter(), 0))
    return all_told, await _break_off(tasks)


async def _break_off(tasks: Sequence["asyncio.Task[None]"]) -> float:
    now = time.perf_counter()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return now


def figures(all_told: Sequence[Told], begin: float, end: float) -> dict[str, Any]:
    """What to report of requests. Who had no first token at the end has waited so far: that counts as TTFT."""
    sound = [told for told in all_told if not told.error]
    pieces = sum(len(told.times) for told in sound)
    # Several tokens may come as one piece; of requests that ended, the server says how many there were.
    ended = [told for told in sound if told.output_tokens and told.times]
    per_piece = fmean(told.output_tokens / len(told.times) for told in ended) if ended else 1.0
    first = [(told.times[0] if told.times else end) - told.asked for told in sound]
    between = [later - earlier for told in sound for earlier, later in zip(told.times, told.times[1:], strict=False)]
    return {
        "requests": len(all_told),
        "failed": len(all_told) - len(sound),
        "tokens/s": pieces * per_piece / (end - begin),
        **{f"TTFT p{p} ms": value for p, value in _percentiles(first)},
        **{f"ITL p{p} ms": value for p, value in _percentiles(between)},
    }


def _percentiles(seconds: Sequence[float]) -> list[tuple[int, float | None]]:
    return [(p, float(np.percentile(seconds, p)) * 1000 if seconds else None) for p in PERCENTILES]
