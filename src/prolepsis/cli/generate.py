"""`generate`: text that continues a prompt."""

import sys
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import typer

from prolepsis.cli.console import (
    ContextOption,
    DraftOption,
    DraftTokensOption,
    DtypeOption,
    EvictOption,
    JsonOption,
    MemoryOption,
    ModelOption,
    PrecisionOption,
    ThreadsOption,
    bar,
    load,
    note,
    note_evictions,
    note_failed_drafts,
    print_json,
    read_text,
    show,
)
from prolepsis.cli.sampling_options import (
    Frequency,
    Logprobs,
    MaxTokens,
    MinP,
    Presence,
    Repetition,
    Seed,
    Stop,
    StopToken,
    Temperature,
    TopK,
    TopP,
    grammar_option,
)
from prolepsis.engine.beam_search import BeamParams
from prolepsis.engine.completion import Completion
from prolepsis.engine.llm import LLM
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.errors import InputError
from prolepsis.model.pull import DEFAULT_MODEL


class EarlyStopping(Enum):
    """When a beam search ends (`BeamParams.early_stopping`)."""

    true = "true"
    false = "false"
    never = "never"


_EARLY_STOPPING: dict[EarlyStopping, bool | Literal["never"]] = {
    EarlyStopping.true: True,
    EarlyStopping.false: False,
    EarlyStopping.never: "never",
}


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
    json_schema: Annotated[
        Path | None, typer.Option(help="The answer is JSON that follows the schema in this file; - is standard input.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The answer matches this regular expression.")] = None,
    n: Annotated[
        int, typer.Option("--n", help="Completions to return; needs --temperature above 0, or --beam-width.")
    ] = 1,
    best_of: Annotated[
        int | None, typer.Option(help="Make this many and return the n of the highest log-probability a token.")
    ] = None,
    beam_width: Annotated[
        int | None, typer.Option(help="Search for the likeliest text with so many beams, instead of sampling.")
    ] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Of a beam search: above 0 favours long answers. Default: 1.")
    ] = None,
    early_stopping: Annotated[
        EarlyStopping | None, typer.Option(help="When a beam search ends: see docs/engine.md. Default: false.")
    ] = None,
    max_context: ContextOption = None,
    kv_memory: MemoryOption = None,
    kv_dtype: DtypeOption = "bf16",
    kv_evict: EvictOption = "none",
    precision: PrecisionOption = "high",
    draft: DraftOption = "none",
    draft_tokens: DraftTokensOption = "auto",
    threads: ThreadsOption = None,
    json_: JsonOption = False,
) -> None:
    """Continue a prompt, streaming to standard output. Without one, standard input is read."""
    if logprobs is not None and not json_:
        raise InputError("--logprobs is reported with --json only")
    params: SamplingParams | BeamParams
    if beam_width is None:
        if length_penalty is not None or early_stopping is not None:
            raise InputError("--length-penalty and --early-stopping are for a beam search: add --beam-width")
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
            n=n,
            best_of=best_of,
            grammar=grammar_option(json_schema, regex),
        )
        if params.samples > 1 and params.is_greedy:
            raise InputError("--n and --best-of need --temperature above 0: at 0 all completions are the same")
    else:
        _require_search(
            temperature=(temperature, 0.0),
            top_k=(top_k, 0),
            top_p=(top_p, 1.0),
            min_p=(min_p, 0.0),
            repetition_penalty=(repetition_penalty, 1.0),
            presence_penalty=(presence_penalty, 0.0),
            frequency_penalty=(frequency_penalty, 0.0),
            stop=(stop, None),
            seed=(seed, None),
            logprobs=(logprobs, None),
            best_of=(best_of, None),
            json_schema=(json_schema, None),
            regex=(regex, None),
        )
        params = BeamParams(
            beam_width=beam_width,
            length_penalty=1.0 if length_penalty is None else length_penalty,
            early_stopping=_EARLY_STOPPING[early_stopping or EarlyStopping.false],
            n=n,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_id or (),
            ignore_eos=ignore_eos,
        )
    text = _prompt(prompt, prompt_file)
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
    tokens = llm.encode_chat([{"role": "user", "content": text}]) if chat_ else llm.encode(text)
    streams = isinstance(params, SamplingParams) and params.samples == 1
    if isinstance(params, SamplingParams) and streams:
        completions = [_stream(llm, tokens, params, quiet=json_)]
    else:
        completions = llm.generate([tokens], params, progress=True)
    note_failed_drafts(llm)
    note_evictions(llm)
    if draft != "none" and beam_width is not None:
        note("a beam search makes no use of --draft")
    failed = next((each.error for each in completions if each.error is not None), None)
    if failed is not None:
        raise failed
    if json_:
        records = [_as_json(each, llm) for each in completions]
        print_json({"model": llm.name, **(records[0] if len(records) == 1 else {"completions": records})})
    elif len(completions) == 1:
        print("" if streams else completions[0].text)
    else:
        for number, each in enumerate(completions, 1):
            print(f"--- {number} of {len(completions)} ---\n{each.text}")


def _require_search(**values: tuple[object, object]) -> None:
    """Raise InputError for a flag of sampling that was given to a beam search; (value, default) by name."""
    for name, (value, default) in values.items():
        if value != default:
            raise InputError(f"--{name.replace('_', '-')} is for sampling: leave it out, or --beam-width")


def _stream(llm: LLM, tokens: list[int], params: SamplingParams, quiet: bool) -> Completion:
    request = llm.new_request(tokens, params)
    with bar("reading the prompt") as on_progress:
        for delta in llm.run(request, on_progress):
            if not quiet:
                show(delta.text)
    return request.completion


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
    record = {**asdict(completion), "statistics": completion.statistics.summary()}
    del record["error"]
    record["lossy"] = completion.evicted_tokens > 0 or llm.kv_cache.is_lossy
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
