"""The work of `kv bench`: what is measured and calibrated on, and everything about one cache dtype."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from prolepsis.bench.kv_bench import (
    MEASURED,
    Cache,
    Candidate,
    Measurement,
    Row,
    count_turns,
    measure_peers,
    measure_rows,
    measured_on,
)
from prolepsis.bench.kv_source import cache_of, continued
from prolepsis.bench.part_sizes import PartSizes
from prolepsis.bench.references import Reference, ReferenceOutcome, ReferenceRow, measure_reference, require_floats
from prolepsis.cli.console import bar, err, note
from prolepsis.coding.cache_dtypes import DType
from prolepsis.coding.calibration_sample import CalibrationSample
from prolepsis.coding.peers import installed
from prolepsis.coding.profile_file import CalibratedProfile, to_bytes
from prolepsis.coding.twin_calibration import calibrate_twin
from prolepsis.engine.identity import identity
from prolepsis.engine.llm import LLM
from prolepsis.engine.profiles import (
    PredictorKind,
    calibrate,
    collect,
    kind_of,
    kv_of_texts,
    load_profile,
    target_of,
)
from prolepsis.errors import InputError, ProlepsisError

_FEW_TOKENS = 2000
_WINDOW = 2048  # tokens that are read together for calibrating
_REFERENCE_TOKENS = 2048  # that references are fitted to: more would change little, and NumPy takes its time
_LARGEST = 1 << 30  # bytes of a cache that every other coder takes in one piece

Profiles = dict[tuple[PredictorKind, DType], Path]
LeaveOut = Callable[[Sequence[str], InputError], None]


class Wanted(NamedTuple):
    """What is to be measured.

    profiles: files of calibrated predictors. tokens: most to calibrate on. generate: tokens to go on with behind the
    text. open_twins: twins that are measured in open loop too.
    """

    predictors: list[PredictorKind]
    dtypes: list[DType]
    threads: list[int]
    runs: int
    tokens: int
    generate: int
    peers: bool
    profiles: Profiles
    references: list[Reference]
    open_twins: list[PredictorKind]

    def to_fit(self, dtype: DType) -> list[PredictorKind]:
        """Predictors that have to be calibrated."""
        return [p for p in self.predictors if p not in MEASURED and (p, dtype) not in self.profiles]

    @property
    def calibrates(self) -> bool:
        """Whether anything has to be fitted to a text."""
        return bool(self.references or self.open_twins) or any(map(self.to_fit, self.dtypes))


class Tokens(NamedTuple):
    """Ids of what is coded, the first `prompt` of them given, and of the texts to calibrate on.

    source: where the texts come from, in words.
    """

    measured: list[int]
    prompt: int
    calibration: list[list[int]]
    source: str


class Outcome(NamedTuple):
    """Of one dtype."""

    rows: list[Row]
    parts: list[PartSizes]
    references: list[ReferenceRow]
    others: list[dict[str, Any]]
    left_out: list[dict[str, str]]


def prepare(llm: LLM, wanted: Wanted, name: str, content: str, others: dict[str, str]) -> Tokens:
    """What is measured and what is calibrated on. Refuses what would else be refused after minutes of work.

    name, content: of the text. others: texts to calibrate on, by name.
    """
    for (_, dtype), path in wanted.profiles.items():
        load_profile(path, llm, dtype)
    ids, calibration, source = llm.tokenizer.encode(content)[: wanted.tokens], [], ""
    if others:
        calibration, source = [llm.tokenizer.encode(other) for other in others.values()], ", ".join(others)
    elif wanted.calibrates:
        cut = 3 * len(ids) // 4
        calibration, ids, source = [ids[:cut]], ids[cut:], f"the first three quarters of {name}"
    prompt = _that_fit(llm, wanted, ids, name)
    if wanted.calibrates:
        few = sum(map(len, calibration))
        if few == 0:
            raise InputError(f"{'--calibration' if others else '--text'}: there are no tokens to calibrate on")
        if few < _FEW_TOKENS:
            note(f"{few} tokens are few to calibrate on; a few thousand do better", "yellow")
    with err.status(f"generating {wanted.generate} tokens"):
        return Tokens(prompt + continued(llm, prompt, wanted.generate), len(prompt), calibration, source)


def _that_fit(llm: LLM, wanted: Wanted, ids: list[int], name: str) -> list[int]:
    """As many of `ids` as leave room for what is to be generated."""
    most = min(llm.max_context, _LARGEST // llm.kv_cache.bytes_per_token) - wanted.generate
    if most < 1:
        raise InputError(f"--generate {wanted.generate} leaves no room for the text in a context of {llm.max_context}")
    if len(ids) > most:
        note(f"measuring {most} of {len(ids)} tokens: the cache holds no longer session", "yellow")
    if not ids:
        raise InputError(f"--text: {name} has too few tokens")
    return ids[:most]


def bench_dtype(llm: LLM, dtype: DType, wanted: Wanted, tokens: Tokens) -> Outcome:
    """Everything about one dtype."""
    left_out: list[dict[str, str]] = []

    def leave_out(predictors: Sequence[str], error: InputError) -> None:
        for predictor in predictors:
            note(f"{dtype}, {predictor}: left out: {error}", "yellow")
            left_out.append({"predictor": predictor, "dtype": dtype, "reason": str(error)})

    try:
        with err.status(f"{dtype}: reading the text"):
            cache = cache_of(llm, tokens.measured, tokens.prompt, dtype)
    except InputError as error:  # heads that the dtype cannot store
        leave_out([*wanted.predictors, *(reference.name for reference in wanted.references)], error)
        return Outcome([], [], [], [], left_out)
    measured = _measure(cache, _candidates(llm, cache, wanted, tokens, leave_out), wanted)
    references = list(_measure_references(llm, cache, wanted, tokens, leave_out))
    parts = [part for each in measured for part in each.parts] + [part for each in references for part in each.parts]
    return Outcome(
        [row for each in measured for row in each.rows],
        parts,
        [each.row for each in references],
        _measure_peers(cache, wanted),
        left_out,
    )


def _candidates(llm: LLM, cache: Cache, wanted: Wanted, tokens: Tokens, leave_out: LeaveOut) -> list[Candidate]:
    """In the order of the predictors, without those that cannot take the model."""
    dtype = cache.geometry.dtype
    found = [measured_on(cache, predictor) for predictor in MEASURED if predictor in wanted.predictors]
    for (predictor, of), path in wanted.profiles.items():
        if of == dtype:
            found.append(Candidate(predictor, load_profile(path, llm, dtype), path.stat().st_size))
    to_fit = [(p, False) for p in wanted.to_fit(dtype)] + [(p, True) for p in wanted.open_twins]
    if to_fit:
        with _sample(llm, dtype, wanted, tokens) as sample:
            for predictor, open_loop in to_fit:
                try:
                    found.append(_fitted(llm, sample, predictor, open_loop))
                except InputError as error:
                    leave_out([f"{predictor}{'-open' * open_loop}"], error)
    order: list[str] = [*wanted.predictors]
    return sorted(found, key=lambda candidate: order.index(candidate.predictor.removesuffix("-open")))


def _sample(llm: LLM, dtype: DType, wanted: Wanted, tokens: Tokens) -> CalibrationSample:
    total = min(wanted.tokens, sum(map(len, tokens.calibration)))
    with bar(f"{dtype}: reading to calibrate") as on_progress:
        window = min(_WINDOW, llm.max_context)
        return collect(llm, kv_of_texts(llm, tokens.calibration, dtype, window, total, on_progress), dtype, total)


def _fitted(llm: LLM, sample: CalibrationSample, predictor: PredictorKind, open_loop: bool) -> Candidate:
    """open_loop: of a twin, for comparison; no session is saved with such a profile."""
    with bar(f"{sample.geometry.dtype}: fitting {predictor}{', open loop' * open_loop}") as on_progress:
        start = time.perf_counter()
        if open_loop:
            profile = calibrate_twin(sample, target_of(llm), predictor, on_progress, open_loop=True)
            calibrated = CalibratedProfile(profile, sample.geometry, sample.rope, identity(llm), sample.tokens)
        else:
            calibrated = calibrate(llm, sample, predictor, on_progress)
        seconds = time.perf_counter() - start
    return Candidate(kind_of(calibrated.profile), calibrated.profile, len(to_bytes(calibrated)), seconds)


def _measure(cache: Cache, candidates: Sequence[Candidate], wanted: Wanted) -> list[Measurement]:
    total, turn = count_turns(len(candidates), wanted.threads, wanted.runs), count(1)
    with bar(f"{cache.geometry.dtype}: coding and decoding") as on_progress:
        return [
            measure_rows(cache, candidate, wanted.threads, wanted.runs, lambda: on_progress(next(turn), total))
            for candidate in candidates
        ]


def _measure_references(
    llm: LLM, cache: Cache, wanted: Wanted, tokens: Tokens, leave_out: LeaveOut
) -> Iterator[ReferenceOutcome]:
    if not wanted.references:
        return
    dtype = cache.geometry.dtype
    try:
        require_floats(dtype)
    except InputError as error:
        leave_out([reference.name for reference in wanted.references], error)
        return
    window = min(_WINDOW, llm.max_context)
    total = min(wanted.tokens, _REFERENCE_TOKENS)
    calibration = list(kv_of_texts(llm, tokens.calibration, dtype, window, total))
    for reference in wanted.references:
        with bar(f"{dtype}: {reference.name}") as on_progress:
            yield measure_reference(reference, llm.runner.decoder.plan, calibration, cache, on_progress)


def _measure_peers(cache: Cache, wanted: Wanted) -> list[dict[str, Any]]:
    dtype = cache.geometry.dtype
    coders = installed(dtype) if wanted.peers else []
    others: list[dict[str, Any]] = []
    with bar(f"{dtype}: other coders") as on_progress:
        for done, outcome in enumerate(measure_peers(cache, coders, wanted.runs), 1):
            on_progress(done, len(coders))
            if isinstance(outcome, ProlepsisError):
                note(f"{dtype}: {outcome}", "yellow")
            else:
                others.append({"coder": outcome.coder, "dtype": dtype, **outcome._asdict()})
    return others
