"""The report of `kv bench` as tables."""

from collections.abc import Mapping, Sequence
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
_SIZES = {"bits_per_scalar": "bits a\nscalar", "ideal_bits": "ideal\nbits", "ratio": "ratio"}
_ROW = {"dtype": "dtype", "predictor": "predictor", **_SIZES, **_SPEEDS}
_OTHER = {"dtype": "dtype", "coder": "coder", "ratio": "ratio"} | {k: _SPEEDS[k] for k in list(_SPEEDS)[:2]}


def show_tables(report: Report) -> None:
    """Print the report on standard output."""
    console = Console(highlight=False)
    threads = dict.fromkeys(str(row["threads"]) for row in report["rows"])
    title = f"{report['model']}: {report['measured_tokens']} tokens of {report['text']}"
    console.print(_table(title, f"threads: {'/'.join(threads)}", _ROW, report["rows"], "predictor"))
    if report["others"]:
        console.print(_table("other coders", "threads: 1", _OTHER, report["others"], "coder"))
    for source in dict.fromkeys(report["calibrated_on"].values()):
        dtypes = [dtype for dtype, where in report["calibrated_on"].items() if where == source]
        console.print(f"linear was calibrated on {source} ({', '.join(dtypes)})", markup=False, soft_wrap=True)


def _table(title: str, caption: str, columns: Mapping[str, str], rows: Sequence[Report], key: str) -> Table:
    """A section for each dtype, in it a line for all rows with the same `key`: these differ in their speeds alone."""
    table = Table(title=escape(title), caption=caption, box=box.SIMPLE_HEAD, padding=0)
    for name, heading in columns.items():
        table.add_column(heading, justify="left" if name in _WORDS else "right", overflow="fold")
    for _, section in groupby(rows, lambda row: row["dtype"]):
        for _, same in groupby(section, lambda row: row[key]):
            turns = list(same)
            table.add_row(*(_cell(name, turns) for name in columns))
        table.add_section()
    return table


def _cell(name: str, rows: Sequence[Report]) -> str:
    if name in _SPEEDS:
        return "/".join(_short(row[name]) for row in rows)
    return str(rows[0][name]) if name in _WORDS else f"{rows[0][name]:.3f}"


def _short(speed: float) -> str:
    return f"{speed:.1f}" if speed < 10 else f"{speed:.0f}" if speed < 9999.5 else f"{speed / 1000:.0f}k"
