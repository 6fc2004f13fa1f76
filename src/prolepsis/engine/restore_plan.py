"""Whether stored K and V of a prompt were restored, and why: what a request's statistics say of it."""

from dataclasses import dataclass
from typing import Any, Literal

Reason = Literal[
    "restore_is_faster",
    "recompute_is_faster",
    "nothing_stored",
    "timed_out",
    "damaged",
    "no_room",
    "failed",
    "cancelled",
]
"""restore_is_faster: it was restored. recompute_is_faster: it would have taken longer than computing it.
nothing_stored: the store knows no more than the pool. The others broke a restore off: timed_out (a tier is slow or
dead), damaged (bytes that are not those stored, gone, or of a profile that is not kept), no_room (the pool could not
keep it), failed (an error), cancelled (the request)."""

_TOLD: dict[Reason, str] = {
    "restore_is_faster": "restored: about {restore}, where computing takes about {recompute}",
    "recompute_is_faster": "computed: restoring takes about {restore}, computing {recompute}",
    "nothing_stored": "computed: the store knows no more of the prompt than the pool",
    "timed_out": "restoring took longer than it may: the rest is computed",
    "damaged": "a segment was gone, not what was stored, or not readable here: from there on it is computed",
    "no_room": "the pool had no room for what was restored: the rest is computed",
    "failed": "restoring failed: the rest is computed",
    "cancelled": "the request was cancelled",
}


@dataclass
class RestorePlan:
    """What was planned for a prompt, and what became of it. Seconds are None where nothing was estimated or done."""

    reason: Reason
    pool_tokens: int = 0
    """Tokens of the prompt that were in the pool anyway."""
    stored_tokens: int = 0
    """Tokens behind those that the store knew."""
    restored_tokens: int = 0
    """Tokens that were written into the pool."""
    tier: str = ""
    """Where the first of the segments was. A label (`store_statistics.labelled`), as the report may go to strangers."""
    predictor: str = ""
    """What they were coded with; before one was decoded, what new ones are coded with."""
    restore_s: float | None = None
    """What restoring was estimated to take ..."""
    recompute_s: float | None = None
    """... and computing."""
    seconds: float | None = None
    """What it took, from the request's arrival at the engine until it was queued."""

    @property
    def explanation(self) -> str:
        """The reason in words, with the estimates."""
        return _TOLD[self.reason].format(
            restore=_milliseconds(self.restore_s), recompute=_milliseconds(self.recompute_s)
        )

    def summary(self) -> dict[str, Any]:
        """What there is to report, by name."""
        return {
            "reason": self.reason,
            "explanation": self.explanation,
            "pool_tokens": self.pool_tokens,
            "stored_tokens": self.stored_tokens,
            "restored_tokens": self.restored_tokens,
            "tier": self.tier,
            "predictor": self.predictor,
            "restore_s": self.restore_s,
            "recompute_s": self.recompute_s,
            "seconds": self.seconds,
        }


def _milliseconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1000 * seconds:.0f} ms"
