"""What is counted of requests and of the engine as a whole."""

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prolepsis.engine.restore_plan import RestorePlan


@dataclass
class DraftStatistics:
    """What became of drafts. Reported under vLLM's names, as its users have them in their dashboards."""

    rounds: int = 0
    """Passes that verified a draft."""
    drafted_at: list[int] = field(default_factory=list)
    """For each place in a draft, from the first on: how many tokens were drafted there ..."""
    accepted_at: list[int] = field(default_factory=list)
    """... and how many of them were accepted."""

    def count(self, drafted: int, accepted: int) -> None:
        """One more draft, the first `accepted` of whose tokens were taken."""
        self.add(DraftStatistics(1, [1] * drafted, [1] * accepted))

    def add(self, other: "DraftStatistics") -> None:
        """Count all that the other has counted."""
        self.rounds += other.rounds
        for ours, theirs in ((self.drafted_at, other.drafted_at), (self.accepted_at, other.accepted_at)):
            ours += [0] * (len(theirs) - len(ours))
            for place, number in enumerate(theirs):
                ours[place] += number

    @property
    def acceptance(self) -> list[float]:
        """For each place in a draft: the share of tokens there that were accepted."""
        accepted = self.accepted_at + [0] * (len(self.drafted_at) - len(self.accepted_at))
        return [ours / of for ours, of in zip(accepted, self.drafted_at, strict=True)]

    def summary(self) -> dict[str, int | list[int] | list[float]]:
        """What there is to report, by name."""
        return {
            "spec_decode_num_drafts": self.rounds,
            "spec_decode_num_draft_tokens": sum(self.drafted_at),
            "spec_decode_num_accepted_tokens": sum(self.accepted_at),
            "spec_decode_num_accepted_tokens_per_pos": list(self.accepted_at),
            "spec_decode_acceptance_rate_per_pos": [round(share, 4) for share in self.acceptance],
        }


@dataclass
class RequestStatistics:
    """How one request fared. Times are seconds of `time.perf_counter`; None until they are known."""

    arrived: float = 0.0
    started: float | None = None
    """When its first token was run."""
    token_times: list[float] = field(default_factory=list)
    """When each token of the output was there."""
    cached_tokens: int = 0
    """Tokens of the prompt whose K and V were in the cache already when it started."""
    preemptions: int = 0
    """How often it had to leave the pool."""
    recomputed_tokens: int = 0
    """Tokens run again because their K and V could not be kept."""
    steps: int = 0
    """Passes that brought it tokens."""
    drafts: DraftStatistics = field(default_factory=DraftStatistics)
    restore: RestorePlan | None = None
    """What a store was to bring of the prompt, and has; None where none was asked."""

    def told(self, tokens: int) -> None:
        """A pass has brought so many tokens, now."""
        self.steps += 1
        self.token_times += [time.perf_counter()] * tokens

    @property
    def queue_s(self) -> float | None:
        """From its arrival until its first token was run."""
        return None if self.started is None else self.started - self.arrived

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from its arrival on."""
        return self.token_times[0] - self.arrived if self.token_times else None

    @property
    def inter_token_s(self) -> list[float]:
        """The times between consecutive tokens."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    def summary(self) -> dict[str, Any]:
        """What there is to report, by name; `inter_token_s` is the mean."""
        between = self.inter_token_s
        drafts: dict[str, Any] = {}
        if self.drafts.rounds:
            drafts = {"tokens_per_step": len(self.token_times) / self.steps, **self.drafts.summary()}
        return {
            "queue_s": self.queue_s,
            "ttft_s": self.ttft_s,
            "inter_token_s": sum(between) / len(between) if between else None,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            **drafts,
            **({} if self.restore is None else {"restore": self.restore.summary()}),
        }


class EngineStatistics(NamedTuple):
    """The engine now, and what it has done since it was made."""

    running: int
    waiting: int
    """Requests that are not running, those that were preempted included."""
    finished: int
    cancelled: int
    failed: int
    passes: int
    computed_tokens: int
    """Rows run, of prompts and outputs alike."""
    busy_s: float
    """Seconds spent in `Engine.step`."""
    preemptions: int
    recomputed_tokens: int
    refused_swaps: int
    """Preempted sequences that no tier had room for, or whose coded form was damaged: they were computed again."""
    swapped_bytes: int
    """Bytes of K and V that left the pool so far ..."""
    coded_bytes: int
    """... and what they took, coded."""
    prompt_tokens: int
    """Tokens of prompts that have been read ..."""
    cached_tokens: int
    """... and those of them whose K and V were in the prefix cache."""
    evicted_tokens: int
    """Tokens whose K and V were dropped: above 0, outputs are not those of a full cache."""
    waste: float
    """Share of the slots in used blocks that held no token, over all passes: the paged pool's internal waste."""
    drafts: DraftStatistics
