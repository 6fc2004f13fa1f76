"""`kv bench`: what each predictor makes of a model's KV in each cache dtype, beside other lossless coders."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import typer

from prolepsis.bench import kv_plot
from prolepsis.bench.kv_bench import Cache, Candidate, Row, count_turns, measure_peers, measure_rows, measured_on
from prolepsis.cli.console import (
    JsonOption,
    MemoryOption,
    ModelArgument,
    T,
    bar,
    choice,
    err,
    load,
    note,
    print_json,
    read_text,
)
from prolepsis.cli.kv_bench_tables import show_tables
from prolepsis.coding.cache_dtypes import DType
from prolepsis.coding.linear_matrices import chain_order
from prolepsis.coding.linear_profile import LinearProfile
from prolepsis.coding.peers import installed
from prolepsis.coding.profile_file import to_bytes
from prolepsis.engine.identity import geometry, identity, rope_spec
from prolepsis.engine.llm import LLM
from prolepsis.engine.profiles import PredictorKind, calibrate, collect, kv_of_texts, load_profile, read_profile
from prolepsis.errors import InputError, ProlepsisError
from prolepsis.kernels.team import default_threads
from prolepsis.model.pull import DEFAULT_MODEL
from prolepsis.store import replace_file, require_writable

_FEW_TOKENS = 2000
_WINDOW = 2048  # tokens that are read together for calibrating
_LARGEST = 1 << 30  # bytes of a cache that every other coder takes in one piece
_PLOTS = (".png", ".svg", ".pdf")
_DTYPES: tuple[DType, ...] = get_args(DType)
_PREDICTORS: tuple[PredictorKind, ...] = get_args(PredictorKind)


class _Wanted(NamedTuple):
    """What is to be measured. profiles: files of `linear`, by the dtype they are for. tokens: most to calibrate on."""

    predictors: list[PredictorKind]
    dtypes: list[DType]
    threads: list[int]
    runs: int
    tokens: int
    peers: bool
    profiles: dict[DType, Path]

    @property
    def calibrates(self) -> bool:
        """Whether a profile has to be fitted."""
        return "linear" in self.predictors and not self.profiles.keys() >= set(self.dtypes)


class _Tokens(NamedTuple):
    """Ids of what is coded, and of the texts to calibrate on; `source` says where those come from."""

    measured: list[int]
    calibration: list[list[int]]
    source: str


class _Outcome(NamedTuple):
    """Of one dtype."""

    rows: list[Row]
    others: list[dict[str, Any]]
    left_out: list[dict[str, str]]


def bench(
    text: Annotated[Path, typer.Option(help="A UTF-8 text file whose KV cache is coded.")],
    model: ModelArgument = DEFAULT_MODEL,
    predictor: Annotated[
        list[str] | None, typer.Option(help="marginal, static or linear; may be repeated. Default: all.")
    ] = None,
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(help="Cache dtype: bf16, fp16, fp8_e4m3, fp8_e5m2, int8 or int4; may be repeated. Default: all."),
    ] = None,
    threads: Annotated[
        list[int] | None, typer.Option(help="Threads of the codec; may be repeated. Default: 1 and 2.")
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="A profile file of `linear` (`prolepsis calibrate`); may be repeated, once for each dtype."),
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text to calibrate `linear` on where there is no profile; may be repeated. Default: the first three "
            "quarters of --text, and then only the rest is measured."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Most tokens to read of --text, and to calibrate on.")] = 16384,
    runs: Annotated[int, typer.Option(help="Measured runs, after one that does not count; medians are reported.")] = 3,
    peers: Annotated[bool, typer.Option(help="Measure the other coders that are installed too.")] = True,
    plot: Annotated[
        Path | None, typer.Option(help="Draw ratio against speed into this .png, .svg or .pdf file.")
    ] = None,
    kv_memory: MemoryOption = None,
    json_: JsonOption = False,
) -> None:
    """Size and speed of a coded KV cache, for each predictor and cache dtype, beside other lossless coders.

    The text is coded as one session. Speeds are those of coding into memory and of decoding from there, in bytes that
    the cache stores. The other coders get the same bytes, on one thread; "sample": a slow one that saw 4 MiB of them.
    """
    dtypes, predictors = _chosen(kv_dtype, "--kv-dtype", _DTYPES), _chosen(predictor, "--predictor", _PREDICTORS)
    for flag, value, least in (("--tokens", tokens, 2), ("--runs", runs, 1)):
        if value < least:
            raise InputError(f"{flag} must be at least {least}, not {value}")
    if plot is not None:
        _require_plot(plot)
    profiles = _profiles(profile or [], dtypes if "linear" in predictors else [])
    wanted = _Wanted(predictors, dtypes, _thread_counts(threads), runs, tokens, peers, profiles)
    content = read_text(text, "--text")
    if calibration and not wanted.calibrates:
        raise InputError("--calibration is for `linear` where no --profile is given, and nothing is to be calibrated")
    others = {str(path): read_text(path, "--calibration") for path in calibration or []}
    parts: _Tokens | None = None
    outcomes: dict[DType, _Outcome] = {}
    for engine in ("bf16", "fp16"):
        stored = [d for d in dtypes if (d == "fp16") == (engine == "fp16")]
        if stored:
            llm = load(model, kv_memory=kv_memory, kv_dtype=engine)
            parts = parts or _prepare(llm, wanted, str(text), content, others)
            outcomes |= {d: _bench(llm, d, wanted, parts) for d in stored}
    assert parts is not None
    report = _report(model, text, wanted, parts, [outcomes[d] for d in dtypes])
    if not report["rows"]:
        raise InputError(f"nothing could be measured: {report['left_out'][0]['reason']}")
    if plot is not None:
        with replace_file(plot) as file:
            kv_plot.draw(report).savefig(file, format=plot.suffix[1:].lower(), dpi=160)
    if json_:
        print_json(report)
    else:
        show_tables(report)


def _chosen(values: Sequence[str] | None, flag: str, choices: Sequence[T]) -> list[T]:
    """In the order of `choices`; all of them by default."""
    known = {choice(value, flag, choices) for value in values or choices}
    return [each for each in choices if each in known]


def _thread_counts(asked: Sequence[int] | None) -> list[int]:
    cores = default_threads()
    if asked and min(asked) < 1:
        raise InputError(f"--threads must be at least 1, not {min(asked)}")
    if asked and max(asked) > cores:
        note(f"--threads {max(asked)}: measured with {cores}, as many as there are here", "yellow")
    return sorted({min(number, cores) for number in asked or (1, 2)})


def _profiles(paths: Sequence[Path], dtypes: Sequence[DType]) -> dict[DType, Path]:
    """By the dtype that each is for."""
    found: dict[DType, Path] = {}
    for path in paths:
        calibrated = read_profile(path)
        dtype = calibrated.geometry.dtype
        if not isinstance(calibrated.profile, LinearProfile):
            raise InputError(f"--profile: {path} is for {calibrated.profile.predictor_name}, not for linear")
        if dtype in found or dtype not in dtypes:
            why = f"{found[dtype]} is too" if dtype in found else "which is not to be measured with linear"
            raise InputError(f"--profile: {path} is for {dtype}, {why}")
        found[dtype] = path
    return found


def _require_plot(path: Path) -> None:
    if path.suffix.lower() not in _PLOTS:
        raise InputError(f"--plot: {path} must end in {', '.join(_PLOTS[:-1])} or {_PLOTS[-1]}")
    if find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install 'prolepsis[bench]'")
    require_writable(path)


def _prepare(llm: LLM, wanted: _Wanted, name: str, content: str, others: dict[str, str]) -> _Tokens:
    """What is measured and what is calibrated on. Refuses what would else be refused after minutes of work."""
    for dtype, path in wanted.profiles.items():
        load_profile(path, llm, dtype)
    ids, calibration, source = llm.tokenizer.encode(content)[: wanted.tokens], [], ""
    if others:
        calibration, source = [llm.tokenizer.encode(other) for other in others.values()], ", ".join(others)
    elif wanted.calibrates:
        cut = 3 * len(ids) // 4
        calibration, ids, source = [ids[:cut]], ids[cut:], f"the first three quarters of {name}"
    most = min(llm.max_context, _LARGEST // llm.kv_cache.bytes_per_token)
    if len(ids) > most:
        note(f"measuring {most} of {len(ids)} tokens: the cache holds no longer session", "yellow")
    if not ids:
        raise InputError(f"--text: {name} has too few tokens")
    if wanted.calibrates:
        few = sum(map(len, calibration))
        if few == 0:
            raise InputError(f"{'--calibration' if others else '--text'}: there are no tokens to calibrate on")
        if few < _FEW_TOKENS:
            note(f"{few} tokens are few to calibrate on; a few thousand do better", "yellow")
    return _Tokens(ids[:most], calibration, source)


def _bench(llm: LLM, dtype: DType, wanted: _Wanted, tokens: _Tokens) -> _Outcome:
    """Everything about one dtype."""
    left_out: list[dict[str, str]] = []

    def leave_out(predictors: Sequence[str], error: InputError) -> None:
        for predictor in predictors:
            note(f"{dtype}, {predictor}: left out: {error}", "yellow")
            left_out.append({"predictor": predictor, "dtype": dtype, "reason": str(error)})

    try:
        cache = _cache(llm, dtype, tokens.measured)
    except InputError as error:  # heads that the dtype cannot store
        leave_out(wanted.predictors, error)
        return _Outcome([], [], left_out)
    candidates = [measured_on(cache, predictor) for predictor in wanted.predictors if predictor != "linear"]
    if dtype in wanted.profiles:
        candidates.append(_from_file(llm, dtype, wanted.profiles[dtype]))
    elif "linear" in wanted.predictors:
        try:
            chain_order(cache.geometry, cache.rope)
        except InputError as error:
            leave_out(["linear"], error)
        else:
            candidates.append(_calibrated(llm, dtype, wanted.tokens, tokens))
    return _Outcome(_measure(cache, candidates, wanted), _measure_peers(cache, wanted), left_out)


def _cache(llm: LLM, dtype: DType, ids: list[int]) -> Cache:
    with err.status(f"{dtype}: reading the text"):
        window = next(kv_of_texts(llm, [ids], dtype, len(ids), len(ids)))
    return Cache(window.kv, window.ids, geometry(llm, dtype), rope_spec(llm), identity(llm))


def _from_file(llm: LLM, dtype: DType, path: Path) -> Candidate:
    return Candidate("linear", load_profile(path, llm, dtype), path.stat().st_size)


def _calibrated(llm: LLM, dtype: DType, most: int, tokens: _Tokens) -> Candidate:
    total = min(most, sum(map(len, tokens.calibration)))
    with bar(f"{dtype}: reading to calibrate") as on_progress:
        window = min(_WINDOW, llm.max_context)
        sample = collect(llm, kv_of_texts(llm, tokens.calibration, dtype, window, total, on_progress), dtype, total)
    with sample, bar(f"{dtype}: fitting") as on_progress:
        start = time.perf_counter()
        calibrated = calibrate(llm, sample, "linear", on_progress)
        seconds = time.perf_counter() - start
    return Candidate("linear", calibrated.profile, len(to_bytes(calibrated)), seconds)


def _measure(cache: Cache, candidates: Sequence[Candidate], wanted: _Wanted) -> list[Row]:
    rows: list[Row] = []
    total, turn = count_turns(len(candidates), wanted.threads, wanted.runs), count(1)
    with bar(f"{cache.geometry.dtype}: coding and decoding") as on_progress:
        for candidate in candidates:
            rows += measure_rows(cache, candidate, wanted.threads, wanted.runs, lambda: on_progress(next(turn), total))
    return rows


def _measure_peers(cache: Cache, wanted: _Wanted) -> list[dict[str, Any]]:
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


def _report(model: str, text: Path, wanted: _Wanted, tokens: _Tokens, outcomes: Sequence[_Outcome]) -> dict[str, Any]:
    """calibrated_on: what `linear` was fitted to, by dtype: a profile file, or a text in words."""
    rows = [asdict(row) for outcome in outcomes for row in outcome.rows]
    fitted = [row["dtype"] for row in rows if row["predictor"] == "linear"]
    return {
        "model": model,
        "text": str(text),
        "measured_tokens": len(tokens.measured),
        "calibrated_on": {dtype: str(wanted.profiles.get(dtype, tokens.source)) for dtype in fitted},
        "calibration_tokens": min(wanted.tokens, sum(map(len, tokens.calibration))),
        "runs": wanted.runs,
        "cores": default_threads(),
        "rows": rows,
        "others": [other for outcome in outcomes for other in outcome.others],
        "left_out": [note_ for outcome in outcomes for note_ in outcome.left_out],
    }
