"""`kv plan`: what memory users and their contexts take, and what a store of their K and V would buy."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from prolepsis.bench.kv_plan import (
    ON_DEFAULT_MODEL,
    CodedSize,
    Fetches,
    decide,
    fetch,
    measure_coded,
    prefill_tok_s,
    tokens_to_measure,
)
from prolepsis.cli.console import (
    DtypeOption,
    JsonOption,
    ModelArgument,
    PrecisionOption,
    ThreadsOption,
    bar,
    load,
    note,
    parse_tokens,
    print_json,
    read_text,
)
from prolepsis.cli.kv_plan_tables import show_plan
from prolepsis.coding.cache_dtypes import DType
from prolepsis.coding.profile import GRID
from prolepsis.demo.run import document
from prolepsis.engine.kv_store import PREDICTORS
from prolepsis.engine.llm import LLM
from prolepsis.engine.sizing import cache_size, users_that_fit
from prolepsis.errors import InputError
from prolepsis.kv.stored import DTYPES, TOKEN_DTYPES, dtype_named
from prolepsis.model.config import ModelConfig
from prolepsis.model.memory import free_memory
from prolepsis.model.model_file import ModelFile, open_model
from prolepsis.model.pull import DEFAULT_MODEL, resolve

_MOST_USERS = 1_000_000


class _Measured(NamedTuple):
    """tokens: how many were measured on. prefill: tokens a second."""

    tokens: int
    prefill: float
    coded: list[CodedSize]
    fetched: list[Fetches]


def plan(
    model: ModelArgument = DEFAULT_MODEL,
    context: Annotated[
        str | None, typer.Option(help="Tokens of each user, e.g. 4k, 32k or 100000. Default: what the model allows.")
    ] = None,
    users: Annotated[int, typer.Option(help="How many have such a context at once, nothing of it shared.")] = 1,
    kv_dtype: DtypeOption = "bf16",
    store: Annotated[
        list[str] | None,
        typer.Option(
            help="A tier of the store as `serve` takes it, to be measured; may be repeated. Default: typical speeds."
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text to measure on. Default: 1,400 tokens that ship with this package.")
    ] = None,
    precision: PrecisionOption = "high",
    threads: ThreadsOption = None,
    json_: JsonOption = False,
) -> None:
    """Size a server: what the KV cache of so many users takes in each number format, raw and losslessly coded, what of
    it fits here, and from which tier of a store it pays to restore it with which predictor instead of computing it.

    Coded sizes and speeds are measured on a short text, here and now.
    """
    dtype = dtype_named(kv_dtype)
    if not 1 <= users <= _MOST_USERS:
        raise InputError(f"--users must be in 1 .. {_MOST_USERS}, not {users}")
    asked = None if context is None else parse_tokens(context, "--context")
    content = document() if text is None else read_text(text, "--text")
    with bar(f"fetching {model}", unit="bytes") as on_download:
        file = open_model(resolve(model, progress=on_download))
    length = asked or file.config.max_context
    if length > file.config.max_context:
        note(f"--context {context}: {model} was trained for {file.config.max_context} tokens", "yellow")
    budget = free_memory() - file.size
    measured = None
    if budget > 0:
        llm = load(model, kv_dtype=dtype, precision=precision, threads=threads)
        measured = _measure(llm, llm.tokenizer.encode(content), dtype, store or ())
    else:
        note(f"nothing is measured: weights of {file.size / 1e9:.1f} GB do not fit into this machine", "yellow")
    report = {"model": model, **_report(file, length, users, budget, dtype, measured)}
    if json_:
        print_json(report)
    else:
        show_plan(report)


def _report(
    file: ModelFile, context: int, users: int, budget: int, dtype: DType, measured: _Measured | None
) -> dict[str, Any]:
    """budget: bytes that are free beside the weights, below 0 where not even these have room."""
    config = file.config
    return {
        "layers": config.num_layers,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_context": config.max_context,
        "context": context,
        "users": users,
        "weights_bytes": file.size,
        "free_bytes": budget + file.size,
        "measured_tokens": 0 if measured is None else measured.tokens,
        "prefill_tok_s": None if measured is None else measured.prefill,
        "caches": _caches(config, context, users, budget, () if measured is None else measured.coded),
        "store_dtype": dtype,
        "restores": [] if measured is None else _restores(measured, dtype, config, context, file.size),
    }


def _measure(llm: LLM, ids: Sequence[int], dtype: DType, stores: Sequence[str]) -> _Measured:
    """What is coded in every dtype, and fetched from every tier."""
    skipped: list[str] = []
    dtypes = sorted({*TOKEN_DTYPES, dtype}, key=DTYPES.index)
    with bar("measuring") as on_progress:
        ids = tokens_to_measure(llm, ids)
        prefill = prefill_tok_s(llm, ids)
        coded: list[CodedSize] = []
        for done, each in enumerate(dtypes):
            on_progress(done, len(dtypes) + len(stores))
            coded += measure_coded(llm, ids, each, skipped.append)
        size = max((llm.kv_cache.bytes_per_token * GRID / c.ratio for c in coded if c.dtype == dtype), default=GRID)
        fetched = []
        for done, spec in enumerate(stores):
            on_progress(len(dtypes) + done, len(dtypes) + len(stores))
            fetched.append(fetch(spec, int(size)))
    for why in skipped:
        note(why, "yellow")
    return _Measured(len(ids), prefill, coded, fetched)


def _caches(
    config: ModelConfig, context: int, users: int, budget: int, coded: Sequence[CodedSize]
) -> list[dict[str, Any]]:
    """A record of each dtype that holds the model's heads. coded_bytes of what was measured, here or on the default
    model (`reference_ratios`)."""
    records = []
    for dtype in DTYPES:
        try:
            size = cache_size(config, dtype, context, users)
        except InputError:  # heads of another width than the dtype takes
            continue
        here = [each for each in coded if each.dtype == dtype]
        known = {each.predictor for each in here}
        record: dict[str, Any] = {
            **size._asdict(),
            "fits": size.pool <= budget,
            "users_that_fit": users_that_fit(config, dtype, context, budget),
            "coded": [{**asdict(each), "bytes": int(size.stored / each.ratio)} for each in here],
            "reference_ratios": {
                kind: ratio for (kind, of), ratio in ON_DEFAULT_MODEL.items() if of == dtype and kind not in known
            },
        }
        records.append(record)
    return records


def _restores(
    measured: _Measured, dtype: DType, config: ModelConfig, context: int, model_size: int
) -> list[dict[str, Any]]:
    coded = [each for each in measured.coded if each.dtype == dtype and each.predictor in PREDICTORS]
    token = cache_size(config, dtype, context, 1).token
    decided = decide(
        coded, measured.prefill, measured.fetched, context=context, token_size=token, model_size=model_size
    )
    return [
        {
            "tier": each.tier,
            "kind": each.kind,
            "measured": bool(measured.fetched),
            "latency_s": each.latency,
            # Measured, memory hands over what it has: nothing is copied.
            "bytes_per_s": None if each.kind == "memory" and measured.fetched else each.bandwidth,
            "predictor": each.predictor,
            "restore_s": each.plan.restore_s,
            "recompute_s": each.plan.recompute_s,
            "reason": each.plan.reason,
            "explanation": each.plan.explanation,
        }
        for each in decided
    ]
