"""`generate` and `chat`: text from a model."""

import sys
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
    ThreadsOption,
    bar,
    err,
    load,
    print_json,
    read_text,
)
from prolepsis.engine.conversation import Conversation
from prolepsis.engine.llm import LLM
from prolepsis.engine.request import Completion
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.session import load_session, save_session
from prolepsis.errors import InputError
from prolepsis.model.pull import DEFAULT_MODEL

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
Session = Annotated[Path | None, typer.Option(help="Resume from this file if it is there; save to it on exit.")]


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue. Default: standard input.")] = None,
    model: Annotated[str, typer.Option(help="A GGUF file, a registered name, or a repository.")] = DEFAULT_MODEL,
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
    """Continue a prompt, streaming to standard output."""
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
        deltas = llm.run(request, on_progress)
        first = next(deltas)
    if not json_:
        _show(first.text)
    for delta in deltas:
        if not json_:
            _show(delta.text)
    if json_:
        print_json({"model": llm.name, **_as_json(request.completion, llm)})
    else:
        print()


def chat(
    model: ModelArgument = DEFAULT_MODEL,
    session: Session = None,
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
    """Talk with a model. Ends at end of input (Ctrl-D) or /exit; Ctrl-C stops an answer."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
        seed=seed,
    )
    llm = load(model, max_context=max_context, kv_memory=kv_memory, kv_dtype=kv_dtype, threads=threads)
    conversation = _open_conversation(llm, session, system)
    try:
        while (question := _read_question()) is not None:
            _answer(conversation, question, params)
    finally:
        if session is not None and conversation.messages:
            save_session(session, llm, conversation.sequence, conversation.messages)
            err.print(f"saved {len(conversation.sequence.tokens)} tokens to {session}")


def _open_conversation(llm: LLM, session: Path | None, system: str | None) -> Conversation:
    if session is not None and session.exists():
        saved = load_session(session, llm)
        err.print(f"resumed {saved.sequence.num_cached} tokens from {session}")
        return Conversation(llm, saved.messages, saved.sequence)
    return Conversation(llm, [{"role": "system", "content": system}] if system else ())


def _read_question() -> str | None:
    """The next non-empty line, or None at the end."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            err.print()
            return None
        if line.strip() == "/exit":
            return None
        if line.strip():
            return line


def _answer(conversation: Conversation, question: str, params: SamplingParams) -> None:
    try:
        with bar("reading") as on_progress:
            deltas = conversation.ask(question, params, on_progress)
            first = next(deltas)
        _show(first.text)
        try:
            for delta in deltas:
                _show(delta.text)
        finally:
            deltas.close()
    except InputError as error:
        err.print(f"[red]{error}[/red]")
    except KeyboardInterrupt:
        err.print("(stopped)", end="")
    print(flush=True)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise InputError("give the prompt as an argument or with --prompt-file, not both")
    if prompt is not None:
        return prompt
    if prompt_file is None and sys.stdin.isatty():
        raise InputError("no prompt; give it as an argument, with --prompt-file, or on standard input")
    return read_text(prompt_file or Path("-"), "--prompt-file")


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
