"""Answers that quote: decode speed with drafts looked up in the text, beside plain decoding and llama.cpp's own lookup.

python benchmarks/speculative.py [--model MODEL] [--python NAME=INTERPRETER ...] [--new-tokens 200]

The questions are those of `prolepsis bench --draft`. All engines take turns on each; `tokens/s` are medians, from the
first token of an answer to its last, and `gain` is the ratio to our plain decoding in the same run. An engine that is
installed elsewhere is given by --python, once for each name: llama.cpp, llama.cpp-lookup-2, llama.cpp-lookup-10.
"""

import random
import sys
from collections import defaultdict
from contextlib import ExitStack
from statistics import geometric_mean, median
from typing import Any

from measuring import parser, report

from prolepsis import LLM
from prolepsis.bench.drafting import quoting_questions
from prolepsis.bench.engines import Setup, installed
from prolepsis.bench.worker import Worker
from prolepsis.errors import ProlepsisError
from prolepsis.model.pull import DEFAULT_MODEL, resolve

OURS = ("prolepsis", "prolepsis-ngram", "prolepsis-fast", "prolepsis-fast-ngram")
THEIRS = ("llama.cpp", "llama.cpp-lookup-2", "llama.cpp-lookup-10")


def start(arguments: Any, model: str, context: int, stack: ExitStack) -> dict[str, Worker]:
    """The worker of every engine that starts, ours first."""
    pythons = dict.fromkeys(installed(drafts=True), sys.executable) | dict(arguments.python)
    workers = {}
    for name in (*OURS, *THEIRS):
        if name not in pythons:
            continue
        try:
            workers[name] = stack.enter_context(Worker(Setup(name, model, arguments.threads, context), pythons[name]))
        except ProlepsisError as error:
            print(f"left out: {error}", file=sys.stderr)
    return workers


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument("--new-tokens", type=int, default=200)
    arguments.add_argument("--python", action="append", default=[], type=lambda text: tuple(text.split("=", 1)))
    found = arguments.parse_args()
    llm = LLM(found.model)
    prompts = {each.name: llm.encode_chat([{"role": "user", "content": each.text}]) for each in quoting_questions()}
    del llm
    context = max(map(len, prompts.values())) + found.new_tokens + 64
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    tokens: dict[tuple[str, str], list[int]] = {}
    with ExitStack() as stack:
        workers = start(found, str(resolve(found.model)), context, stack)
        for name, prompt in prompts.items():
            for run in range(found.runs + 1):
                for engine in random.Random(run).sample(list(workers), len(workers)):
                    answer = workers[engine].answer(prompt, found.new_tokens)
                    tokens[name, engine] = answer.tokens
                    seconds[name, engine] += [answer.seconds] if run else []
    for name in prompts:
        for drafting, plain in (("prolepsis-ngram", "prolepsis"), ("prolepsis-fast-ngram", "prolepsis-fast")):
            assert tokens[name, drafting] == tokens[name, plain], f"another answer with drafts to {name}"
    rows = []
    speeds: dict[str, list[float]] = defaultdict(list)
    for name, prompt in prompts.items():
        row: dict[str, Any] = {"question": name, "prompt": len(prompt)}
        for engine in workers:
            speed = (found.new_tokens - 1) / median(seconds[name, engine])
            speeds[engine].append(speed)
            row[engine] = speed
        rows.append(row)
    means = {engine: geometric_mean(values) for engine, values in speeds.items()}
    rows.append({"question": "geometric mean", "prompt": None, **means})
    rows.append(
        {
            "question": "gain over plain",
            "prompt": None,
            **{engine: mean / means["prolepsis"] for engine, mean in means.items()},
        }
    )
    report("answers that quote: tokens/s", rows, found)


if __name__ == "__main__":
    main()
