"""From a request's body to what the engine is asked for."""

from prolepsis.engine.grammar import Grammar
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.errors import InputError
from prolepsis.serve.schemas import ChatBody, GenerationBody


def sampling_params(
    body: GenerationBody,
    *,
    max_tokens: int,
    logprobs: int | None,
    best_of: int | None = None,
    grammar: Grammar | None = None,
    skip_special_tokens: bool = True,
) -> SamplingParams:
    """What both kinds of bodies have in common, and what they say each in its own way.

    Raises InputError that names the field, as the body does.
    """
    if not isinstance(body.stop, str | list):
        raise InputError("stop must be a text or a list of texts", field="stop")
    try:
        return SamplingParams(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=_logit_bias(body.logit_bias),
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            max_tokens=max_tokens,
            seed=body.seed,
            logprobs=logprobs,
            ignore_eos=body.ignore_eos,
            n=body.n,
            best_of=best_of,
            grammar=grammar,
            skip_special_tokens=skip_special_tokens,
        )
    except InputError as error:
        raise _as_in_body(error, body) from None


def _as_in_body(error: InputError, body: GenerationBody) -> InputError:
    """The error with the name that a chat has for the field."""
    newer = isinstance(body, ChatBody) and body.max_completion_tokens is not None
    names = {"logprobs": "top_logprobs"} if isinstance(body, ChatBody) else {}
    names |= {"max_tokens": "max_completion_tokens"} if newer else {}
    field = names.get(error.field or "")
    return error if field is None else InputError(str(error).replace(error.field or "", field, 1), field=field)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    """JSON's keys are texts."""
    wrong = next((key for key in bias if not (key.isascii() and key.isdecimal() and len(key) < 10)), None)
    if wrong is not None:
        raise InputError(f"logit_bias must map token ids to numbers, not {wrong!r:.80}", field="logit_bias")
    return {int(key): value for key, value in bias.items()}
