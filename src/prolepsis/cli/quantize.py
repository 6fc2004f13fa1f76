"""`quantize`: make a quantised model."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from prolepsis.cli.console import JsonOption, ModelArgument, bar, choice, note, print_json, read_text
from prolepsis.errors import InputError
from prolepsis.model.imatrix import read_imatrix
from prolepsis.model.model_file import open_model
from prolepsis.model.pull import resolve
from prolepsis.quantize.gguf_layout import TYPES
from prolepsis.quantize.job import quantise
from prolepsis.quantize.options import BITS, FORMATS, METHODS, Options
from prolepsis.quantize.report import Report

_DEFAULT_TYPE = "Q4_K"


def quantize(
    model: ModelArgument,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="What to make: a directory, or with --format gguf a file. It appears when it is whole. Work in "
            "progress lies beside it in OUTPUT.part; the same command goes on with it.",
        ),
    ],
    method: Annotated[
        str,
        typer.Option(
            help="rtn: each weight to the nearest. gptq: columns make up for each other's errors. awq: columns that "
            "matter are scaled up first. mixed: gptq with bits where they count, 2 to 8 in one "
            "model (EXL2). All but rtn need --calibration; rtn to a GGUF type is better with it."
        ),
    ] = "gptq",
    bits: Annotated[
        float | None,
        typer.Option(help=f"Of a weight: {', '.join(map(str, BITS))}; for mixed an average, such as 4.5. Default: 4."),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="Columns that share a scale; 0: all. Default: 128, or less where that divides no row."),
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(help="A UTF-8 text file like what the model will meet; may be repeated."),
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", help=f"Of the output: {' or '.join(FORMATS)} (a Hugging Face directory).")
    ] = "safetensors",
    type_: Annotated[
        str | None,
        typer.Option(
            "--type",
            help=f"Of a GGUF file's weights: {', '.join(TYPES)}. Default: {_DEFAULT_TYPE} for rtn, else Q4_0 or, with "
            "--asym, Q4_1.",
        ),
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(
            help="llama.cpp's i-matrix, which says how much columns count: in place of --calibration, for rtn to a "
            "GGUF type."
        ),
    ] = None,
    act_order: Annotated[
        bool | None,
        typer.Option(
            "--act-order/--no-act-order",
            help="gptq: columns that weigh most come first. Default: --act-order; vLLM reads only the other.",
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--sym/--asym",
            help="Without or with zero points. Default: awq has them, the others not. In GGUF for gptq and awq, where "
            "no --type is given.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Most pieces of text to calibrate on.")] = 128,
    length: Annotated[int, typer.Option(help="Tokens in a piece, up to 8192.")] = 512,
    seed: Annotated[int, typer.Option(help="Which pieces, where the texts have more.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an older model at OUTPUT.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Throw away what OUTPUT.part holds.")] = False,
    json_: JsonOption = False,
) -> None:
    """Make a quantised model of another: a Hugging Face directory in GPTQ's, AWQ's or EXL2's layout, or a GGUF file."""
    gguf = choice(format_, "--format", FORMATS) == "gguf"
    choice(method, "--method", METHODS)
    if gguf and (bits is not None or group_size is not None):
        raise InputError("--bits and --group-size are for --format safetensors; in a GGUF file --type says both")
    if type_ is not None and not gguf:
        raise InputError("--type is for --format gguf")
    options = Options(
        method=method,
        bits=4 if bits is None else bits,
        group=group_size,
        symmetric=None if gguf and type_ is None and method != "rtn" else symmetric,
        act_order=act_order,
        samples=samples,
        length=length,
        seed=seed,
        gguf_type=_gguf_type(type_, method, symmetric) if gguf else None,
    )
    options.check()
    texts = [read_text(path, "--calibration") for path in calibration or []]
    importance = None if imatrix is None else read_imatrix(imatrix)
    with bar(f"fetching {model}", unit="bytes") as on_download:
        original = open_model(resolve(model, progress=on_download))
    with bar("quantising layers") as on_progress:
        try:
            report = quantise(
                original,
                options,
                texts,
                output,
                force=force,
                restart=restart,
                imatrix=importance,
                progress=on_progress,
                note=note,
            )
        except KeyboardInterrupt:
            note("stopped; the same command goes on with the layers that are done")
            raise
    if json_:
        print_json(report.as_json())
    else:
        _print(report)


def _gguf_type(name: str | None, method: str, symmetric: bool | None) -> str:
    if name is None:
        return _DEFAULT_TYPE if method == "rtn" else "Q4_1" if symmetric is False else "Q4_0"
    return choice(name.upper(), "--type", TYPES)


def _print(report: Report) -> None:
    table = Table(title=f"{report.path}: {report.nbytes / 1e6:.1f} MB in {report.seconds:.0f} s")
    for column in ("matrices", "held as", "weights", "MB", "bits a weight"):
        table.add_column(column, justify="left" if column in ("matrices", "held as") else "right")
    for row in report.rows:
        numbers = (f"{row.weights:,}", f"{row.nbytes / 1e6:.1f}", f"{row.bits:.2f}")
        table.add_row(row.part, ", ".join(row.kinds), *numbers)
    table.add_section()
    table.add_row("all of the layers", "", "", "", f"{report.layer_bits:.2f}")
    table.add_row("all", "", "", "", f"{report.bits:.2f}")
    Console().print(table)
