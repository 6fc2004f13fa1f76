"""`chat`: a conversation that can be saved and resumed."""

import io
import signal
import sys
from contextlib import closing, suppress
from pathlib import Path
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
    bar,
    err,
    load,
    note,
    note_evictions,
    note_failed_drafts,
    show,
)
from prolepsis.cli.profiles import PredictorOption, ProfileOption, predictor_kind, profile_to_save_with
from prolepsis.cli.sampling_options import (
    MaxTokens,
    MinP,
    Repetition,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from prolepsis.coding.any_profile import AnyProfile
from prolepsis.engine.conversation import Conversation
from prolepsis.engine.llm import LLM
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.session import load_session, save_session
from prolepsis.errors import InputError
from prolepsis.model.pull import DEFAULT_MODEL
from prolepsis.store import require_writable

Session = Annotated[
    Path | None,
    typer.Option(help="Resume from this file if it is there; save to it, KV cache and all, on exit."),
]


def chat(
    model: ModelArgument = DEFAULT_MODEL,
    session: Session = None,
    recompute: Annotated[
        bool,
        typer.Option(
            help="Where the session is damaged, compute what is lost again; where its last save was broken off, go "
            "back to the one before. Else it is refused."
        ),
    ] = False,
    predictor: PredictorOption = None,
    profile: ProfileOption = None,
    system: Annotated[str | None, typer.Option(help="Instructions that come before the conversation.")] = None,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    repetition_penalty: Repetition = 1.0,
    max_tokens: MaxTokens = 1024,
    seed: Seed = None,
    max_context: ContextOption = None,
    kv_memory: MemoryOption = None,
    kv_dtype: DtypeOption = "bf16",
    kv_evict: EvictOption = "none",
    precision: PrecisionOption = "high",
    draft: DraftOption = "none",
    draft_tokens: DraftTokensOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Talk with a model. Ctrl-C stops an answer; /exit, the end of input (Ctrl-D) and Ctrl-C between answers end it."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
        seed=seed,
    )
    kind = predictor_kind(predictor)
    if session is not None and kv_evict != "none":
        raise InputError("--session keeps K and V of every token, and --kv-evict drops some: leave out one of them")
    if session is not None:
        require_writable(session)
    llm = load(
        model,
        max_context=max_context,
        kv_memory=kv_memory,
        kv_dtype=kv_dtype,
        kv_evict=kv_evict,
        precision=precision,
        draft=draft,
        draft_tokens=draft_tokens,
        threads=threads,
    )
    coded_with = None if session is None else profile_to_save_with(llm, kind, profile)
    conversation = _open_conversation(llm, session, system, recompute, coded_with)
    turns_before = len(conversation.messages)
    _prepare_to_ask()
    try:
        while (question := _read_question()) is not None:
            _answer(conversation, question, params)
    finally:
        if session is not None and len(conversation.messages) > turns_before:
            save_session(session, llm, conversation.sequence, conversation.messages, profile=coded_with)
            note(f"saved {conversation.sequence.num_cached} tokens to {session}")
        note_failed_drafts(llm)
        note_evictions(llm)


def _open_conversation(
    llm: LLM, session: Path | None, system: str | None, recompute: bool, profile: AnyProfile | None
) -> Conversation:
    beginning = [{"role": "system", "content": system}] if system else []
    if session is None or not session.exists():
        return Conversation(llm, beginning)
    saved = load_session(session, llm, recompute=recompute, profile=profile)
    for lost in (saved.refused, saved.torn):
        if lost is not None:
            note(f"not restored: {lost}", "yellow")
    if not saved.messages:
        raise InputError(f"{session} holds the KV cache of a text, not a chat; continue it with `prolepsis kv load`")
    if system and saved.messages[:1] != beginning:
        note(f"--system is for a new chat: {session} goes on as it began")
    note(f"resumed {saved.sequence.num_cached} tokens from {session}")
    return Conversation(llm, saved.messages, saved.sequence)


def _prepare_to_ask() -> None:
    """Lines can be edited where there is a terminal; bytes that are no text and a lost terminal are survived."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # the tokenizer then says what is wrong with the line
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - `input` uses it once it is loaded
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _end)


def _end(signum: int, _: object) -> None:
    raise SystemExit(128 + signum)


def _read_question() -> str | None:
    """The next non-empty line, or None at the end."""
    while True:
        try:
            line = _read_line()
        except (EOFError, KeyboardInterrupt) as end:
            if sys.stdin.isatty():
                note("")
            if isinstance(end, KeyboardInterrupt):
                raise
            return None
        if line.strip() == "/exit":
            return None
        if line.strip():
            return line


def _read_line() -> str:
    if not sys.stdin.isatty():
        return input()
    if sys.stdout.isatty():
        return input("> ")
    err.print("> ", end="")
    return input()


def _answer(conversation: Conversation, question: str, params: SamplingParams) -> None:
    try:
        with bar("reading") as on_progress, closing(conversation.ask(question, params, on_progress)) as deltas:
            for delta in deltas:
                show(delta.text)
    except InputError as error:
        note(str(error), "red")
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        note(" (stopped)")
    print(flush=True)
