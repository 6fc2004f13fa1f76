"""`demo`: the whole job on a real model, in a few minutes."""

from collections.abc import Callable
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prolepsis.cli.console import JsonOption, ModelArgument, ThreadsOption, bar, load, note, print_json, show
from prolepsis.demo.run import QUESTION, CodedSession, DemoResult, Listener, run
from prolepsis.errors import ProlepsisError
from prolepsis.model.pull import DEFAULT_MODEL


def demo(model: ModelArgument = DEFAULT_MODEL, threads: ThreadsOption = None, json_: JsonOption = False) -> None:
    """Ask a model about a document; save its KV cache losslessly coded; restore it in a new process and compare.

    save: reading the cache, coding, writing and syncing the file. restore: reading the file, decoding, checking, and
    writing the cache of the new process. Both without loading compiled code. prefill instead: computing the same cache
    from the tokens again. "sample": a slow coder that saw 4 MiB of the data. A profile is calibrated on a little text
    and kept, unless one is there.
    """
    llm = load(model, threads=threads)
    console = Console(quiet=json_)
    console.print("A guide to KV caches of about 1,400 tokens ships with this package.")
    console.print(f"[bold]> {QUESTION}[/bold]")
    with bar("calibrating: reading") as on_read, bar("calibrating: fitting") as on_fit, bar("reading") as on_prefill:
        listener = Listener(
            on_read,
            on_fit,
            on_prefill,
            lambda text: None if json_ else show(text),
            lambda step: None if json_ else note(f"{step} ...", "dim"),
        )
        result = run(llm, threads, listener)
    if json_:
        print_json(asdict(result))
    else:
        console.print(_table(result))
    if not all(session.bit_identical and session.same_continuation for session in result.sessions):
        raise ProlepsisError("the restored session differs from the original; please report this")


def _table(result: DemoResult) -> Table:
    table = Table(
        title=f"{escape(result.model)}: a session of {result.tokens} tokens, saved and restored in a new process",
        caption=_about_calibration(result.sessions[-1]),
    )
    table.add_column("what")
    for session in result.sessions:
        table.add_column(session.predictor, justify="right")
    for name, show_in in _ROWS.items():
        table.add_row(name, *map(show_in, result.sessions))
    table.add_section()
    same = [""] * (len(result.sessions) - 1)
    table.add_row("KV cache, raw", *same, f"{result.raw_bytes / 1e6:.2f} MB")
    for name, ratio in result.others.items():
        table.add_row(f"ratio of {name}", *same, f"{ratio:.3f}")
    table.add_row("prefill instead", *same, f"{result.prefill_s:.3f} s")
    return table


def _about_calibration(session: CodedSession) -> str | None:
    if session.calibration_s is None:
        return None
    return (
        f"The profile of {session.predictor} was calibrated on a little text in {session.calibration_s:.0f} s; "
        "`prolepsis calibrate` on more makes a better one."
    )


def _yes(good: bool) -> str:
    return "yes" if good else "[red]NO[/red]"


_ROWS: dict[str, Callable[[CodedSession], str]] = {
    "coded": lambda session: f"{session.coded_bytes / 1e6:.2f} MB",
    "ratio": lambda session: f"[bold]{session.ratio:.3f}[/bold]",
    "every bit restored": lambda session: _yes(session.bit_identical),
    "same continuation": lambda session: _yes(session.same_continuation),
    "save": lambda session: f"{session.save_s:.3f} s",
    "restore": lambda session: f"{session.restore_s:.3f} s",
}
