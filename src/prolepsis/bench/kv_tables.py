"""The report of `kv bench` as tables."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Report = Mapping[str, Any]

_WORDS = ("dtype", "predictor", "coder")
_SPEEDS = {
    "encode_mb_s": "encode\nMB/s",
    "decode_mb_s": "decode\nMB/s",
    "encode_tok_s": "encode\ntok/s",
    "decode_tok_s": "decode\ntok/s",
}
_SIZES = {"bits_per_scalar": "bits per\nscalar", "ideal_bits": "ideal\nbits", "ratio": "ratio"}
_ROW = {"dtype": "dtype", "predictor": "predictor", **_SIZES, **_SPEEDS}
_OTHER = {"dtype": "dtype", "coder": "coder", "ratio": "ratio"} | {k: _SPEEDS[k] for k in list(_SPEEDS)[:2]}


def show(report: Report) -> None:
    """Print the report on standard output."""
    console = Console(highlight=False)
    threads = list(dict.fromkeys(row["threads"] for row in report["rows"]))
    if threads:
        title = f"{report['model']}: {report['measured_tokens']} tokens of {report['text']}"
        caption = f"threads: {' / '.join(map(str, threads))}"
        console.print(_table(title, caption, _ROW, report["rows"], lambda row: (row["dtype"], row["predictor"])))
    if report["others"]:
        key = "dtype", "coder"
        table = _table("other coders", "threads: 1", _OTHER, report["others"], lambda row: tuple(row[k] for k in key))
        console.print(table)
    for source in dict.fromkeys(report["calibrated_on"].values()):
        dtypes = [dtype for dtype, where in report["calibrated_on"].items() if where == source]
        console.print(f"linear was calibrated on {source} ({', '.join(dtypes)})", markup=False, soft_wrap=True)


def _table(
    title: str, caption: str, columns: Mapping[str, str], rows: Sequence[Report], key: Callable[[Report], Any]
) -> Table:
    """A line for the rows of each `key`, which differ in their speeds, and a section for each dtype."""
    table = Table(title=escape(title), caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, heading in columns.items():
        table.add_column(heading, justify="left" if name in _WORDS else "right", overflow="fold")
    for _, section in groupby(rows, lambda row: row["dtype"]):
        for _, same in groupby(section, key):
            turns = list(same)
            table.add_row(*(_cell(name, turns) for name in columns))
        table.add_section()
    return table


def _cell(name: str, rows: Sequence[Report]) -> str:
    if name in _SPEEDS:
        return " / ".join(_short(row[name]) for row in rows)
    return str(rows[0][name]) if name in _WORDS else f"{rows[0][name]:.3f}"


def _short(speed: float) -> str:
    return f"{speed:.1f}" if speed < 10 else f"{speed:.0f}" if speed < 9999.5 else f"{speed / 1000:.0f}k"
