"""`bench --draft`: what drafts gain."""

from dataclasses import asdict
from statistics import geometric_mean

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prolepsis.bench.drafting import Drafted, measure_drafting, quoting_questions
from prolepsis.cli.console import bar, note, print_json
from prolepsis.engine.llm import LLM
from prolepsis.errors import ProlepsisError

_SHOWN = 4  # places of a draft whose acceptance is shown; --json has all


def bench_drafting(llm: LLM, new_tokens: int, runs: int, precision: str, json_: bool) -> None:
    """Answer with drafts and without, and print what came of it. Raises ProlepsisError if the answers differ."""
    speculation = llm.engine.speculation
    assert speculation is not None
    questions = quoting_questions()
    with bar("answering") as on_progress:
        steps = len(questions) * (runs + 1)
        done = iter(range(1, steps + 1))
        on_progress(0, steps)
        answers = measure_drafting(llm, questions, new_tokens, runs, lambda: on_progress(next(done), steps))
    if speculation.failure is not None:
        raise speculation.failure
    different = next((each.name for each in answers if not each.same_tokens), None)
    if different is not None:
        raise ProlepsisError(f"the answer to {different} is another one with drafts; this is a bug")
    mean = geometric_mean(each.speedup for each in answers)
    if json_:
        drafter = {"model": llm.name, "precision": precision, "draft": speculation.drafter.name}
        print_json({**drafter, "speedup": round(mean, 3), "questions": [asdict(each) for each in answers]})
        return
    _print_table(llm, speculation.drafter.name, answers)
    note(f"geometric mean of the gains: {mean:.2f} times; all answers are the same with drafts and without")


def _print_table(llm: LLM, drafter: str, answers: list[Drafted]) -> None:
    table = Table(title=f"{escape(llm.name)}: drafts of {escape(drafter)}")
    columns = ("question", "prompt + answer", "plain tok/s", "drafted tok/s", "gain", "tokens a step", "accepted")
    for column in columns:
        table.add_column(column, justify="left" if column == "question" else "right")
    for each in answers:
        accepted = " ".join(f"{share:.2f}" for share in each.acceptance_per_pos[:_SHOWN])
        table.add_row(
            each.name, f"{each.prompt_tokens} + {each.new_tokens}", f"{each.plain_tok_s:.0f}",
            f"{each.drafted_tok_s:.0f}", f"{each.speedup:.2f}", f"{each.tokens_per_step:.2f}", accepted,
        )  # fmt: skip
    table.caption = f"accepted: of the first {_SHOWN} places of a draft; {llm.runner.decoder.threads} threads"
    Console().print(table)
