"""The clients of the soak: what they ask, and what they have seen."""

import random
import time
from collections import Counter

import httpx
from soak_requests import BAD, Answer, Asked, Assembled, chats, completions, next_message, streamed, turn, whole

SEED = 8
CONVERSATIONS, TURNS = 12, 4
SESSIONS = 4


class Tale:
    """What the clients have seen."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.put_off: Counter[str] = Counter()
        """By path: how often the answer was 429 or 503."""
        self.answers: Counter[str] = Counter()
        self.cancelled = 0
        self.faults: list[str] = []

    def count(self, answer: httpx.Response, wanted: tuple[int, ...]) -> bool:
        """Whether the answer is the one that was hoped for; 503 and 429 are told of, and allowed."""
        self.statuses[answer.status_code] += 1
        if answer.status_code in wanted:
            return True
        if answer.status_code in (429, 503):
            self.put_off[answer.request.url.path] += 1
        else:
            self.faults.append(f"{answer.request.url}: {answer.status_code}")
        return False

    def compare(self, asked: Asked, found: Answer, expected: Answer) -> None:
        """An answer is to be the one that the same request got alone."""
        self.answers[asked.path] += 1
        if found != expected:
            self.faults.append(f"{asked}: {found}, alone {expected}")


class Catalogue:
    """Requests, and what each gets alone."""

    def __init__(self) -> None:
        self.plain: list[tuple[Asked, Answer]] = []
        self.conversations: list[list[tuple[Asked, Answer]]] = []

    async def fill(self, client: httpx.AsyncClient) -> None:
        """Ask a server, one request after the other."""
        for asked in completions(72, SEED):
            self.plain.append((asked, await self._ask(client, asked)))
        for number, messages in enumerate(chats(CONVERSATIONS, SEED)):
            turns = []
            for place in range(TURNS):
                asked = turn(list(messages), number + place)
                answer = await self._ask(client, asked)
                turns.append((asked, answer))
                said = answer[0]["text"] or str(answer[0]["calls"])
                messages += [{"role": "assistant", "content": said}, next_message(number * TURNS + place)]
            self.conversations.append(turns)

    @staticmethod
    async def _ask(client: httpx.AsyncClient, asked: Asked) -> Answer:
        answer = await client.post(asked.path, json=asked.body)
        assert answer.status_code == 200, (asked, answer.text)
        return whole(answer.json())


class Clients:
    """Ask until they are cancelled, each for itself."""

    def __init__(self, client: httpx.AsyncClient, catalogue: Catalogue, tale: Tale) -> None:
        self._client, self._catalogue, self._tale = client, catalogue, tale

    async def run(self, number: int, deadline: float) -> None:
        """One client."""
        source = random.Random(SEED * 1000 + number)
        acts = (self._plain, self._converse, self._cancel, self._bad, self._session, self._look)
        while time.monotonic() < deadline:
            [act] = source.choices(acts, (50, 15, 10, 10, 8, 2))
            await act(source)

    async def _plain(self, source: random.Random) -> None:
        await self._exchange(*source.choice(self._catalogue.plain), source)

    async def _converse(self, source: random.Random) -> None:
        for asked, expected in source.choice(self._catalogue.conversations):
            await self._exchange(asked, expected, source)

    async def _exchange(self, asked: Asked, expected: Answer, source: random.Random) -> None:
        # Neither makes a difference to the answer.
        [salt] = source.choices(("", "one", "another"), (8, 1, 1))
        body = {**asked.body, "cache_salt": salt, "priority": source.choice((0, 0, 0, 1, -1))}
        if asked.can_stream and source.random() < 0.5:
            async with self._client.stream("POST", asked.path, json={**body, "stream": True}) as answer:
                if self._tale.count(answer, (200,)):
                    assembled = Assembled()
                    async for chunk in streamed(answer):
                        assembled.add(chunk)
                    self._tale.compare(asked, assembled.answer, expected)
            return
        answer = await self._client.post(asked.path, json=body)
        if self._tale.count(answer, (200,)):
            self._tale.compare(asked, whole(answer.json()), expected)

    async def _cancel(self, source: random.Random) -> None:
        asked, _ = source.choice(self._catalogue.plain)
        body = {**asked.body, "stream": True, "best_of": None, "max_tokens": 500, "stop": []}
        left = source.randint(0, 20)
        async with self._client.stream("POST", asked.path, json=body) as answer:
            self._tale.count(answer, (200,))
            async for _ in answer.aiter_lines():
                left -= 1
                if left < 0:
                    self._tale.cancelled += 1
                    return

    async def _bad(self, source: random.Random) -> None:
        path, body = source.choice(BAD)
        if isinstance(body, bytes):
            answer = await self._client.post(path, content=body)
        else:
            answer = await self._client.post(path, json=body)
        if self._tale.count(answer, (400, 404, 422)):
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    async def _session(self, source: random.Random) -> None:
        id_ = f"session {source.randrange(SESSIONS)}"
        match source.randrange(4):
            case 0:
                asked, _ = source.choice(source.choice(self._catalogue.conversations))
                body = {"id": id_, "messages": asked.body["messages"]}
                self._tale.count(await self._client.post("/v1/sessions", json=body), (200,))
            case 1:
                self._tale.count(await self._client.post(f"/v1/sessions/{id_}/restore"), (200, 404))
            case 2:
                self._tale.count(await self._client.get("/v1/sessions"), (200,))
            case _:
                self._tale.count(await self._client.delete(f"/v1/sessions/{id_}"), (200, 404))

    async def _look(self, _: random.Random) -> None:
        for path in ("/v1/engine", "/metrics", "/health", "/v1/models"):
            self._tale.count(await self._client.get(path), (200,))
