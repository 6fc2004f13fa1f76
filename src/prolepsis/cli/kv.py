"""`kv save`, `load`, `inspect` and `verify`: coded KV caches as files."""

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prolepsis.cli.console import (
    ContextOption,
    DtypeOption,
    JsonOption,
    MemoryOption,
    ModelOption,
    ThreadsOption,
    bar,
    load,
    note,
    print_json,
    read_text,
    show,
)
from prolepsis.coding import SessionReader
from prolepsis.engine.llm import LLM
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.session import load_session, save_session
from prolepsis.errors import ProlepsisError
from prolepsis.model.pull import DEFAULT_MODEL
from prolepsis.store import open_session, require_writable

SessionArgument = Annotated[Path, typer.Argument(help="A session file.")]


def save(
    text: Annotated[Path, typer.Argument(help="A UTF-8 text file; - is standard input.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The session file to write.")],
    model: ModelOption = DEFAULT_MODEL,
    max_context: ContextOption = None,
    kv_memory: MemoryOption = None,
    kv_dtype: DtypeOption = "bf16",
    threads: ThreadsOption = None,
    json_: JsonOption = False,
) -> None:
    """Compute the KV cache of a text and save it, losslessly coded."""
    content = read_text(text, "TEXT")
    require_writable(output)
    llm = load(model, max_context=max_context, kv_memory=kv_memory, kv_dtype=kv_dtype, threads=threads)
    sequence = llm.runner.new_sequence(llm.encode(content))
    start = time.perf_counter()
    with bar("reading the text") as on_progress:
        llm.runner.prefill(sequence, on_progress)
    middle = time.perf_counter()
    writer = save_session(output, llm, sequence)
    end = time.perf_counter()
    raw = sequence.num_cached * llm.kv_cache.bytes_per_token
    report = {
        "file": str(output),
        "tokens": sequence.num_cached,
        "predictor": writer.header.predictor,
        "raw_bytes": raw,
        "coded_bytes": writer.coded_bytes,
        "ratio": raw / writer.coded_bytes,
        "prefill_s": middle - start,
        "save_s": end - middle,
    }
    if json_:
        print_json(report)
    else:
        print(
            f"saved {report['tokens']} tokens to {output}: {raw / 1e6:.2f} MB as {writer.coded_bytes / 1e6:.2f} MB "
            f"(ratio {report['ratio']:.3f}) in {report['save_s']:.2f} s"
        )


def load_(
    session: SessionArgument,
    prompt: Annotated[str, typer.Option(help="Text to append before continuing.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 always takes the most probable token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes a sampled continuation repeatable.")] = None,
    recompute: Annotated[
        bool,
        typer.Option(
            help="Where a segment is damaged, compute its tokens and all later ones again; else the file is refused."
        ),
    ] = False,
    model: ModelOption = DEFAULT_MODEL,
    max_context: ContextOption = None,
    kv_memory: MemoryOption = None,
    kv_dtype: DtypeOption = "bf16",
    threads: ThreadsOption = None,
    json_: JsonOption = False,
) -> None:
    """Restore a session and continue it."""
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    llm = load(model, max_context=max_context, kv_memory=kv_memory, kv_dtype=kv_dtype, threads=threads)
    start = time.perf_counter()
    saved = load_session(session, llm, recompute=recompute)
    restore_s = time.perf_counter() - start
    sequence, restored = saved.sequence, saved.sequence.num_cached
    if saved.refused is not None:
        note(f"refused, to be computed again: {saved.refused}", "yellow")
    note(f"restored {restored} of {len(sequence.tokens)} tokens in {restore_s:.3f} s")
    if prompt:
        sequence.tokens.extend(llm.tokenizer.encode(prompt, add_bos=False))
    request = llm.new_request(sequence, params)
    with bar("reading what is not restored") as on_progress:
        for delta in llm.run(request, on_progress):
            if not json_:
                show(delta.text)
    done = request.completion
    if json_:
        print_json(
            {
                "restored_tokens": restored,
                "restore_s": restore_s,
                "refused": saved.refused,
                "cached_tokens": done.cached_tokens,
                "prompt_tokens": done.prompt_tokens,
                "token_ids": done.token_ids,
                "text": done.text,
                "finish_reason": done.finish_reason,
                "seed": done.seed,
            }
        )
    else:
        print()


def inspect(session: SessionArgument, json_: JsonOption = False) -> None:
    """What a session file holds, from its header and index alone."""
    with open_session(session) as reader:
        report = _describe(reader, session)
    if json_:
        print_json(report)
        return
    layers = report.pop("coded_bytes_by_layer")
    table = Table(title=escape(str(session)), show_header=False)
    for key, value in report.items():
        table.add_row(key, f"{value:.3f}" if isinstance(value, float) else escape(str(value)))
    per_layer = Table(title="ratio by layer")
    for column in ("layer", "K", "V"):
        per_layer.add_column(column, justify="right")
    raw = report["raw_bytes"] / (2 * len(layers))
    for index, layer in enumerate(layers):
        per_layer.add_row(str(index), *(f"{raw / size:.3f}" if size else "-" for size in (layer["k"], layer["v"])))
    console = Console()
    console.print(table)
    console.print(per_layer)


def verify(
    session: SessionArgument,
    against: Annotated[
        str | None, typer.Option(help="Also compute the tokens again with this model and compare every bit.")
    ] = None,
    max_context: ContextOption = None,
    kv_memory: MemoryOption = None,
    threads: ThreadsOption = None,
    json_: JsonOption = False,
) -> None:
    """Decode a whole session and check every value against its checksum."""
    with open_session(session) as reader:
        dtype = reader.header.dtype
        with bar("decoding") as on_progress:
            for index in range(len(reader.segments)):
                reader.read(index)
                on_progress(index + 1, len(reader.segments))
        report: dict[str, Any] = {
            "file": str(session),
            "tokens": reader.stop - reader.start,
            "segments": len(reader.segments),
            "sound": True,
        }
    if against is not None:
        llm = load(against, max_context=max_context, kv_memory=kv_memory, kv_dtype=dtype, threads=threads)
        report["equal_to_recomputed"] = _equals_recomputed(session, llm)
    if json_:
        print_json(report)
    else:
        print(f"{session}: {report['tokens']} tokens in {report['segments']} segments, every checksum agrees")
        if report.get("equal_to_recomputed"):
            print("computed again: every bit agrees")
    if report.get("equal_to_recomputed") is False:
        raise ProlepsisError(f"{session}: computing the tokens again gives other values")


def _equals_recomputed(session: Path, llm: LLM) -> bool:
    sequence, cache = load_session(session, llm).sequence, llm.kv_cache
    saved = cache.read(sequence.table, 0, sequence.num_cached)
    again = llm.runner.new_sequence(sequence.tokens[: sequence.num_cached])
    sequence.release()  # the cache need not have room for both
    with bar("computing again") as on_progress:
        llm.runner.prefill(again, on_progress)
    return bool(np.array_equal(saved, cache.read(again.table, 0, again.num_cached)))


def _describe(reader: SessionReader, session: Path) -> dict[str, Any]:
    header = reader.header
    lengths = sum(
        (s.index["length"].astype(np.int64) for s in reader.segments), start=np.zeros(header.streams, np.int64)
    )
    by_layer = lengths.reshape(header.layers, 2, -1).sum(axis=2)
    size = session.stat().st_size
    return {
        "model": header.model.get("name", ""),
        "model_file": header.model.get("file", ""),
        "numerics": header.numerics,
        "predictor": header.predictor,
        "profile": header.profile_fingerprint,
        "dtype": header.dtype,
        "layers": header.layers,
        "kv_heads": header.kv_heads,
        "head_dim": header.head_dim,
        "block_size": header.block_size,
        "tokens": reader.stop - reader.start,
        "segments": len(reader.segments),
        "raw_bytes": reader.raw_bytes,
        "file_bytes": size,
        "ratio": reader.raw_bytes / size,
        "coded_bytes_by_layer": [{"k": int(k), "v": int(v)} for k, v in by_layer],
    }
