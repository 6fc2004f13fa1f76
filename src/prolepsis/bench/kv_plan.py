"""What `kv plan` measures: how small and how fast coded K and V of a model are, how fast tiers of a store answer, and
what the store's planner makes of that."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from prolepsis.bench.kv_bench import Candidate, measure_rows, measured_on
from prolepsis.bench.kv_source import cache_of, prefill_s
from prolepsis.coding.cache_dtypes import DType
from prolepsis.coding.profile import GRID
from prolepsis.engine.llm import LLM
from prolepsis.engine.planner import Piece, Planner
from prolepsis.engine.profile_store import BY_WORTH, best_kept
from prolepsis.engine.restore_plan import RestorePlan
from prolepsis.errors import InputError, ProlepsisError
from prolepsis.kernels.team import default_threads
from prolepsis.kv.cache import token_bytes
from prolepsis.store import Tiers, open_tiers
from prolepsis.store.open_tiers import disk_directory

TYPICAL_TIERS = ("memory", "disk", "redis", "remote")
"""Kinds of tiers whose speed the planner guesses until it has met one."""

ON_DEFAULT_MODEL: Mapping[tuple[str, DType], float] = {
    ("twin-int8", "bf16"): 4.85,
    ("twin-int8", "fp8_e4m3"): 7.21,
    ("linear", "bf16"): 2.10,
    ("linear", "fp16"): 1.51,
    ("linear", "fp8_e4m3"): 2.05,
    ("linear", "fp8_e5m2"): 2.49,
    ("linear", "int8"): 1.90,
    ("linear", "int4"): 2.74,
}
"""Stored bytes per coded byte of predictors that need a calibrated profile, as docs/benchmarks.md has them of
smollm2:135m. For who has no profile yet: of another model they are a hint at most."""

_MOST_TOKENS, _FEWEST_TOKENS = 1024, 64
_SECONDS = 1.5  # that computing what is measured on may take
_PROBES = 3  # fetches from a tier, of which the fastest counts
_SMALL = 256  # bytes of an entry whose fetch is latency and nothing else


@dataclass(frozen=True)
class CodedSize:
    """Of one predictor on K and V of one dtype.

    ratio: stored bytes per coded byte, without a profile. encode_tok_s, decode_tok_s: tokens a second. profile: the
    file that was kept for the predictor; None for one that is measured on what it codes.
    """

    predictor: str
    dtype: DType
    ratio: float
    encode_tok_s: float
    decode_tok_s: float
    profile: str | None


class Fetches(NamedTuple):
    """What a tier of the store took for one small entry, and for one of `size` bytes."""

    tier: str
    kind: str
    small: int
    small_s: float
    size: int
    size_s: float


class Restore(NamedTuple):
    """What the planner decides for one user's context on one tier. latency: seconds; bandwidth: bytes a second."""

    tier: str
    kind: str
    latency: float
    bandwidth: float
    predictor: str
    plan: RestorePlan


def tokens_to_measure(llm: LLM, ids: Sequence[int]) -> list[int]:
    """As many of `ids` as this machine computes in a second or two, in whole segments where there are enough.

    Raises:
        InputError: there are too few.
    """
    most = min(len(ids), llm.max_context, _MOST_TOKENS)
    if most < _FEWEST_TOKENS:
        raise InputError(f"--text: measuring takes {_FEWEST_TOKENS} tokens that fit into the context, not {most}")
    prefill_s(llm, ids[:_FEWEST_TOKENS])
    speed = _FEWEST_TOKENS / prefill_s(llm, ids[:_FEWEST_TOKENS])
    segments = min(most, int(speed * _SECONDS)) // GRID
    return list(ids[: max(segments, 1) * GRID if most >= GRID else most])


def prefill_tok_s(llm: LLM, ids: Sequence[int]) -> float:
    """Tokens of a prompt that are computed in a second."""
    return len(ids) / min(prefill_s(llm, ids) for _ in range(2))


def measure_coded(llm: LLM, ids: Sequence[int], dtype: DType, on_skip: Callable[[str], None]) -> Iterator[CodedSize]:
    """`static`, and every predictor that a profile is kept for. Nothing for heads that the dtype cannot store.

    on_skip(why) of a profile or a dtype that is left out.
    """
    try:
        cache = cache_of(llm, ids, len(ids), dtype)
    except InputError as error:
        on_skip(f"{dtype} is left out: {error}")
        return
    candidates: list[tuple[Candidate, str | None]] = [(measured_on(cache, "static"), None)]
    for kind in BY_WORTH:
        kept = None if dtype == "kivi4" or kind == "static" else best_kept(llm, dtype, on_skip, [kind])
        if kept is not None:
            size = kept.path.stat().st_size
            candidates.append((Candidate(kind, kept.profile, size), str(kept.path)))
    stored = 8 * token_bytes(*cache.geometry[1:], dtype) / (2 * np.prod(cache.geometry[1:]))
    for candidate, path in candidates:
        (row,) = measure_rows(cache, candidate, [default_threads()], 1, _ignore).rows
        ratio = float(stored / row.bits_per_scalar)
        yield CodedSize(candidate.predictor, dtype, ratio, row.encode_tok_s, row.decode_tok_s, path)


def fetch(spec: str, size: int) -> Fetches:
    """Write an entry of `size` bytes and a small one to the tier that `spec` names, fetch both, and delete them.

    Raises:
        InputError: `spec` names no tier, or one that another process has.
        ProlepsisError: the tier does not give back what it was given.
    """
    data = np.random.default_rng(0).bytes(size)
    with _nothing_left(disk_directory(spec)), closing(open_tiers([spec])) as tiers:
        (tier,) = tiers.statistics()
        small_s, size_s = (_fetch(tiers, part) for part in (data[:_SMALL], data))
        return Fetches(tier.name, tier.kind, _SMALL, small_s, size, size_s)


def decide(
    coded: Sequence[CodedSize],
    prefill: float,
    fetched: Sequence[Fetches],
    *,
    context: int,
    token_size: int,
    model_size: int,
) -> Iterator[Restore]:
    """What the store's planner decides for a prompt of `context` tokens, all of them stored, on each tier with each of
    the predictors `coded`; on typical tiers, as it guesses them, where none was `fetched` from.

    prefill: tokens a second. token_size, model_size: bytes of a token's K and V, and of the weights.
    """
    planner = Planner(token_size, model_size)
    planner.prefilled(_FEWEST_TOKENS, _FEWEST_TOKENS / prefill, first=True)
    for each in coded:
        planner.decoded(each.predictor, _FEWEST_TOKENS, _FEWEST_TOKENS / each.decode_tok_s, certain=True)
    for tier in fetched:
        planner.fetched(tier.tier, tier.kind, tier.small, tier.small_s)
        planner.fetched(tier.tier, tier.kind, tier.size, tier.size_s)
    for name, kind in [(tier.tier, tier.kind) for tier in fetched] or [(kind, kind) for kind in TYPICAL_TIERS]:
        speed = planner.tier_speed(name, kind)
        for each in coded:
            counts = [min(GRID, context - start) for start in range(0, context, GRID)]
            pieces = [Piece(name, kind, int(count * token_size / each.ratio), count) for count in counts]
            yield Restore(name, kind, *speed, each.predictor, planner.decide(0, pieces, each.predictor))


@contextmanager
def _nothing_left(directory: Path | None) -> Iterator[None]:
    """Remove a directory that was not there before, and those above it that were made for it."""
    made = [] if directory is None else [each for each in (directory, *directory.parents) if not os.path.lexists(each)]
    try:
        yield
    finally:
        if made:
            shutil.rmtree(made[0], ignore_errors=True)
        with suppress(OSError):  # someone else has put something there
            for each in made[1:]:
                each.rmdir()


def _fetch(tiers: Tiers, data: bytes) -> float:
    """Seconds of the fastest of a few fetches of `data`."""
    key = f"probe-{sha256(data).hexdigest()}"
    try:
        tiers.put(key, data)
        found = [tiers.get(key) for _ in range(_PROBES)]
    finally:
        tiers.delete(key)
    if any(each is None or each.data != data for each in found):
        (tier,) = tiers.statistics()
        raise ProlepsisError(f"{tier.name} did not give back {len(data)} bytes: {dict(tier.failures)}")
    return min(each.seconds for each in found if each is not None)


def _ignore() -> None:
    """Runs are short."""
