"""The report of `kv bench` as tables."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_ROW = {
    "dtype": "dtype",
    "predictor": "predictor",
    "threads": "threads",
    "bits_per_scalar": "bits per\nscalar",
    "ideal_bits": "ideal\nbits",
    "ratio": "ratio",
    "encode_mb_s": "encode\nMB/s",
    "decode_mb_s": "decode\nMB/s",
    "encode_tok_s": "encode\ntok/s",
    "decode_tok_s": "decode\ntok/s",
}
_OTHER = {key: _ROW[key] for key in ("dtype", "ratio", "encode_mb_s", "decode_mb_s")}
_OTHER = {"dtype": "dtype", "coder": "coder", **_OTHER}


def show(report: Mapping[str, Any]) -> None:
    """Print the report on standard output."""
    console = Console(highlight=False)
    title = f"{report['model']}: {report['measured_tokens']} tokens of {report['text']}"
    console.print(_table(title, _ROW, report["rows"]))
    if report["others"]:
        console.print(_table("other coders, on one thread", _OTHER, report["others"]))
    for source in dict.fromkeys(report["calibrated_on"].values()):
        dtypes = [dtype for dtype, where in report["calibrated_on"].items() if where == source]
        console.print(f"linear was calibrated on {source} ({', '.join(dtypes)})", markup=False)


def _table(title: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=escape(title))
    for name, heading in columns.items():
        table.add_column(heading, justify="left" if name in ("dtype", "predictor", "coder") else "right", no_wrap=True)
    for _, group in groupby(rows, key=lambda row: row["dtype"]):
        for row in group:
            table.add_row(*(_shown(name, row[name]) for name in columns))
        table.add_section()
    return table


def _shown(name: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if name in ("bits_per_scalar", "ideal_bits", "ratio") else f"{value:,.0f}"
