"""`calibrate`: fit a profile to a model's KV, so that its caches become smaller."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prolepsis.cli.console import (
    DtypeOption,
    JsonOption,
    MemoryOption,
    ModelArgument,
    ThreadsOption,
    bar,
    choice,
    load,
    note,
    print_json,
    read_text,
)
from prolepsis.coding.cache_dtypes import DType
from prolepsis.coding.calibration_sample import CalibrationSample
from prolepsis.coding.profile_file import CalibratedProfile, to_bytes
from prolepsis.coding.twin_profile import TwinProfile
from prolepsis.engine.llm import LLM
from prolepsis.engine.profile_store import best_kept, keep, require_store
from prolepsis.engine.profiles import MIXED_BITS, PredictorKind, calibrate, collect, compare, kv_of_texts, mixed_bits
from prolepsis.errors import InputError
from prolepsis.kv.stored import token_dtype_named
from prolepsis.model.pull import DEFAULT_MODEL
from prolepsis.store import replace_file, require_writable

_FEW_TOKENS = 2000
_LEAST_TOKENS = 256


def calibrate_(
    text: Annotated[list[Path], typer.Option(help="A UTF-8 text file to calibrate on; may be repeated.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the profile to this file, for --profile. Default: keep it in the data directory, where `kv` "
            "and `chat` find it. Older ones stay there, for the sessions coded with them.",
        ),
    ] = None,
    model: ModelArgument = DEFAULT_MODEL,
    predictor: Annotated[
        str, typer.Option(help=f"What the profile is for: {', '.join(get_args(PredictorKind))}.")
    ] = "linear",
    bits: Annotated[
        float | None,
        typer.Option(
            help="Of twin-mixed: bits that a weight of the twin has on average, scales included. Which have more and "
            f"which fewer is chosen so that the coded KV is small. Default: {MIXED_BITS:g}."
        ),
    ] = None,
    kv_dtype: DtypeOption = "bf16",
    tokens: Annotated[
        int, typer.Option(help="Most tokens to calibrate on; they need room on the disk meanwhile.")
    ] = 16384,
    window: Annotated[int, typer.Option(help="Tokens read together; each window starts anew.")] = 2048,
    check: Annotated[
        list[Path] | None, typer.Option(help="A text to see the profile's worth on, as well; may be repeated.")
    ] = None,
    kv_memory: MemoryOption = None,
    threads: ThreadsOption = None,
    json_: JsonOption = False,
) -> None:
    """Fit a profile to the KV cache that a model makes of texts, and tell what that buys."""
    kind: PredictorKind = choice(predictor, "--predictor", get_args(PredictorKind))
    dtype = token_dtype_named(kv_dtype)
    for flag, value, least in (("--tokens", tokens, _LEAST_TOKENS), ("--window", window, 1)):
        if value < least:
            raise InputError(f"{flag} must be at least {least}, not {value}")
    if bits is not None and kind != "twin-mixed":
        raise InputError(f"--bits is for --predictor twin-mixed, not {kind}")
    if str(output) == "-":
        raise InputError("-o: a profile is written to a file, not to standard output; give its name")
    contents = [read_text(path, "--text") for path in text]
    checks = {str(path): read_text(path, "--check") for path in check or []}
    if output is None:
        require_store()
    else:
        require_writable(output)
    llm = load(model, kv_memory=kv_memory, kv_dtype=dtype, threads=threads)
    window = min(window, llm.max_context)
    texts = [llm.tokenizer.encode(content) for content in contents]
    checked = {name: llm.tokenizer.encode(content) for name, content in checks.items()}
    for name, ids in checked.items():
        if not ids:
            raise InputError(f"--check: {name} has no text")
    total = min(tokens, sum(map(len, texts)))
    if total < _LEAST_TOKENS:
        names = ", ".join(map(str, text))
        raise InputError(f"--text: {names}: {total} tokens are too few to calibrate on, which takes {_LEAST_TOKENS}")
    if total < _FEW_TOKENS:
        note(f"{total} tokens are few to calibrate on; a few thousand do better", "yellow")
    start = time.perf_counter()
    with _sample(llm, texts, dtype, window, tokens, "reading the texts") as sample:
        with bar("fitting") as on_progress:
            calibrated = calibrate(llm, sample, kind, on_progress, MIXED_BITS if bits is None else bits)
        path = keep(calibrated) if output is None else _write(output, calibrated)
        seconds = time.perf_counter() - start
        rates = {} if sample.fitted.all() else {"held out of the fit": compare(calibrated, sample, held_out=True)}
    for name, ids in checked.items():
        with _sample(llm, [ids], dtype, window, tokens, f"reading {name}") as sample:
            rates[name] = compare(calibrated, sample)
    report = {
        "file": str(path),
        "file_bytes": path.stat().st_size,
        "predictor": calibrated.profile.predictor_name,
        "fingerprint": calibrated.profile.fingerprint,
        "dtype": dtype,
        "tokens": calibrated.tokens,
        "seconds": seconds,
        "bits": mixed_bits(llm, calibrated.profile),
        "rates": [{"text": name, **row._asdict()} for name, row in rates.items()],
    }
    if isinstance(calibrated.profile, TwinProfile) and calibrated.profile.is_as_target:
        note("no weight of the model has more bits than that: all are taken as they are, as twin-int8 does")
    if json_:
        print_json(report)
    else:
        _print(report)
        if output is None:
            note(f"it is kept there: {_used_by(llm, kind, dtype, path)}; sessions coded with it need it")


def _used_by(llm: LLM, kind: PredictorKind, dtype: DType, path: Path) -> str:
    """Who will code with the profile that was just kept."""
    best = best_kept(llm, dtype, lambda why: None)
    told = "from now on" if best is not None and best.path == path else f"with --predictor {kind}"
    return f"`kv save` and `chat --session` use it {told}"


def _write(path: Path, calibrated: CalibratedProfile) -> Path:
    with replace_file(path) as file:
        file.write(to_bytes(calibrated))
    return path


def _sample(
    llm: LLM, texts: Sequence[Sequence[int]], dtype: DType, window: int, tokens: int, what: str
) -> CalibrationSample:
    total = min(tokens, sum(map(len, texts)))
    with bar(what) as on_progress:
        return collect(llm, kv_of_texts(llm, texts, dtype, window, total, on_progress), dtype, total)


def _print(report: dict[str, Any]) -> None:
    print(
        f"{report['file']}: {report['predictor']} for {report['dtype']}, {report['file_bytes'] / 1e6:.1f} MB, from "
        f"{report['tokens']} tokens in {report['seconds']:.0f} s"
    )
    if report["bits"]:
        print("bits a weight: " + ", ".join(f"{name} {bits:.3f}" for name, bits in report["bits"].items()))
    table = Table(title="stored bytes per coded byte")
    for column in ("text", "tokens", "this profile", "static, measured on the text"):
        table.add_column(column, justify="left" if column == "text" else "right")
    for row in report["rates"]:
        numbers = (f"{row['ratio']:.3f}", f"{row['uncalibrated_ratio']:.3f}")
        table.add_row(escape(row["text"]), str(row["tokens"]), *numbers)
    Console().print(table)
