"""Restore K and V from a store, or compute them again? Whichever is faster, by what was measured so far."""

from collections.abc import Iterable
from threading import Lock
from typing import NamedTuple

from prolepsis.engine.restore_plan import Reason, RestorePlan

WORTH_OF_RECOMPUTE = 0.25
"""A predictor is worth its smaller segments where restoring takes at most this share of computing."""

_FORGET = 0.3  # weight of the newest measurement
# The first decoding of a process may compile for half a minute. What it counts at most, in times of what was expected:
# restores that look too slow are not tried again, and would never be found to be fast.
_RISE = 4.0
_DOUBT = 0.05  # how far a measurement goes back to the guess each time a prompt is not restored because of it
_LOOK_UP = 2  # questions, one after the other: a segment, and what is known that begins alike
_SMALL = 1 << 16  # bytes below which a fetch measures latency, and not bandwidth


class TierSpeed(NamedTuple):
    """latency: seconds a request. bandwidth: bytes a second."""

    latency: float
    bandwidth: float


# What a tier of a kind is taken for until it was measured: ordinary hardware, on the slow side.
_GUESSES = {
    "memory": TierSpeed(1e-5, 4e9),
    "disk": TierSpeed(1e-3, 4e8),
    "redis": TierSpeed(2e-3, 1.5e8),
    "remote": TierSpeed(5e-2, 5e7),
}
_DECODED_BYTES = {"static": 2.5e8, "marginal": 2.5e8, "linear": 6e7}  # raw bytes a second, of one thread
_PREFILL_BYTES = 2.5e10  # bytes of weights that rows meet in a second: what a core or two do with 4 bits a weight


class Piece(NamedTuple):
    """A stored segment, or part of one, that could be restored. tokens: how many of it; size: its bytes."""

    tier: str
    kind: str
    size: int
    tokens: int


class Planner:
    """Learns how fast tiers, decoding and computing are, and decides. Any thread may use it.

    Until something was measured it is guessed: a tier by its kind, decoding by the predictor, computing by the size of
    the model.
    """

    def __init__(self, token_bytes: int, model_bytes: int) -> None:
        """token_bytes: raw K and V of a token. model_bytes: size of the weights, all of which meet every token."""
        self._token_bytes = token_bytes
        self._prefill = model_bytes / _PREFILL_BYTES
        self._tiers: dict[str, TierSpeed] = {}
        self._decode: dict[str, float] = {}
        self._question: float | None = None  # seconds
        self._lock = Lock()  # for what is read, mixed and written back; each value is whole without it

    def skip_look_up(self, pool_tokens: int, missing: int, kinds: Iterable[str]) -> RestorePlan | None:
        """A plan to compute the `missing` tokens, where to ask tiers of these kinds for them takes longer; or None."""
        with self._lock:
            question, guess = self._question_s(kinds), _guessed_question(kinds)
            look_up, recompute = _LOOK_UP * question, missing * self.prefill_s
            if look_up < recompute:
                return None
            self._question = _mixed(question, guess, _DOUBT)
        return RestorePlan("recompute_is_faster", pool_tokens, restore_s=look_up, recompute_s=recompute)

    def asked(self, seconds: float, kinds: Iterable[str]) -> None:
        """All tiers of a store, which are of these kinds, have said whether they have a segment, in so many seconds."""
        with self._lock:
            before, weight = self._question_s(kinds), 1.0 if self._question is None else _FORGET
            self._question = _mixed(before, min(seconds, _RISE * before), weight)

    def _question_s(self, kinds: Iterable[str]) -> float:
        return _guessed_question(kinds) if self._question is None else self._question

    def decide(self, pool_tokens: int, pieces: list[Piece], predictor: str) -> RestorePlan:
        """Whether to restore `pieces`, which continue the `pool_tokens` first tokens of a prompt."""
        tokens = sum(piece.tokens for piece in pieces)
        if not pieces:
            return RestorePlan("nothing_stored", pool_tokens)
        restore, recompute = self.restore_s(pieces, predictor), tokens * self.prefill_s
        reason: Reason = "restore_is_faster" if restore < recompute else "recompute_is_faster"
        return RestorePlan(
            reason,
            pool_tokens,
            tokens,
            tier=pieces[0].tier,
            predictor=predictor,
            restore_s=restore,
            recompute_s=recompute,
        )

    def refused(self, pieces: list[Piece], predictor: str) -> None:
        """What was measured let these pieces be computed: trust it a little less.

        What is never tried again would never be found to have become fast.
        """
        with self._lock:
            self._decode[predictor] = _mixed(self.decode_s(predictor), self._guessed_decode_s(predictor), _DOUBT)
            for tier, kind in {(piece.tier, piece.kind) for piece in pieces}:
                now, guess = self.tier_speed(tier, kind), _guessed_speed(kind)
                self._tiers[tier] = TierSpeed(
                    _mixed(now.latency, guess.latency, _DOUBT), _mixed(now.bandwidth, guess.bandwidth, _DOUBT)
                )

    def restore_s(self, pieces: list[Piece], predictor: str) -> float:
        """Seconds that restoring takes: fetching one after the other, and decoding whole segments."""
        fetching = 0.0
        for piece in pieces:
            speed = self.tier_speed(piece.tier, piece.kind)
            fetching += speed.latency + piece.size / speed.bandwidth
        return fetching + self.decode_s(predictor) * sum(piece.tokens for piece in pieces)

    @property
    def prefill_s(self) -> float:
        """Seconds that computing a token of a prompt takes."""
        return self._prefill

    def decode_s(self, predictor: str) -> float:
        """Seconds that decoding a token takes."""
        return self._decode.get(predictor) or self._guessed_decode_s(predictor)

    def _guessed_decode_s(self, predictor: str) -> float:
        return self._token_bytes / _DECODED_BYTES.get(predictor, 1e8)

    def tier_speed(self, tier: str, kind: str) -> TierSpeed:
        """What a tier takes for a fetch."""
        return self._tiers.get(tier) or _guessed_speed(kind)

    def is_worth(self, predictor: str) -> bool:
        """Whether decoding with this predictor takes a small share of what computing takes."""
        return self.decode_s(predictor) <= WORTH_OF_RECOMPUTE * self.prefill_s

    def fetched(self, tier: str, kind: str, size: int, seconds: float) -> None:
        """A tier gave `size` bytes in so many seconds."""
        with self._lock:
            weight = _FORGET if tier in self._tiers else 1.0
            before = self.tier_speed(tier, kind)
            if size < _SMALL:
                latency = _mixed(before.latency, seconds, weight)
                self._tiers[tier] = before._replace(latency=latency)
                return
            bandwidth = size / max(seconds - before.latency, seconds / 10, 1e-9)
            self._tiers[tier] = before._replace(bandwidth=_mixed(before.bandwidth, bandwidth, weight))

    def decoded(self, predictor: str, tokens: int, seconds: float, certain: bool = False) -> None:
        """So many tokens were decoded in so many seconds. certain: kernels were loaded, and nothing else ran."""
        with self._lock:
            if certain:
                self._decode[predictor] = seconds / tokens
                return
            before, weight = self.decode_s(predictor), _FORGET if predictor in self._decode else 1.0
            self._decode[predictor] = _mixed(before, min(seconds / tokens, _RISE * before), weight)

    def prefilled(self, tokens: int, seconds: float, first: bool = False) -> None:
        """So many tokens of prompts were computed in so many seconds."""
        with self._lock:
            self._prefill = _mixed(self._prefill, seconds / tokens, 1.0 if first else _FORGET)


def _guessed_speed(kind: str) -> TierSpeed:
    return _GUESSES.get(kind, _GUESSES["remote"])


def _guessed_question(kinds: Iterable[str]) -> float:
    return sum(_guessed_speed(kind).latency for kind in kinds)


def _mixed(before: float, now: float, weight: float) -> float:
    return before + weight * (now - before)
