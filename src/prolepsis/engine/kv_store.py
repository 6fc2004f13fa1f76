"""K and V of prefixes in the tiers of a store: found by token ids, compared before use, and never trusted."""

import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import NamedTuple, get_args

from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.cache_dtypes import KV
from prolepsis.coding.threads import pause
from prolepsis.engine import latest
from prolepsis.engine.kv_names import Names, SegmentName, latest_key, segment
from prolepsis.engine.kv_payload import PayloadCodec
from prolepsis.engine.llm import LLM
from prolepsis.engine.locating import Several, located
from prolepsis.engine.planner import Piece, Planner
from prolepsis.engine.profile_store import best_kept
from prolepsis.engine.profiles import PredictorKind
from prolepsis.engine.restore_plan import RestorePlan
from prolepsis.engine.store_statistics import Counter, StoreStatistics, labelled
from prolepsis.errors import InputError, ProfileMissingError, SegmentError
from prolepsis.store import Found, Located, Tiers

_MOST_UNREADABLE = 100_000  # keys; with them some 15 MB of memory

PREDICTORS = ("auto", "static", "linear")


class StoredPiece(NamedTuple):
    """What the store has of a prompt's segment: tokens `name.start` up to `stop` agree with the prompt."""

    name: SegmentName
    ids: list[int]
    """Token ids of all the segment."""
    stop: int
    piece: Piece


class StoredSegment(NamedTuple):
    """A segment that is in the store."""

    key: str
    tokens: int
    coded_bytes: int


class KVStore:
    """K and V of `llm`'s prefixes in `tiers`. Give it to `AsyncEngine`, which fills and reads it.

        store = KVStore(llm, open_tiers(["memory:512MiB", "disk:/var/lib/prolepsis:20GiB"]))
        async with AsyncEngine(llm, store=store) as engine: ...
        store.close()

    What is found is compared with the prompt's token ids, the model and its arithmetic, and every decoded value with
    a checksum; on any doubt it is deleted (but not where only its profile is not kept here), counted, and computed
    again. Any thread may use it. Other processes may share its tiers, if the tiers allow it.
    """

    def __init__(self, llm: LLM, tiers: Tiers, *, predictor: str = "auto") -> None:
        """predictor: what new segments are coded with: "static", "linear" (of the newest kept profile,
        `prolepsis calibrate`), or "auto": linear where it is kept and decoding takes at most a quarter of computing.

        Takes a second, and on a machine's first use longer: kernels are loaded that the first request would wait for.

        Raises InputError for an LLM with kv_evict or without prefix_caching, and for a predictor that cannot be used.
        """
        if llm.runner.eviction is not None:
            raise InputError(
                "a store keeps K and V of whole prefixes, and kv_evict drops some: leave out one of the two"
            )
        if llm.engine.prefix is None:
            raise InputError("a store continues the prefix cache: switch prefix_caching on, or leave out the store")
        self.tiers = tiers
        self.planner = Planner(llm.kv_cache.bytes_per_token, llm.model_bytes)
        self._cache, self._names, self._codec = llm.kv_cache, Names(llm), PayloadCodec(llm)
        self._linear = _linear_profile(llm, predictor)
        self._auto = predictor == "auto"
        self._count = Counter()
        self._unreadable: set[str] = set()  # without a lock: one too few or too many costs a look
        self._kept: frozenset[str] = frozenset()
        self._held: Counts[str] = Counts()
        self._lock = Lock()  # for _held
        known = tiers.statistics()
        # (label, kind) of each tier by its name, which is an address.
        self._labels = {tier.name: (shown.name, tier.kind) for tier, shown in zip(known, labelled(known), strict=True)}
        self._tier_kinds = [tier.kind for tier in known]
        self._slowest = known[-1].name if known else ""
        self.queued: Callable[[], int] = lambda: 0
        """How many segments wait to be stored, as far as that is known."""
        self._codec.warm_up(self._linear)

    @property
    def count(self) -> Counter:
        """Where those who fill and read the store count."""
        return self._count

    @property
    def predictor(self) -> str:
        """What new segments are coded with now."""
        return "static" if self._profile() is None else "linear"

    def statistics(self) -> StoreStatistics:
        """What was done so far; a copy. That of tiers: `tiers.statistics()`."""
        return replace(self._count.snapshot(), queued_segments=self.queued())

    def close(self) -> None:
        """Close the tiers. The AsyncEngine that uses the store must be closed before."""
        self.tiers.close()

    def keep(self, keys: frozenset[str]) -> None:
        """Segments that are not deleted although later ones hold all that they do: those of sessions."""
        self._kept = keys

    @contextmanager
    def holding(self, keys: Iterable[str]) -> Iterator[None]:
        """As `keep`, within the block, for segments that are about to be a session's."""
        held = list(keys)
        with self._lock:
            self._held.update(held)
        try:
            yield
        finally:
            with self._lock:
                self._held.subtract(held)
                self._held = +self._held

    def _is_kept(self, key: str) -> bool:
        with self._lock:
            return key in self._kept or key in self._held

    def names(self, tokens: Sequence[int], salt: str) -> list[SegmentName]:
        """The segments of a sequence, as far as they can be stored: of kivi4, whole blocks only."""
        return list(self._names.chain(tokens[: self._cache.readable(len(tokens))], salt))

    def located(self, name: SegmentName) -> StoredSegment | None:
        """A segment, if it is stored. Counts as a use: what is stored next does not push it out."""
        found = self._locate(name)
        if found is None:
            return None
        self.tiers.touch(name.key)
        return StoredSegment(name.key, name.stop - name.start, found.size)

    def used(self, segments: Iterable[StoredSegment]) -> None:
        """Let a sequence's segments, in order, be evicted from its end: without its beginning the rest is useless."""
        for stored in reversed(list(segments)):
            self.tiers.touch(stored.key)

    def look_up(
        self,
        tokens: Sequence[int],
        salt: str,
        held: int,
        abandoned: Callable[[], bool] = lambda: False,
        several: Several = map,
    ) -> list[StoredPiece]:
        """What continues the first `held` of `tokens`, in order: whole segments, and the beginning of a last one.

        abandoned: whether nobody waits for it any more; it ends then. several: `map`, or what calls in several threads.
        """
        pieces: list[StoredPiece] = []
        names = (name for name in self._names.chain(tokens, salt) if name.stop > held)
        for name, found in located(names, self._locate, several, abandoned):
            ids = list(tokens[name.start : name.stop])
            if found is None:
                return pieces + self._part(name.parent, name.start, ids, held)
            pieces.append(self._piece(name, ids, name.stop, max(name.start, held), found.tier, found.size))
        return pieces

    def _locate(self, name: SegmentName) -> Located | None:
        """Where a segment is, if it is stored and was not found to be unreadable."""
        if name.key in self._unreadable:
            return None
        begin = time.perf_counter()
        found = self.tiers.locate(name.key)
        if found is None or found.tier == self._slowest:
            self.planner.asked(time.perf_counter() - begin, self._tier_kinds)
        return found

    def not_worth_asking(self, tokens: Sequence[int], salt: str, held: int) -> RestorePlan | None:
        """A plan to compute what continues the first `held` of `tokens`, where to look it up would take longer.

        Not where one of the faster tiers has the next segment: only the slowest is what takes long.
        """
        refusal = self.planner.skip_look_up(held, len(tokens) - held, self._tier_kinds)
        if refusal is None:
            return None
        name = next(name for name in self._names.chain(tokens, salt) if name.stop > held)
        return None if self.tiers.locate(name.key, slowest=False) is not None else refusal

    def _part(self, parent: bytes, start: int, wanted: list[int], held: int) -> list[StoredPiece]:
        """A stored segment that begins as `wanted` does."""
        ids, agree = latest.best(self._latest(parent), wanted)
        stop = start + self._cache.readable(agree)
        if stop <= max(start, held):
            return []
        name = segment(parent, start, ids)
        found = self._locate(name)
        return [] if found is None else [self._piece(name, ids, stop, max(start, held), found.tier, found.size)]

    def _piece(self, name: SegmentName, ids: list[int], stop: int, first: int, tier: str, size: int) -> StoredPiece:
        return StoredPiece(name, ids, stop, Piece(*self._labels[tier], size, stop - first))

    def _latest(self, parent: bytes) -> list[list[int]]:
        key = latest_key(parent)
        found = self.tiers.get(key)
        if found is None:
            return []
        self._fetched(found)
        try:
            return latest.read(found.data)
        except ValueError:
            self._count.add(damaged_segments=1)
            self.tiers.delete(key)
            return []

    def fetch(self, piece: StoredPiece) -> bytes | None:
        """The stored bytes, or None where no tier gives them back."""
        found = self.tiers.get(piece.name.key)
        if found is None:
            self._count.add(lost_segments=1)
            return None
        self._fetched(found)
        self._count.add(restore_seconds=found.seconds)
        return found.data

    def _fetched(self, found: Found) -> None:
        self.planner.fetched(*self._labels[found.tier], len(found.data), found.seconds)

    def decode(self, data: bytes, piece: StoredPiece) -> tuple[KV, str] | None:
        """(K and V of the segment, predictor); None for bytes that cannot be used.

        They are deleted, unless it is only that their profile is not kept here: others may have it.
        """
        begin = time.perf_counter()
        try:
            kv, predictor = self._codec.decode(data, piece.name, piece.ids)
        except ProfileMissingError:
            self._count.add(unreadable_segments=1)
            self._unreadable.add(piece.name.key)
            return None
        except SegmentError:
            self._count.add(damaged_segments=1)
            self.tiers.delete(piece.name.key)
            return None
        seconds = time.perf_counter() - begin
        self.planner.decoded(predictor, len(piece.ids), seconds)
        self._count.add(restore_seconds=seconds)
        return kv, predictor

    def broke_off(self, pieces: Sequence[StoredPiece]) -> None:
        """The first of these could not be restored. If it is unreadable, so are most likely the rest.

        All of them are stored anew then when they have been computed, where else each request would find one more.
        """
        if len(self._unreadable) > _MOST_UNREADABLE:
            self._unreadable.clear()
        if pieces[0].name.key in self._unreadable:
            self._unreadable.update(piece.name.key for piece in pieces)

    def restored(self, piece: StoredPiece) -> None:
        """Count a piece as written into the pool."""
        self._count.add(
            restored_segments=1,
            restored_tokens=piece.piece.tokens,
            restored_raw_bytes=piece.piece.tokens * self._cache.bytes_per_token,
            restored_coded_bytes=piece.piece.size,
        )

    def put(self, name: SegmentName, ids: Sequence[int], kv: KV) -> StoredSegment | None:
        """Code a segment and store it; None where no tier took it."""
        begin = time.thread_time()
        data = self._codec.encode(name, ids, kv, self._profile())
        self._count.add(encode_seconds=time.thread_time() - begin)
        pause()
        if not self.tiers.put(name.key, data, final=True).tiers:
            self._count.add(refused_segments=1)
            return None
        self._unreadable.discard(name.key)
        self._remember(name, ids)
        self._count.add(
            stored_segments=1,
            stored_tokens=len(ids),
            stored_raw_bytes=len(ids) * self._cache.bytes_per_token,
            stored_coded_bytes=len(data),
        )
        return StoredSegment(name.key, len(ids), len(data))

    def _remember(self, name: SegmentName, ids: Sequence[int]) -> None:
        known = self._latest(name.parent)
        self.tiers.put(latest_key(name.parent), latest.with_latest(known, ids))
        for old in latest.superseded(known, ids, name.parent, name.start):
            if not self._is_kept(old.key):
                self.tiers.delete(old.key)

    def _profile(self) -> AnyProfile | None:
        """None: one measured on each segment, and kept in it."""
        return self._linear if not self._auto or self.planner.is_worth("linear") else None


def check_predictor(name: str) -> None:
    """Raise InputError for one that cannot code segments."""
    if name in PREDICTORS:
        return
    if name in get_args(PredictorKind):
        raise InputError(
            f"{name} builds on all tokens before a segment, so what is stored by segments cannot be coded "
            "with it: use linear or static"
        )
    raise InputError(f"the store's predictor must be one of {', '.join(PREDICTORS)}, not {name!r}")


def _linear_profile(llm: LLM, predictor: str) -> AnyProfile | None:
    check_predictor(predictor)
    if predictor == "static":
        return None
    skipped: list[str] = []
    kept = best_kept(llm, llm.kv_cache.dtype, skipped.append, ("linear",))
    if kept is None and predictor == "linear":
        why = f" ({skipped[0]})" if skipped else ""
        raise InputError(f"no linear profile is kept for this model and KV dtype{why}: run `prolepsis calibrate`")
    return None if kept is None else kept.profile
