"""`kv save`, `load`, `inspect` and `verify`: coded KV caches as files."""

import json
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from math import prod
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
    PrecisionOption,
    ThreadsOption,
    bar,
    load,
    note,
    print_json,
    read_text,
    show,
)
from prolepsis.cli.profiles import PredictorOption, ProfileOption, predictor_kind, profile_to_save_with
from prolepsis.coding import SessionReader, SessionStream
from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.container import SegmentEntry
from prolepsis.engine.identity import identity
from prolepsis.engine.llm import LLM
from prolepsis.engine.profile_store import profile_of_session
from prolepsis.engine.profiles import load_profile, needs_model, read_profile
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.session import load_session, save_session, write_session
from prolepsis.errors import InputError, ProlepsisError, SegmentError
from prolepsis.kv.stored import arrays_of
from prolepsis.model.decoder import precision_of
from prolepsis.model.pull import DEFAULT_MODEL
from prolepsis.store import open_session, require_writable

SessionArgument = Annotated[Path, typer.Argument(help="A session file.")]
SessionOrPipe = Annotated[Path, typer.Argument(help="A session file; - is standard input.")]

_LISTED = 16  # segments named in one message
_PIPE = Path("-")


def save(
    text: Annotated[Path, typer.Argument(help="A UTF-8 text file; - is standard input.")],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="The session file to write; - is standard output. An earlier state of the same text is added to, "
            "any other file replaced.",
        ),
    ],
    predictor: PredictorOption = None,
    profile: ProfileOption = None,
    model: ModelOption = DEFAULT_MODEL,
    max_context: ContextOption = None,
    kv_memory: MemoryOption = None,
    kv_dtype: DtypeOption = "bf16",
    precision: PrecisionOption = "high",
    threads: ThreadsOption = None,
    json_: JsonOption = False,
) -> None:
    """Compute the KV cache of a text and save it, losslessly coded."""
    kind = predictor_kind(predictor)
    content = read_text(text, "TEXT")
    if output != _PIPE:
        require_writable(output)
    elif sys.stdout.isatty():
        raise InputError("a session file is no text for a terminal; redirect standard output, or give --output a name")
    llm = load(
        model, max_context=max_context, kv_memory=kv_memory, kv_dtype=kv_dtype, precision=precision, threads=threads
    )
    coded_with = profile_to_save_with(llm, kind, profile)
    existed = output != _PIPE and output.exists()
    sequence = llm.runner.new_sequence(llm.encode(content))
    start = time.perf_counter()
    with bar("reading the text") as on_progress:
        llm.runner.prefill(sequence, on_progress)
    middle = time.perf_counter()
    if output == _PIPE:
        saved = write_session(sys.stdout.buffer, llm, sequence, profile=coded_with)
        sys.stdout.flush()
    else:
        saved = save_session(output, llm, sequence, profile=coded_with)
    end = time.perf_counter()
    cache = llm.kv_cache
    shape = (cache.num_layers, cache.num_kv_heads, cache.head_dim)
    report = {
        "file": str(output),
        "tokens": saved.tokens,
        "pending_tokens": len(sequence.tokens) - saved.tokens,
        "appended_tokens": saved.appended,
        "replaced": existed and saved.appended is None,
        "predictor": saved.predictor,
        **_sizes(saved.tokens * cache.bytes_per_token, saved.tokens, shape),
        "coded_bytes": saved.file_bytes,
        "ratio": saved.tokens * cache.bytes_per_token / saved.file_bytes,
        "prefill_s": middle - start,
        "save_s": end - middle,
    }
    if json_:
        print(json.dumps(report), file=sys.stderr if output == _PIPE else sys.stdout)
        return
    added = "" if saved.appended is None else f", {saved.appended} of them added"
    added += " in place of the file that was there" if report["replaced"] else ""
    left = report["pending_tokens"]
    added += f" ({left} more are computed again when it is loaded)" if left else ""
    print(
        f"saved {saved.tokens} tokens to {output}{added}: {_lossy(report, cache.dtype)}"
        f"{report['raw_bytes'] / 1e6:.2f} MB as {saved.file_bytes / 1e6:.2f} MB (ratio {report['ratio']:.3f}) "
        f"in {report['save_s']:.2f} s",
        file=sys.stderr if output == _PIPE else sys.stdout,
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
            help="Where a segment is damaged, compute its tokens and all later ones again; where the last save was "
            "broken off, go back to the one before. Else the file is refused."
        ),
    ] = False,
    profile: ProfileOption = None,
    model: ModelOption = DEFAULT_MODEL,
    max_context: ContextOption = None,
    kv_memory: MemoryOption = None,
    kv_dtype: DtypeOption = "bf16",
    precision: PrecisionOption = "high",
    threads: ThreadsOption = None,
    json_: JsonOption = False,
) -> None:
    """Restore a session and continue it."""
    if session == _PIPE:
        raise InputError("kv load needs a file: a session is read again when it goes on")
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    llm = load(
        model, max_context=max_context, kv_memory=kv_memory, kv_dtype=kv_dtype, precision=precision, threads=threads
    )
    coded_with = None if profile is None else load_profile(profile, llm, llm.kv_cache.dtype)
    start = time.perf_counter()
    saved = load_session(session, llm, recompute=recompute, profile=coded_with)
    restore_s = time.perf_counter() - start
    sequence, restored = saved.sequence, saved.sequence.num_cached
    for lost in (saved.refused, saved.torn):
        if lost is not None:
            note(f"not restored: {lost}", "yellow")
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
                "torn": saved.torn,
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


def inspect(session: SessionOrPipe, json_: JsonOption = False) -> None:
    """What a session file holds, from its header and index alone."""
    if session == _PIPE:
        stream = SessionStream(sys.stdin.buffer, "standard input")
        segments = list(stream.entries())
        report = _describe(stream, segments, stream.bytes_read)
    else:
        with open_session(session) as reader:
            report = _describe(reader, reader.segments, session.stat().st_size)
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
    session: SessionOrPipe,
    against: Annotated[
        str | None, typer.Option(help="Also compute the tokens again with this model and compare every bit.")
    ] = None,
    profile: ProfileOption = None,
    model: Annotated[
        str | None,
        typer.Option(help="The model that the session belongs to, where its predictor needs that: linear, twins."),
    ] = None,
    max_context: ContextOption = None,
    kv_memory: MemoryOption = None,
    threads: ThreadsOption = None,
    json_: JsonOption = False,
) -> None:
    """Decode a whole session and check every value against its checksum."""
    if session == _PIPE and against is not None:
        raise InputError("--against needs a file: standard input can be read only once")
    with _opened(session) as coded:
        header = coded.header
        name = against or (model if header.profile is None else None)
        dtype = header.dtype if against is not None else "bf16"
        llm = None
        if name is not None:
            llm = load(
                name,
                max_context=max_context,
                kv_memory=kv_memory,
                kv_dtype=dtype,
                precision=precision_of(header.numerics),
                threads=threads,
            )
        coded_with = None
        if llm is not None and isinstance(coded, SessionReader):
            coded.require(model=identity(llm))
        if header.profile is None:
            coded_with = _profile_to_read_with(profile, coded, llm)
            coded.use(coded_with)
        elif profile is not None:
            note(f"{coded.name} brings its own profile; {profile} is not needed")
        elif model is not None and against is None:
            note(f"{coded.name} brings its own profile; {model} is not needed")
        segments = _decode(coded)
    tokens = sum(segment.count for segment in segments)
    report: dict[str, Any] = {"file": str(session), "tokens": tokens, "segments": len(segments), "sound": True}
    if against is not None and llm is not None:
        report["equal_to_recomputed"] = _equals_recomputed(session, llm, coded_with)
    if json_:
        print_json(report)
    else:
        print(f"{session}: {report['tokens']} tokens in {report['segments']} segments, every checksum agrees")
        if report.get("equal_to_recomputed"):
            print("computed again: every bit agrees")
    if report.get("equal_to_recomputed") is False:
        raise ProlepsisError(f"{session}: computing the tokens again gives other values")


def _opened(session: Path) -> AbstractContextManager[SessionReader | SessionStream]:
    if session == _PIPE:
        return nullcontext(SessionStream(sys.stdin.buffer, "standard input"))
    return open_session(session)


def _decode(coded: SessionReader | SessionStream) -> list[SegmentEntry]:
    """Every segment, once its values are decoded and checked."""
    if isinstance(coded, SessionStream):
        return [entry for entry, _ in coded]
    positions = coded.coder.predictor.positions
    if positions is not None and coded.stop > positions:
        raise InputError(
            f"{coded.name} holds {coded.stop} tokens, but the context holds {positions}; "
            "raise --max-context or --kv-memory"
        )
    with bar("decoding") as on_progress:
        faults = coded.faults(on_progress)
    if len(faults) > 1:
        numbers = ", ".join(str(fault.segment) for fault in faults[:_LISTED]) + ", ..." * (len(faults) > _LISTED)
        lost = f"{len(faults)} of {len(coded.segments)} segments cannot be restored: {numbers}"
        raise SegmentError(f"{faults[0].why}; in all, {lost}")
    if faults:
        raise SegmentError(faults[0].why)
    return coded.segments


def _profile_to_read_with(path: Path | None, coded: SessionReader | SessionStream, llm: LLM | None) -> AnyProfile:
    if path is None:
        return profile_of_session(coded.header, coded.name, llm)
    if llm is not None:
        return load_profile(path, llm, coded.header.dtype)
    profile = read_profile(path).profile
    if needs_model(profile):
        raise InputError(f"{path} predicts with the model that it belongs to: pass that with --model")
    return profile


def _equals_recomputed(session: Path, llm: LLM, profile: AnyProfile | None) -> bool:
    sequence, cache = load_session(session, llm, profile=profile).sequence, llm.kv_cache
    if sequence.num_cached == 0:
        return True
    saved = arrays_of(cache.read(sequence.table, 0, sequence.num_cached))
    again = llm.runner.new_sequence(sequence.tokens[: sequence.num_cached])
    sequence.release()  # the cache need not have room for both
    with bar("computing again") as on_progress:
        llm.runner.prefill(again, on_progress)
    return all(map(np.array_equal, saved, arrays_of(cache.read(again.table, 0, again.num_cached))))


def _sizes(raw: int, tokens: int, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Bytes that the cache has, and how many times as many bf16 takes: what a narrow dtype saves, which is lossy, and
    what the codec's own ratio comes on top of. shape: layers, KV heads and head_dim."""
    bf16 = tokens * prod(shape) * 2 * 2  # K and V, two bytes each
    return {"bf16_bytes": bf16, "raw_bytes": raw, "dtype_ratio": bf16 / raw if raw else 1.0}


def _lossy(report: Mapping[str, Any], dtype: str) -> str:
    if report["dtype_ratio"] == 1:
        return ""
    return f"{report['bf16_bytes'] / 1e6:.2f} MB of bf16 in {dtype} (lossy, ratio {report['dtype_ratio']:.3f}), "


def _describe(session: SessionReader | SessionStream, segments: list[SegmentEntry], file_bytes: int) -> dict[str, Any]:
    header = session.header
    lengths = sum((s.index["length"].astype(np.int64) for s in segments), start=np.zeros(header.streams, np.int64))
    by_layer = lengths.reshape(header.layers, 2, -1).sum(axis=2)
    tokens = sum(s.count for s in segments)
    raw = header.raw_bits * tokens // 8
    return {
        "model": header.model.get("name", ""),
        "model_file": header.model.get("file", ""),
        "numerics": header.numerics,
        "format_version": session.version,
        "predictor": header.predictor,
        "profile": header.profile_fingerprint,
        "profile_in_file": header.profile is not None,
        "dtype": header.dtype,
        "layers": header.layers,
        "kv_heads": header.kv_heads,
        "head_dim": header.head_dim,
        "block_size": header.block_size,
        "tokens": tokens,
        "segments": len(segments),
        "saves": len(session.saves),
        **_sizes(raw, tokens, (header.layers, header.kv_heads, header.head_dim)),
        "file_bytes": file_bytes,
        "ratio": raw / file_bytes,
        "coded_bytes_by_layer": [{"k": int(k), "v": int(v)} for k, v in by_layer],
    }
