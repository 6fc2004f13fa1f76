"""The completions of one HTTP request, while they run."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from starlette.requests import Request

from prolepsis.engine.async_engine import Stream
from prolepsis.engine.completion import Completion, Delta
from prolepsis.engine.sampler import SampledToken
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.stopping import FinishReason
from prolepsis.serve.access_log import note_tokens
from prolepsis.serve.admission import claim
from prolepsis.serve.auth import tenant_of
from prolepsis.serve.presence import while_there
from prolepsis.serve.schemas import GenerationBody
from prolepsis.serve.state import ServerState


class News(NamedTuple):
    """What a choice has got since it was last looked at."""

    choice: int
    deltas: list[Delta]

    @property
    def text(self) -> str:
        """What may be shown."""
        return "".join([delta.text for delta in self.deltas])

    @property
    def tokens(self) -> list[SampledToken]:
        """Whatever their text is."""
        return [delta.token for delta in self.deltas]

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while more is to come."""
        return self.deltas[-1].finish_reason


@dataclass(eq=False)
class Generation:
    """Its choices, `params.samples` for each prompt, by index. Whoever begins one closes it, whatever happens."""

    request: Request
    state: ServerState
    streams: list[Stream]
    params: SamplingParams
    _news: "asyncio.Queue[News | Exception]" = field(default_factory=asyncio.Queue)
    _pumps: list["asyncio.Task[None]"] = field(default_factory=list)
    _open: int = 0
    _closed: bool = False

    @staticmethod
    async def begin(
        request: Request, state: ServerState, body: GenerationBody, prompts: Sequence[list[int]], params: SamplingParams
    ) -> "Generation":
        """What `request` asks for, with `prompts` and `params` made of its body. It is queued at the first `read`.

        Raises InputError for what the engine cannot do, and APIError 429 and 503 where nothing more may begin.
        """
        claim(request, len(prompts) * params.samples)
        engine = state.require_ready()
        salt = tenant_of(request).cache_salt(body.cache_salt)
        streams: list[Stream] = []
        for prompt in prompts:
            if streams:
                await asyncio.sleep(0)  # others wait for one prompt at most
            streams += engine.generate_samples(prompt, params, priority=body.priority, cache_salt=salt)
        for read in ("_body", "_json"):  # Starlette's: parsed, a body takes up to 25 times its size
            vars(request).pop(read, None)
        return Generation(request, state, streams, params)

    @property
    def completions(self) -> list[Completion]:
        """All there is so far."""
        return [stream.completion for stream in self.streams]

    def tokens(self) -> tuple[int, int, int]:
        """How many so far: of the prompts, each once; those of them that were in the cache; and of all outputs."""
        firsts = self.completions[:: self.params.samples]
        prompt, cached = sum(each.prompt_tokens for each in firsts), sum(each.cached_tokens for each in firsts)
        return prompt, cached, sum(len(each.token_ids) for each in self.completions)

    async def read(self) -> list[News]:
        """All news that are there by now, waiting for the first; none once every choice has ended.

        Raises what made one of them fail.
        """
        if len(self.streams) == 1:
            deltas = await self.streams[0].read()
            return [News(0, deltas)] if deltas else []
        if not self._pumps:
            self._open = len(self.streams)
            self._pumps = [asyncio.create_task(self._pump(*each)) for each in enumerate(self.streams)]
        if not self._open:
            return []
        news = [self._taken(await self._news.get())]
        while not self._news.empty():
            news.append(self._taken(self._news.get_nowait()))
        return news

    async def finish(self) -> list[Completion]:
        """Wait for the end of all. Raises APIError 499 once the client is gone."""
        try:
            await while_there(self.request, self._read_all())
        finally:
            self.close()
        return self.completions

    def close(self) -> None:
        """Stop what still runs, at once, and tell the observers. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        for pump in self._pumps:
            pump.cancel()
        note_tokens(self.request, *self.tokens())
        for stream in self.streams:
            stream.close()
            for observe in self.state.observers:
                observe(stream.completion)

    async def _read_all(self) -> None:
        while await self.read():
            pass

    async def _pump(self, index: int, stream: Stream) -> None:
        try:
            while deltas := await stream.read():
                self._news.put_nowait(News(index, deltas))
        except Exception as error:
            self._news.put_nowait(error)

    def _taken(self, item: News | Exception) -> News:
        if isinstance(item, Exception):
            raise item
        self._open -= item.finish_reason is not None
        return item
