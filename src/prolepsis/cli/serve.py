"""`serve`: the model behind an OpenAI-compatible API."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Annotated, Any

import typer

from prolepsis.cli import FORESEEN, cache_advice, failure
from prolepsis.cli.console import (
    ContextOption,
    DraftOption,
    DraftTokensOption,
    DtypeOption,
    EvictOption,
    MemoryOption,
    ModelArgument,
    PrecisionOption,
    ThreadsOption,
    load,
    note,
)
from prolepsis.engine.kv_store import PREDICTORS, check_predictor
from prolepsis.model.memory import parse_size
from prolepsis.model.pull import DEFAULT_MODEL
from prolepsis.serve.logs import Level, json_line, write_line
from prolepsis.serve.options import ServeOptions

_ACCESS, _LIMITS, _LOGS = "Who may use it", "Limits", "Logs"
_LONGEST = 86400  # seconds


def _seconds(what: str, least: float = 0.1) -> Any:
    """An option that bounds how long something may take."""
    return typer.Option(help=f"Seconds {what}.", min=least, max=_LONGEST, rich_help_panel=_LIMITS)


def serve(
    model: ModelArgument = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: as it was given, of a file its name.")
    ] = None,
    max_running: Annotated[int, typer.Option(help="Most sequences that run at once.")] = 64,
    store: Annotated[
        list[str] | None,
        typer.Option(help="Tier of the store, fastest first, e.g. memory:512MiB or disk:DIRECTORY:20GiB; may repeat."),
    ] = None,
    store_predictor: Annotated[
        str, typer.Option(help=f"What codes stored segments: {', '.join(PREDICTORS)}.")
    ] = "auto",
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that clients must send; may repeat. Other users of this machine see it: better "
            "--api-key-file, or PROLEPSIS_API_KEY.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Keys, one a line, and #comments.", rich_help_panel=_ACCESS)
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Name that the server goes by, besides localhost; may repeat.", rich_help_panel=_ACCESS),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose pages may use the server; may repeat. Default: none.", rich_help_panel=_ACCESS),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Sequences that may wait; more get 429.", min=0, rich_help_panel=_LIMITS)
    ] = ServeOptions.max_queue,
    max_sequences: Annotated[
        int, typer.Option(help="Sequences of one request, prompts times n.", min=1, rich_help_panel=_LIMITS)
    ] = ServeOptions.max_sequences,
    max_body: Annotated[str, typer.Option(help="Size of a body.", rich_help_panel=_LIMITS)] = "4MiB",
    max_header: Annotated[
        str, typer.Option(help="Size of a request's first line and headers.", rich_help_panel=_LIMITS)
    ] = "16KiB",
    max_connections: Annotated[
        int, typer.Option(help="Connections at once.", min=1, rich_help_panel=_LIMITS)
    ] = ServeOptions.max_connections,
    header_timeout: Annotated[float, _seconds("for the headers to come")] = ServeOptions.header_timeout,
    body_timeout: Annotated[float, _seconds("for the body to come")] = ServeOptions.body_timeout,
    send_timeout: Annotated[float, _seconds("a client may stop reading")] = ServeOptions.send_timeout,
    keep_alive_timeout: Annotated[int, _seconds("a connection may idle", least=0)] = ServeOptions.keep_alive_timeout,
    request_timeout: Annotated[float, _seconds("for a whole request")] = ServeOptions.request_timeout,
    drain_timeout: Annotated[
        float, _seconds("for open requests once told to end", least=0)
    ] = ServeOptions.drain_timeout,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines of JSON.", rich_help_panel=_LOGS)] = False,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Log what is asked, too.", rich_help_panel=_LOGS)
    ] = False,
    max_context: ContextOption = None,
    kv_memory: MemoryOption = None,
    kv_dtype: DtypeOption = "bf16",
    kv_evict: EvictOption = "none",
    precision: PrecisionOption = "high",
    draft: DraftOption = "none",
    draft_tokens: DraftTokensOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's clients expect it."""
    from prolepsis.serve.lifecycle import run  # here, since no other command needs what it imports

    say = _say_in_json if log_json else _say
    with _failures_in_json() if log_json else nullcontext():
        check_predictor(store_predictor)
        options = ServeOptions(
            model=model,
            host=host,
            port=port,
            served_model_name=served_model_name,
            stores=tuple(store or ()),
            store_predictor=store_predictor,
            api_keys=_keys(api_key or [], api_key_file, say),
            allowed_hosts=tuple(allowed_host or ()),
            cors_origins=tuple(cors_origin or ()),
            max_queue=max_queue,
            max_sequences=max_sequences,
            max_body=parse_size(max_body, "--max-body"),
            max_header=parse_size(max_header, "--max-header"),
            max_connections=max_connections,
            header_timeout=header_timeout,
            body_timeout=body_timeout,
            send_timeout=send_timeout,
            keep_alive_timeout=keep_alive_timeout,
            request_timeout=request_timeout,
            drain_timeout=drain_timeout,
            log_json=log_json,
            log_prompts=log_prompts,
        )
        load_model = partial(
            load,
            model,
            max_context=max_context,
            kv_memory=kv_memory,
            kv_dtype=kv_dtype,
            kv_evict=kv_evict,
            precision=precision,
            draft=draft,
            draft_tokens=draft_tokens,
            threads=threads,
            max_running=max_running,
            say=say,
        )
        run(options, load_model)


def _say(text: str, level: Level = "info") -> None:
    note(text, None if level == "info" else "yellow")


def _say_in_json(text: str, level: Level = "info") -> None:
    write_line(json_line(level, text))


@contextmanager
def _failures_in_json() -> Iterator[None]:
    try:
        yield
    except FORESEEN as error:
        why, code = failure(error)
        _say_in_json(why, "error")
        raise typer.Exit(code) from None
    except Exception as error:
        advice, why = cache_advice(error), f"{type(error).__name__}: {error}"
        write_line(json_line("error", advice or why, traceback="".join(format_exception(error))))
        raise typer.Exit(2 if advice else 1) from None


def _keys(given: list[str], file: Path | None, say: Callable[[str, Level], None]) -> tuple[str, ...]:
    from prolepsis.serve.auth import is_readable_by_others, read_keys

    keys = read_keys(given, file)
    if file is not None and is_readable_by_others(file):
        say(f"{file} can be read by other users of this machine: chmod 600 {file}", "warning")
    return keys
