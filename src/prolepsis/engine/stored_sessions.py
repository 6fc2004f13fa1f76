"""Conversations kept in a store: their messages and token ids as a manifest, their K and V as pinned segments."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from threading import RLock
from typing import Any

from prolepsis.engine import session_manifest
from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.engine.identity import identity
from prolepsis.engine.kv_names import latest_key
from prolepsis.engine.kv_store import StoredSegment
from prolepsis.engine.restore_plan import RestorePlan
from prolepsis.engine.session_manifest import SessionSummary, StoredPart, StoredSession, key_of
from prolepsis.engine.store_writer import SavedChain
from prolepsis.errors import CapacityError, InputError, SegmentError, TierError

MAX_SESSIONS = 1000
"""Of one owner."""
_TRIES = 3
"""That get no further: in a crowded pool, or full tiers, what was computed may be gone before it is stored or kept."""


class _PartGoneError(CapacityError):
    """What was stored a moment ago was found damaged, or its tier does not answer."""


class StoredSessions:
    """The sessions in `engine.store`, of all owners. They are found again after a restart, and never evicted.

    An owner is any text, the hash of an API key say; nobody finds a session under another's. Its K and V are
    those of requests with that `cache_salt`, so a conversation that goes on from it is restored like any other prompt.
    Coroutines of one event loop; what waits for tiers waits in threads.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        """Reads the manifests that are there. Raises InputError for an engine without a store."""
        if engine.store is None:
            raise InputError("sessions are kept in a store, and the engine has none")
        self._engine, self._store = engine, engine.store
        self._known: dict[str, SessionSummary] = {}
        self._lock = RLock()  # for _known, and for the pins and kept segments that follow from it
        self._refresh()
        # Where a process ended between two steps, pins are left over.
        if all(tier.available for tier in self._store.tiers.statistics()):
            for key in self._store.tiers.pinned() - self._known.keys() - self._used():
                self._store.tiers.unpin(key)

    async def save(
        self,
        owner: str,
        session_id: str,
        messages: Many[Mapping[str, Any]],
        tokens: Many[int],
        *,
        cache_salt: str | None = None,
    ) -> StoredSession:
        """Keep a conversation, in place of what the owner has under this id. Its K and V are computed if need be.

        tokens: ids of the whole conversation, as the model has read and written it. cache_salt: of the requests that
        it comes from, by default the owner. Raises InputError for what cannot be kept, CapacityError where the pool
        cannot hold the conversation until it is stored, or the store has no room.
        """
        key = key_of(owner, session_id)
        ids = self._engine.llm.encode(list(tokens))
        salt = owner if cache_salt is None else cache_salt
        await asyncio.to_thread(self._require_place, owner, key)
        with self._store.holding(name.key for name in self._store.names(ids, salt)):
            tries = _TRIES
            while True:
                saved = await self._stored(ids, salt)
                try:
                    return await asyncio.to_thread(self._write, owner, session_id, messages, ids, salt, saved.segments)
                except _PartGoneError:
                    tries -= 1
                    if not tries:
                        raise

    async def inspect(self, owner: str, session_id: str) -> StoredSession | None:
        """All that is kept of a session but its K and V; None where there is none of this id.

        Raises TierError where it was not found, but a tier that does not answer may have it.
        """
        return await asyncio.to_thread(self._find, key_of(owner, session_id))

    async def restore(
        self, owner: str, session_id: str, *, cache_salt: str | None = None
    ) -> tuple[StoredSession, RestorePlan | None] | None:
        """A session, with its K and V brought into the pool for the request that goes on with it, if they are worth it.

        cache_salt: of that request, by default the one that the session was saved with.
        The plan says what was restored; it is None where the pool had them. Returns None where there is no such
        session. Raises SegmentError for one of another model, and TierError as `inspect` does.
        """
        session = await self.inspect(owner, session_id)
        if session is None:
            return None
        if session.model != identity(self._engine.llm):
            raise SegmentError(f"the session {session_id!r} was saved with another model: {session.model}")
        tokens = self._engine.llm.encode(session.tokens)
        return session, await self._engine.prefetch(tokens, session.cache_salt if cache_salt is None else cache_salt)

    async def list(self, owner: str) -> Many[SessionSummary]:
        """The owner's sessions, the latest first."""
        return await asyncio.to_thread(self._list, owner)

    async def delete(self, owner: str, session_id: str) -> bool:
        """Delete a session, and the segments that no other session has. False: there is none of this id.

        Raises TierError where a tier does not answer, which might bring the session back: it is to be tried again.
        """
        return await asyncio.to_thread(self._delete, key_of(owner, session_id))

    async def _stored(self, tokens: Many[int], salt: str) -> SavedChain:
        saved = await self._engine.store_now(tokens, salt)
        most, tries = len(saved.segments), _TRIES
        while not saved.whole and tries:
            saved = await self._engine.compute_and_store(tokens, salt, len(saved.segments))
            tries = _TRIES if len(saved.segments) > most else tries - 1
            most = max(most, len(saved.segments))
        if not saved.whole:
            raise CapacityError(
                f"only {sum(part.tokens for part in saved.segments)} of {len(tokens)} tokens could be stored: give the "
                "KV cache or the store's tiers more room, or try again with fewer requests running"
            )
        return saved

    def _require_place(self, owner: str, key: str) -> None:
        with self._lock:
            owned = sum(summary.owner == owner for known, summary in self._known.items() if known != key)
        if owned >= MAX_SESSIONS:
            raise InputError(f"there are {owned} sessions, the most that are kept: delete one")

    def _write(
        self,
        owner: str,
        session_id: str,
        messages: Many[Mapping[str, Any]],
        tokens: Many[int],
        salt: str,
        segments: Iterable[StoredSegment],
    ) -> StoredSession:
        parts = [StoredPart(*segment) for segment in segments]
        llm = self._engine.llm
        keys = [part.key for part in parts]
        raw = sum(part.tokens for part in parts) * llm.kv_cache.bytes_per_token
        key = key_of(owner, session_id)
        with self._lock:
            before = self._known.get(key)
            pinned = self._pin(keys)
            session = StoredSession(
                1, owner, session_id, time.time(), identity(llm), [dict(message) for message in messages], list(tokens),
                parts, raw, pinned, salt,
            )  # fmt: skip
            try:
                if not all(self._store.tiers.locate(part) for part in keys):
                    raise _PartGoneError(
                        "a part of the session is gone from the store's tiers: try again, or give them more room"
                    )
                if not self._store.tiers.put(key, session_manifest.pack(session), pinned=True, by_others=True).tiers:
                    raise CapacityError("no tier of the store has room for the session's manifest")
            except BaseException:
                self._unpin(set(keys))
                raise
            self._known[key] = session.summary
            if before is not None:
                self._unpin(set(before.keys))
            self._tell()
        return session

    def _find(self, key: str) -> StoredSession | None:
        session = self._read(key)
        if session is None:
            self._require_answers(key)
        return session

    def _read(self, key: str) -> StoredSession | None:
        found = self._store.tiers.get(key, by_others=True)
        if found is None:
            return None
        try:
            return session_manifest.unpack(found.data, key)
        except SegmentError:
            self._store.count.add(damaged_segments=1)
            self._store.tiers.delete(key)
            return None

    def _list(self, owner: str) -> Many[SessionSummary]:
        self._refresh(owner)
        with self._lock:
            mine = [summary for summary in self._known.values() if summary.owner == owner]
        return sorted(mine, key=lambda summary: summary.created, reverse=True)

    def _refresh(self, owner: str | None = None) -> None:
        """Know the sessions that are there, those of other processes too, and forget those that others deleted.

        owner: whose sessions are read again, where other processes may have saved others under their ids.
        """
        tiers = self._store.tiers
        there = set(tiers.keys("session"))
        with self._lock:
            before = self._known.copy()
        again = {key for key, summary in before.items() if tiers.shared and summary.owner == owner}
        wanted = there & again | there - before.keys()
        read = {key: session.summary for key in wanted if (session := self._read(key)) is not None}
        with self._lock:
            for key, summary in read.items():
                known = self._known.get(key)
                if summary == known or known is not before.get(key) or tiers.locate(key) is None:
                    continue  # nothing new, or it was saved or deleted meanwhile
                self._known[key] = summary
                # Pins are missing where a process ended between two steps, or the index of a directory was lost.
                self._pin([key, *summary.keys])
                self._unpin(set() if known is None else set(known.keys))
            for key in self._known.keys() - there:
                if tiers.lacks(key):
                    self._unpin(set(self._known.pop(key).keys))
            self._tell()

    def _delete(self, key: str) -> bool:
        tiers = self._store.tiers
        with self._lock:
            self._require_answers(key)
            self._refresh()  # others may have saved what shares segments with it
            session = self._read(key)
            self._require_answers(key)
            deleted = tiers.delete(key)
            summary = self._known.pop(key, None)
            if summary is not None:
                others = () if session is None else session.summary.keys  # of what another process saved in its place
                self._delete_segments({*summary.keys, *others}, session)
                self._tell()
        if not deleted:
            raise TierError("a tier of the store failed to delete the session: try again")
        return summary is not None

    def _require_answers(self, key: str) -> None:
        """Raise TierError where a tier cannot say whether it has a session."""
        if not self._store.tiers.answer(key):
            raise TierError("a tier of the store does not answer, and may have the session: try again")

    def _delete_segments(self, mine: set[str], session: StoredSession | None) -> None:
        self._unpin(mine)
        gone = mine - self._used()
        if session is not None:
            for name in self._store.names(session.tokens, session.cache_salt):
                if name.key in gone:  # the record has their token ids
                    self._store.tiers.delete(latest_key(name.parent))
        for part in gone:
            self._store.tiers.delete(part)

    def _used(self) -> set[str]:
        """Segments of all sessions."""
        return {part for summary in self._known.values() for part in summary.keys}

    def _tell(self) -> None:
        self._store.keep(frozenset(self._used()))

    def _pin(self, keys: Iterable[str]) -> bool:
        pinned = [self._store.tiers.pin(key) for key in keys]  # all of them, whatever becomes of one
        return all(pinned)

    def _unpin(self, keys: set[str]) -> None:
        """Of those that no session has any more."""
        for key in keys - self._used():
            self._store.tiers.unpin(key)
