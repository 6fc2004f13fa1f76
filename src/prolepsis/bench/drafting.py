"""What drafts are worth: the same greedy answers with and without them, in turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import median
from typing import NamedTuple

from prolepsis.engine.completion import Completion
from prolepsis.engine.engine import Engine
from prolepsis.engine.llm import LLM
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.errors import ProlepsisError


class Question(NamedTuple):
    """A prompt that is put through the chat template."""

    name: str
    text: str


@dataclass(frozen=True)
class Drafted:
    """One question's answer, as medians over several runs. Speeds are of decoding alone."""

    name: str
    prompt_tokens: int
    new_tokens: int
    plain_tok_s: float
    drafted_tok_s: float
    speedup: float
    """The median of the runs' own ratios."""
    tokens_per_step: float
    acceptance_per_pos: list[float]
    same_tokens: bool
    """Whether both answers are the same, as they have to be."""


def quoting_questions() -> list[Question]:
    """Questions whose answers repeat much of the text in them: edits, extracts, code."""
    folder = files("prolepsis") / "data" / "quoting"
    texts = sorted((each for each in folder.iterdir() if each.name.endswith(".txt")), key=lambda each: each.name)
    return [Question(each.name.removesuffix(".txt"), each.read_text("utf-8")) for each in texts]


def measure_drafting(
    llm: LLM, questions: Sequence[Question], new_tokens: int, runs: int, on_run: Callable[[], None]
) -> list[Drafted]:
    """Answer each question `runs` times after one that does not count, plainly and with `llm`'s drafter.

    Answers have up to `new_tokens` tokens. `on_run` is called after each run.
    """
    plain = Engine(llm.runner, None, None, 1)
    drafting = Engine(llm.runner, None, None, 1, speculation=llm.engine.speculation)
    params = SamplingParams(temperature=0, max_tokens=new_tokens)
    outcomes = []
    for question in questions:
        prompt = llm.encode_chat([{"role": "user", "content": question.text}])
        pairs = []
        for _ in range(runs + 1):
            pairs.append([_answer(llm, engine, prompt, params) for engine in (plain, drafting)])
            on_run()
        outcomes.append(_summary(question.name, pairs[1:]))
    return outcomes


def _answer(llm: LLM, engine: Engine, prompt: list[int], params: SamplingParams) -> Completion:
    request = llm.new_request(prompt, params)
    engine.add(request)
    while engine.has_work:
        engine.step()
    if request.completion.error is not None:
        raise ProlepsisError(f"a request failed: {request.completion.error}") from request.completion.error
    return request.completion


def _summary(name: str, pairs: Sequence[Sequence[Completion]]) -> Drafted:
    speeds = [[_speed(completion) for completion in pair] for pair in pairs]
    _, drafted = pairs[-1]
    told = drafted.statistics
    return Drafted(
        name=name,
        prompt_tokens=drafted.prompt_tokens,
        new_tokens=len(drafted.token_ids),
        plain_tok_s=round(median(pair[0] for pair in speeds), 1),
        drafted_tok_s=round(median(pair[1] for pair in speeds), 1),
        speedup=round(median(pair[1] / pair[0] for pair in speeds), 3),
        tokens_per_step=round(len(told.token_times) / told.steps, 3),
        acceptance_per_pos=[round(share, 3) for share in told.drafts.acceptance],
        same_tokens=all(ours.token_ids == theirs.token_ids for ours, theirs in pairs),
    )


def _speed(completion: Completion) -> float:
    """Tokens a second, from the first to the last."""
    times = completion.statistics.token_times
    if len(times) < 2:
        raise ProlepsisError("an answer of one token has no speed; ask for more --new-tokens")
    return (len(times) - 1) / (times[-1] - times[0])
