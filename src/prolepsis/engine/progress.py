"""A progress bar for work that takes long."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from prolepsis.engine.runner import Progress


@contextmanager
def bar(what: str, unit: str = "") -> Iterator[Progress]:
    """A progress bar on standard error, if that is a terminal.

    It appears with the first call of the yielded (done, total) and goes when all is done, or the block ends.
    """
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()]
    if unit == "bytes":
        columns.insert(3, DownloadColumn())
    console = Console(stderr=True)
    progress = RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal)
    tasks: list[Any] = []

    def update(done: int, total: int) -> None:
        if not tasks:
            progress.start()
            tasks.append(progress.add_task(what, total=total))
        progress.update(tasks[0], completed=done, total=total)
        if done >= total:
            progress.stop()

    try:
        yield update
    finally:
        progress.stop()
