"""The engine as it is now: /v1/engine as one JSON object, /v1/engine/events as one a second (server-sent events).

However many pages are open, one view a second is taken, in the engine's thread between two passes. Each event is a
`data:` line with the same object as /v1/engine (`tests/data/engine_view.json` is one). Times are in seconds:

    phase         "loading", "ready" or "draining"; the stream ends with the first event that says "draining"
    model         what clients call it
    max_context   tokens a sequence may have
    at            when the view was taken, on a clock that only goes forward: rates are differences of two views
    uptime_s      since the server was started
    refused       how many requests have found the queue full
    engine        null while the model is loading, else:
      running       the requests that hold blocks, in their order: number (its own for ever), priority, prompt_tokens,
                    cached_tokens (of the prompt, found in a cache), output_tokens (0: it still reads its prompt),
                    held_tokens, sequences, age_s, preemptions
      waiting       how many more there are
      ended         how many have ended, by "stop", "length", "abort" (cancelled) and "error"
      pool          the paged cache: dtype, block_size (tokens), block_bytes, blocks,
                    counts (blocks by state), usage (share of the blocks that are used or shared),
                    slack (share of the slots in those that hold no token),
                    states: the names of the states, ["blank", "cached", "used", "shared"],
                    runs: the blocks in order, as [how many, index of their state, owner]; the owner is the `number` of
                    the running request that alone holds them, or null
      work          since the start: passes, computed_tokens (rows run), prompt_tokens (of prompts that were read),
                    cached_tokens (those of them that were found in a cache), generation_tokens, busy_s, preemptions,
                    recomputed_tokens, evicted_tokens, waste (mean slack)
      swap          null where preempted requests are computed again, else what left the pool:
                    raw_bytes, coded_bytes (of all so far), memory_bytes, disk_bytes (coded, now), refused
      drafts        null where nobody drafts, else: drafter, failure (null, or why it has stopped), rounds,
                    drafted_at, accepted_at and acceptance (one for each place in a draft)
    store         null where there is none, else:
      tiers         fastest first, each as `prolepsis.store.watched_tier.TierStatistics`, by its kind for
                    a name ("disk", a second one "disk_2")
      segments      `prolepsis.engine.store_statistics.StoreStatistics`: what was stored and restored, with the ratio of
                    raw to coded bytes, and `decisions`: prompts by why they were restored or computed
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse

from prolepsis.engine.kv_store import KVStore
from prolepsis.engine.snapshot import NOBODY, BlockState, EngineSnapshot, PoolSnapshot, take
from prolepsis.engine.store_statistics import StoreStatistics, labelled
from prolepsis.errors import ProlepsisError
from prolepsis.serve.state import Phase, ServerState
from prolepsis.store.watched_tier import TierStatistics

router = APIRouter()
INTERVAL = 1.0
"""Seconds from one event to the next."""
MAX_AGE = 0.25
"""A view this old, in seconds, still serves who asks."""
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class StoreView(NamedTuple):
    """The store at one moment."""

    tiers: list[TierStatistics]
    """Fastest first, as `labelled` names them."""
    segments: StoreStatistics


class View(NamedTuple):
    """The server at one moment."""

    phase: Phase
    model: str
    max_context: int | None
    at: float
    """`time.monotonic`."""
    uptime_s: float
    refused: int
    """Requests that found the queue full, so far."""
    engine: EngineSnapshot | None
    """None while the model is loading."""
    store: StoreView | None
    """None where there is none, or not yet."""


class _Event(NamedTuple):
    data: bytes
    is_last: bool


class Live:
    """Takes views of a server for all who ask, one at a time. Of one event loop."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._began = time.monotonic()
        self._taking: asyncio.Task[View] | None = None
        self._listeners = 0
        self._ticker: asyncio.Task[None] | None = None
        self._next: asyncio.Future[_Event] | None = None

    async def view(self) -> View:
        """A view that is not older than MAX_AGE. Raises ProlepsisError once the engine is closed."""
        if self._taking is None or self._is_old(self._taking):
            self._taking = asyncio.create_task(self._take())
        # Whoever is cancelled leaves it to the others.
        return await asyncio.shield(self._taking)

    async def events(self) -> AsyncIterator[bytes]:
        """An event at once, and then one each second, until the server shuts down."""
        self._listeners += 1
        try:
            event = _event(await self.view())
            yield event.data
            while not event.is_last:
                event = await asyncio.shield(self._following())
                yield event.data
        except ProlepsisError:  # the engine is closed
            return
        finally:
            self._listeners -= 1

    @staticmethod
    def _is_old(task: "asyncio.Task[View]") -> bool:
        if not task.done():
            return False
        return task.exception() is not None or time.monotonic() - task.result().at > MAX_AGE

    async def _take(self) -> View:
        state = self._state
        engine = state.engine
        phase = state.phase
        snapshot = None if engine is None else await engine.call(lambda: take(engine.llm.engine))
        now = time.monotonic()
        return View(
            phase=phase,
            model=state.model_name,
            max_context=None if engine is None else engine.llm.max_context,
            at=now if snapshot is None else snapshot.at,
            uptime_s=now - self._began,
            refused=state.admission.refused + state.texts.refused,
            engine=snapshot,
            store=None if engine is None or engine.store is None else await asyncio.to_thread(_look_at, engine.store),
        )

    def _following(self) -> "asyncio.Future[_Event]":
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.create_task(self._tick())
        return self._next

    async def _tick(self) -> None:
        """Tell the listeners once a second, as long as there are any."""
        while self._listeners:
            await asyncio.sleep(INTERVAL)
            try:
                event = _event(await self.view())
            except Exception as error:
                self._tell(error)
                return
            self._tell(event)

    def _tell(self, what: "_Event | Exception") -> None:
        waiting, self._next = self._next, None
        if waiting is None or waiting.done():
            return
        if isinstance(what, Exception):
            waiting.set_exception(what)
        else:
            waiting.set_result(what)


def live(request: Request) -> Live:
    """That of the app that a request came to."""
    found: Live = request.app.state.live
    return found


@router.get("/v1/engine")
async def engine(live: Annotated[Live, Depends(live)]) -> Response:
    """The engine now."""
    return Response(msgspec.json.encode(document(await live.view())), headers=_HEADERS, media_type="application/json")


@router.get("/v1/engine/events")
async def events(live: Annotated[Live, Depends(live)]) -> StreamingResponse:
    """The engine, each second."""
    return StreamingResponse(live.events(), headers=_HEADERS, media_type="text/event-stream")


def document(view: View) -> dict[str, Any]:
    """A view as JSON has it (see above)."""
    return {
        **view._asdict(),
        "engine": None if view.engine is None else _engine(view.engine),
        "store": None if view.store is None else _store(view.store),
    }


def _event(view: View) -> _Event:
    return _Event(b"data: " + msgspec.json.encode(document(view)) + b"\n\n", view.phase == "draining")


def _look_at(store: KVStore) -> StoreView:
    return StoreView(list(labelled(store.tiers.statistics())), store.statistics())


def _store(view: StoreView) -> dict[str, Any]:
    return {
        "tiers": [asdict(tier) for tier in view.tiers],
        "segments": {**asdict(view.segments), "ratio": view.segments.ratio},
    }


def _engine(snapshot: EngineSnapshot) -> dict[str, Any]:
    now, traffic, swap = snapshot.statistics, snapshot.traffic, snapshot.swap
    return {
        "running": [request._asdict() for request in snapshot.running],
        "waiting": now.waiting,
        "ended": traffic.ended,
        "pool": _pool(snapshot.pool),
        "work": {
            "passes": now.passes,
            "computed_tokens": now.computed_tokens,
            "prompt_tokens": traffic.prompt_tokens,
            "cached_tokens": traffic.cached_tokens,
            "generation_tokens": traffic.generation_tokens,
            "busy_s": now.busy_s,
            "preemptions": now.preemptions,
            "recomputed_tokens": now.recomputed_tokens,
            "evicted_tokens": now.evicted_tokens,
            "waste": now.waste,
        },
        "swap": None
        if swap is None
        else {
            "raw_bytes": swap.raw_bytes,
            "coded_bytes": swap.coded_bytes,
            "memory_bytes": swap.memory_bytes,
            "disk_bytes": swap.disk_bytes,
            "refused": now.refused_swaps,
        },
        "drafts": None if snapshot.drafter is None else _drafts(snapshot),
    }


def _drafts(snapshot: EngineSnapshot) -> dict[str, Any]:
    drafts = snapshot.statistics.drafts
    return {
        "drafter": snapshot.drafter,
        "failure": snapshot.drafter_failure,
        "rounds": drafts.rounds,
        "drafted_at": drafts.drafted_at,
        "accepted_at": drafts.accepted_at,
        "acceptance": drafts.acceptance,
    }


def _pool(pool: PoolSnapshot) -> dict[str, Any]:
    return {
        "dtype": pool.dtype,
        "block_size": pool.block_size,
        "block_bytes": pool.block_bytes,
        "blocks": len(pool.states),
        "counts": {state.name.lower(): pool.count(state) for state in BlockState},
        "usage": pool.usage,
        "slack": pool.slack,
        "states": [state.name.lower() for state in BlockState],
        "runs": _runs(pool),
    }


def _runs(pool: PoolSnapshot) -> list[tuple[int, int, int | None]]:
    """Blocks that follow each other and are alike, as (how many, state, owner)."""
    differ = (np.diff(pool.states) != 0) | (np.diff(pool.owners) != 0)
    first = np.concatenate(([0], np.flatnonzero(differ) + 1))
    counts = np.diff(np.append(first, len(pool.states)))
    owners = [None if owner == NOBODY else owner for owner in pool.owners[first].tolist()]
    return list(zip(counts.tolist(), pool.states[first].tolist(), owners, strict=True))
