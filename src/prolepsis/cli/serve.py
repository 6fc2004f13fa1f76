"""`serve`: the model behind an OpenAI-compatible API."""

from functools import partial
from typing import Annotated

import typer

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
)
from prolepsis.model.pull import DEFAULT_MODEL


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
    store_predictor: Annotated[str, typer.Option(help="What codes stored segments.")] = "auto",
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
    from prolepsis.serve.options import ServeOptions

    options = ServeOptions(
        model=model,
        host=host,
        port=port,
        served_model_name=served_model_name,
        stores=tuple(store or ()),
        store_predictor=store_predictor,
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
    )
    run(options, load_model)
