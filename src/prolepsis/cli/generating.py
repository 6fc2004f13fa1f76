"""`generate` and `chat`: text from a model."""

import io
import signal
import sys
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from prolepsis.cli.console import (
    ContextOption,
    DtypeOption,
    JsonOption,
    MemoryOption,
    ModelArgument,
    ModelOption,
    ThreadsOption,
    bar,
    err,
    load,
    note,
    print_json,
    read_text,
    show,
)
from prolepsis.cli.profiles import PredictorOption, ProfileOption, predictor_kind, profile_to_save_with
from prolepsis.coding.any_profile import AnyProfile
from prolepsis.engine.conversation import Conversation
from prolepsis.engine.llm import LLM
from prolepsis.engine.completion import Completion
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.session import load_session, save_session
from prolepsis.errors import InputError
from prolepsis.model.pull import DEFAULT_MODEL
from prolepsis.store import require_writable

Temperature = Annotated[float, typer.Option(help="0 always takes the most probable token.")]
TopK = Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the most probable tokens up to this total probability.")]
MinP = Annotated[float, typer.Option(help="Keep tokens at least this fraction as probable as the best one.")]
Repetition = Annotated[float, typer.Option(help="Above 1 discourages tokens of the prompt and the answer.")]
Presence = Annotated[float, typer.Option(help="Subtracted from the logit of each token already in the answer.")]
Frequency = Annotated[float, typer.Option(help="Subtracted once for each time a token is in the answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")]
StopToken = Annotated[list[int] | None, typer.Option(help="Token id that ends the answer; may be repeated.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Seed = Annotated[int | None, typer.Option(help="Makes a sampled answer repeatable.")]
Logprobs = Annotated[int | None, typer.Option(help="Report this many most probable tokens at each position (--json).")]
Session = Annotated[
    Path | None,
    typer.Option(help="Resume from this file if it is there; save to it, KV cache and all, on exit."),
]


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue. Default: standard input.")] = None,
    model: ModelOption = DEFAULT_MODEL,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file; - is standard input.")] = None,
    chat_: Annotated[
        bool, typer.Option("--chat", help="Put the prompt as a question through the chat template.")
    ] = False,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Repetition = 1.0,
    presence_penalty: Presence = 0.0,
    frequency_penalty: Frequency = 0.0,
    stop: Stop = None,
    stop_token_id: StopToken = None,
    max_tokens: MaxTokens = 256,
    seed: Seed = None,
    logprobs: Logprobs = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the model's end-of-text token.")] = False,
    max_context: ContextOption = None,
    kv_memory: MemoryOption = None,
    kv_dtype: DtypeOption = "bf16",
    threads: ThreadsOption = None,
    json_: JsonOption = False,
) -> None:
    """Continue a prompt, streaming to standard output. Without one, standard input is read."""
    if logprobs is not None and not json_:
        raise InputError("--logprobs is reported with --json only")
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop or (),
        stop_token_ids=stop_token_id or (),
        max_tokens=max_tokens,
        seed=seed,
        logprobs=logprobs,
        ignore_eos=ignore_eos,
    )
    text = _prompt(prompt, prompt_file)
    llm = load(model, max_context=max_context, kv_memory=kv_memory, kv_dtype=kv_dtype, threads=threads)
    tokens = llm.encode_chat([{"role": "user", "content": text}]) if chat_ else llm.encode(text)
    sequence = llm.runner.new_sequence(tokens)
    request = llm.new_request(sequence, params)
    with bar("reading the prompt") as on_progress:
        for delta in llm.run(request, on_progress):
            if not json_:
                show(delta.text)
    if json_:
        print_json({"model": llm.name, **_as_json(request.completion, llm)})
    else:
        print()


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
    if session is not None:
        require_writable(session)
    llm = load(model, max_context=max_context, kv_memory=kv_memory, kv_dtype=kv_dtype, threads=threads)
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


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise InputError("give the prompt as an argument or with --prompt-file, not both")
    if prompt is not None:
        return prompt
    if prompt_file is None and sys.stdin.isatty():
        raise InputError("no prompt; give it as an argument, with --prompt-file, or on standard input")
    if prompt_file is not None:
        return read_text(prompt_file, "--prompt-file")
    # A command that pipes a prompt ends it with a newline that is not part of it.
    return read_text(Path("-"), "standard input").removesuffix("\n")


def _as_json(completion: Completion, llm: LLM) -> dict[str, object]:
    record = asdict(completion)
    record["logprobs"] = [
        {
            "token": token.token,
            "text": llm.tokenizer.decode([token.token], skip_special=False),
            "logprob": token.logprob,
            "top": [{"token": t, "logprob": value} for t, value in token.top_logprobs],
        }
        for token in completion.logprobs
    ]
    return record
