"""What the commands share: loading a model with signs of life, progress bars, options, and JSON."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from prolepsis.engine import kernel_cache
from prolepsis.engine.llm import LLM
from prolepsis.engine.progress import bar as bar
from prolepsis.engine.warm_up import warm_up
from prolepsis.errors import InputError
from prolepsis.model.decoder import PRECISIONS
from prolepsis.model.memory import parse_size
from prolepsis.model.pull import cache_directory

err = Console(stderr=True)
"""Everything but results goes here, so that standard output can be piped."""

_MODEL = "A GGUF file, a directory of a checkpoint, a registered name (smollm2:135m), or a Hugging Face repository."
ModelArgument = Annotated[str, typer.Argument(help=_MODEL)]
ModelOption = Annotated[str, typer.Option(help=_MODEL)]
ContextOption = Annotated[int | None, typer.Option(help="Longest sequence, in tokens. Default: what the model allows.")]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Memory for the KV cache, e.g. 512MiB or 2GiB, taken as it is first used. Default: a quarter of what is "
        "free, or what 64 longest sequences (serve: --max-running) take if that is less."
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="Number format of the KV cache: bf16, fp16, fp8 (same as fp8_e4m3), fp8_e5m2, int8, int4 or kivi4."
    ),
]
EvictOption = Annotated[
    str,
    typer.Option(
        help="What long sequences forget. none, or h2o:BUDGET: of more than BUDGET tokens (h2o:512), or such a "
        "share of the context (h2o:20%), those that least attention was paid to. Lossy."
    ),
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        help="Of products with quantised weights. high: 16 bits of each activation; fast: 8 bits, as most engines have."
    ),
]
DraftOption = Annotated[
    str,
    typer.Option(
        help="Who guesses the tokens that come next, so that one pass may settle several: none, ngram (what followed "
        "these tokens before), twin (the model itself, quantised) or model:MODEL (a small one of the same tokenizer)."
    ),
]
DraftTokensOption = Annotated[
    str, typer.Option(help="How many tokens to guess at a time, 1 .. 32, or auto: as many as pay.")
]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads. Default: one for each core.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

T = TypeVar("T")

_LONGEST_TEXT = 64 << 20  # bytes; far more than any context holds


def note(text: str, style: str | None = None) -> None:
    """One line on standard error, as it is."""
    err.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def load(
    model: str,
    *,
    max_context: int | None = None,
    kv_memory: str | None = None,
    kv_dtype: str = "bf16",
    kv_evict: str = "none",
    precision: str = "high",
    draft: str = "none",
    draft_tokens: str = "auto",
    threads: int | None = None,
    max_running: int = 64,
    say: Callable[[str], None] = note,
) -> LLM:
    """Load a model; downloads and the first compilation of the kernels show what they do.

    say: tells of the latter where standard error is no terminal.
    """
    with bar(f"fetching {model}", unit="bytes") as on_download:
        llm = LLM(
            model,
            max_context=max_context,
            kv_memory=None if kv_memory is None else parse_size(kv_memory, "--kv-memory"),
            kv_dtype=kv_dtype,
            kv_evict=kv_evict,
            precision=choice(precision, "--precision", tuple(PRECISIONS)),
            draft=draft,
            draft_tokens=_draft_tokens(draft_tokens),
            threads=threads,
            max_running=max_running,
            on_download=on_download,
        )
    if llm.needs_compiling:
        what = "compiling the kernels for this CPU, once (about 40 s)"
        if not kernel_cache.outlives_process():
            say(f"{cache_directory()} cannot be written, so each start compiles: set PROLEPSIS_CACHE to another one")
            what = "compiling the kernels for this CPU (about 40 s)"
        if not err.is_terminal:
            say(what)
        with err.status(what):
            warm_up(llm)
    return llm


def note_failed_drafts(llm: LLM) -> None:
    """Say so where drafting had to be given up."""
    speculation = llm.engine.speculation
    if speculation is not None and speculation.failure is not None:
        note(f"went on without drafts: {speculation.failure}", "yellow")


def note_evictions(llm: LLM) -> None:
    """Say so where tokens were forgotten."""
    if llm.runner.evicted_tokens:
        note(
            f"--kv-evict: {llm.runner.evicted_tokens} tokens were dropped from the cache; this output is lossy",
            "yellow",
        )


def _draft_tokens(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isascii() or not text.isdecimal():
        raise InputError(f"--draft-tokens {text!r} is neither auto nor a number from 1 on")
    return int(text[:9])


def choice(value: object, flag: str, choices: Sequence[T]) -> T:
    """`value`, where it is one of `choices`; else InputError names the flag and them."""
    for each in choices:
        if each == value:
            return each
    raise InputError(f"{flag} {value!r} is not known; choose one of {', '.join(map(str, choices))}")


def show(text: str) -> None:
    """Text of an answer on standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def parse_tokens(text: str, flag: str) -> int:
    """Tokens of "32k" (1,024 each), "1m" or a plain number. InputError names the flag."""
    found = re.fullmatch(r"([0-9]{1,9})([km]?)", text.strip().lower())
    count = int(found[1]) << {"": 0, "k": 10, "m": 20}[found[2]] if found else 0
    if not 0 < count < 1 << 40:
        raise InputError(f"{flag} {text!r} is not a number of tokens; write for example 4096, 32k or 1m")
    return count


def read_text(path: Path, flag: str) -> str:
    """A UTF-8 text file, or standard input for "-". InputError names the flag and the file."""
    try:
        with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
            data = file.read(_LONGEST_TEXT + 1)
    except OSError as error:
        raise InputError(f"{flag}: cannot read {path}: {error.strerror}") from error
    if len(data) > _LONGEST_TEXT:
        raise InputError(f"{flag}: {path} is longer than {_LONGEST_TEXT >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{flag}: {path} is not UTF-8 text (byte {error.start})") from error


def print_json(value: Any) -> None:
    """One JSON object on standard output, in one line."""
    print(json.dumps(value, ensure_ascii=sys.stdout.encoding.lower() != "utf-8"))
