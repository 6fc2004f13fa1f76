"""`kv bench`: what each predictor makes of a model's KV in each cache dtype, beside other lossless coders."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from prolepsis.bench import kv_plot
from prolepsis.bench.kv_bench import MEASURED, Row
from prolepsis.bench.kv_source import prefill_speed
from prolepsis.bench.references import float_references, open_references
from prolepsis.cli.console import (
    JsonOption,
    MemoryOption,
    ModelArgument,
    T,
    bar,
    choice,
    load,
    note,
    print_json,
    read_text,
)
from prolepsis.cli.kv_bench_run import Outcome, Profiles, Tokens, Wanted, bench_dtype, prepare
from prolepsis.cli.kv_bench_tables import show_tables
from prolepsis.coding.cache_dtypes import DType
from prolepsis.coding.twin_network import VARIANTS
from prolepsis.engine.llm import LLM
from prolepsis.engine.profiles import PredictorKind, kind_of, read_profile
from prolepsis.errors import InputError
from prolepsis.kernels.team import default_threads
from prolepsis.kv.stored import TOKEN_DTYPES, token_dtype_named
from prolepsis.model.pull import DEFAULT_MODEL
from prolepsis.store import replace_file, require_writable

_PLOTS = (".png", ".svg", ".pdf")
_DTYPES: tuple[DType, ...] = TOKEN_DTYPES
_PREDICTORS: tuple[PredictorKind, ...] = get_args(PredictorKind)
# What takes a few minutes: every twin on every dtype would take an hour.
_USUAL_DTYPES: tuple[DType, ...] = ("bf16",)
_USUAL_PREDICTORS: tuple[PredictorKind, ...] = ("marginal", "static", "linear", "twin-int8")


def bench(
    text: Annotated[Path, typer.Option(help="A UTF-8 text file whose KV cache is coded.")],
    model: ModelArgument = DEFAULT_MODEL,
    predictor: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(_PREDICTORS)}; may be repeated. Default: {', '.join(_USUAL_PREDICTORS)}."),
    ] = None,
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(help=f"Cache dtype: {', '.join(_DTYPES)}; may be repeated. Default: {_USUAL_DTYPES[0]}."),
    ] = None,
    threads: Annotated[
        list[int] | None, typer.Option(help="Threads of the codec; may be repeated. Default: 1 and 2.")
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="A profile file (`prolepsis calibrate`); may be repeated, once for each predictor and cache dtype."
        ),
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text to calibrate on where there is no --profile; may be repeated. Default: the first three "
            "quarters of --text, and then only the rest is measured."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Most tokens to read of --text, and to calibrate on.")] = 16384,
    generate: Annotated[
        int,
        typer.Option(help="Tokens that the model goes on with after the text; they are coded too, and told apart."),
    ] = 0,
    open_loop: Annotated[
        bool,
        typer.Option(
            "--open-loop",
            help="Measure each twin in open loop too, as the published method has it: it attends to its own KV.",
        ),
    ] = False,
    float_: Annotated[
        bool, typer.Option("--float", help="Estimate predictors in float32 too, in open and in closed loop.")
    ] = False,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="Tables with the bits of each layer's K and V.")
    ] = False,
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
    the cache stores; "recompute" is how fast the engine computes the same KV from the tokens. The other coders get the
    same bytes, on one thread; "sample": a slow one that saw 4 MiB of them. --open-loop and --float also estimate the
    ideal rate of the residual model that was published with the method, a mixture of three parts; that codes nothing.
    """
    dtypes = _chosen([token_dtype_named(name) for name in kv_dtype or _USUAL_DTYPES], "--kv-dtype", _DTYPES)
    predictors = _chosen(predictor or _USUAL_PREDICTORS, "--predictor", _PREDICTORS)
    for flag, value, least in (("--tokens", tokens, 2), ("--generate", generate, 0), ("--runs", runs, 1)):
        if value < least:
            raise InputError(f"{flag} must be at least {least}, not {value}")
    if plot is not None:
        _require_plot(plot)
    twins = [kind for kind in predictors if kind in VARIANTS] if open_loop else []
    if open_loop and not twins:
        raise InputError("--open-loop is for twins, and none is to be measured")
    references = open_references(twins) + (float_references() if float_ else [])
    profiles = _profiles(profile or [], dtypes, predictors)
    counts = _thread_counts(threads)
    wanted = Wanted(predictors, dtypes, counts, runs, tokens, generate, peers, profiles, references, twins)
    content = read_text(text, "--text")
    if calibration and not wanted.calibrates:
        raise InputError("--calibration is for what has no --profile, and nothing is to be calibrated")
    others = {str(path): read_text(path, "--calibration") for path in calibration or []}
    parts: Tokens | None = None
    outcomes: dict[DType, Outcome] = {}
    speeds: dict[str, float] = {}
    for engine in ("bf16", "fp16"):
        stored = [d for d in dtypes if (d == "fp16") == (engine == "fp16")]
        if stored:
            llm = load(model, kv_memory=kv_memory, kv_dtype=engine)
            parts = parts or prepare(llm, wanted, str(text), content, others)
            speeds |= dict.fromkeys(stored, _recompute(llm, engine, parts, runs))
            outcomes |= {d: bench_dtype(llm, d, wanted, parts) for d in stored}
    assert parts is not None
    report = _report(model, text, wanted, parts, [outcomes[d] for d in dtypes], speeds)
    if not report["rows"]:
        raise InputError(f"nothing could be measured: {report['left_out'][0]['reason']}")
    if plot is not None:
        with replace_file(plot) as file:
            kv_plot.draw(report).savefig(file, format=plot.suffix[1:].lower(), dpi=160)
    if json_:
        print_json(report)
    else:
        show_tables(report, per_layer)


def _chosen(values: Sequence[str], flag: str, choices: Sequence[T]) -> list[T]:
    """In the order of `choices`."""
    known = {choice(value, flag, choices) for value in values}
    return [each for each in choices if each in known]


def _thread_counts(asked: Sequence[int] | None) -> list[int]:
    cores = default_threads()
    if asked and min(asked) < 1:
        raise InputError(f"--threads must be at least 1, not {min(asked)}")
    if asked and max(asked) > cores:
        note(f"--threads {max(asked)}: measured with {cores}, as many as there are here", "yellow")
    return sorted({min(number, cores) for number in asked or (1, 2)})


def _profiles(paths: Sequence[Path], dtypes: Sequence[DType], predictors: Sequence[PredictorKind]) -> Profiles:
    """By the predictor and the dtype that each is for."""
    found: Profiles = {}
    for path in paths:
        calibrated = read_profile(path)
        kind, dtype = kind_of(calibrated.profile), calibrated.geometry.dtype
        if kind in MEASURED:
            raise InputError(f"--profile: {path} is for {kind}, which is measured on the cache itself")
        if kind not in predictors or dtype not in dtypes:
            raise InputError(f"--profile: {path} is for {kind} and {dtype}, which are not to be measured together")
        if (kind, dtype) in found:
            raise InputError(f"--profile: {path} is for {kind} and {dtype}, {found[kind, dtype]} is too")
        found[kind, dtype] = path
    return found


def _require_plot(path: Path) -> None:
    if path.suffix.lower() not in _PLOTS:
        raise InputError(f"--plot: {path} must end in {', '.join(_PLOTS[:-1])} or {_PLOTS[-1]}")
    if find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install 'prolepsis[bench]' ('.[bench]' in a checkout)")
    require_writable(path)


def _recompute(llm: LLM, dtype: str, tokens: Tokens, runs: int) -> float:
    """Tokens a second. dtype: of the engine's cache."""
    with bar(f"{dtype}: computing the KV again") as on_progress:
        return prefill_speed(llm, tokens.measured, runs, on_progress)


def _report(
    model: str,
    text: Path,
    wanted: Wanted,
    tokens: Tokens,
    outcomes: Sequence[Outcome],
    speeds: Mapping[str, float],
) -> dict[str, Any]:
    """calibrated_on: what each predictor was fitted to, by dtype: a profile file, or a text in words. recompute: speed
    of the engine with all cores, by dtype."""
    rows = [row for outcome in outcomes for row in outcome.rows]
    files = {(str(kind), str(dtype)): path for (kind, dtype), path in wanted.profiles.items()}
    calibrated: dict[str, dict[str, str]] = {}
    for row in rows:
        if row.predictor not in MEASURED:
            path = files.get((row.predictor, row.dtype))
            calibrated.setdefault(row.predictor, {})[row.dtype] = tokens.source if path is None else str(path)
    references = [reference for outcome in outcomes for reference in outcome.references]
    for reference in references:
        calibrated.setdefault(reference.predictor, {})[reference.dtype] = tokens.source
    return {
        "model": model,
        "text": str(text),
        "measured_tokens": len(tokens.measured),
        "generated_tokens": len(tokens.measured) - tokens.prompt,
        "calibrated_on": calibrated,
        "calibration_tokens": min(wanted.tokens, sum(map(len, tokens.calibration))),
        "runs": wanted.runs,
        "cores": default_threads(),
        "recompute": {row.dtype: _as_cache(speeds[row.dtype], row) for row in rows},
        "rows": [asdict(row) for row in rows],
        "parts": [asdict(part) for outcome in outcomes for part in outcome.parts],
        "references": [asdict(reference) for reference in references],
        "others": [other for outcome in outcomes for other in outcome.others],
        "left_out": [note_ for outcome in outcomes for note_ in outcome.left_out],
    }


def _as_cache(tokens_a_second: float, row: Row) -> dict[str, float]:
    return {"tok_s": tokens_a_second, "mb_s": tokens_a_second * row.decode_mb_s / row.decode_tok_s}
