"""The report of `kv plan` as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

Report = Mapping[str, Any]
_ANY_WIDTH = 10_000


def show_plan(report: Report) -> None:
    """On standard output."""
    console = Console()
    console.print(_sentence(report), markup=False, highlight=False, soft_wrap=True)
    _print(console, _memory(report))
    _print(console, _coded(report))
    for line in _notes(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if report["restores"]:
        _print(console, _restores(report))


def _print(console: Console, table: Table) -> None:
    """Whole, also where the terminal is narrower, or none: a figure that is cut is none."""
    width = Measurement.get(console, console.options.update(width=_ANY_WIDTH), table).maximum
    Console(width=max(width, console.width)).print(table)


def _sentence(report: Report) -> str:
    left = report["free_bytes"] - report["weights_bytes"]
    return (
        f"{report['model']}: weights of {_size(report['weights_bytes'])}; {_size(report['free_bytes'])} of memory are "
        f"free here, {_size(left) if left > 0 else 'none'} beside the weights.\n"
        f"KV cache: 2 (K, V) x {_counted(report['users'], 'user')} x {_counted(report['context'], 'token')} x "
        f"{_counted(report['layers'], 'layer')} x {_counted(report['kv_heads'], 'KV head')} x "
        f"{report['head_dim']} values x bytes a value."
    )


def _memory(report: Report) -> Table:
    table = _table("In memory", ("dtype",), ("bytes a token", "formula", "in blocks", "fits here"))
    for cache in report["caches"]:
        fits = "yes" if cache["fits"] else _counted(cache["users_that_fit"], "user")
        table.add_row(cache["dtype"], f"{cache['token']:,}", _size(cache["formula"]), _size(cache["pool"]), fits)
    return table


def _coded(report: Report) -> Table:
    predictors = _predictors(report)
    table = _table("Losslessly coded, in a store, or in files (twins)", ("dtype",), predictors)
    for cache in report["caches"]:
        cells = {each["predictor"]: f"{_size(each['bytes'])}  {each['ratio']:.2f}" for each in cache["coded"]}
        for kind, ratio in cache["reference_ratios"].items():
            cells[kind] = f"{_size(cache['stored'] / ratio)}  {ratio:.2f}*"
        table.add_row(cache["dtype"], *(cells.get(predictor, "") for predictor in predictors))
    return table


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=box.MARKDOWN, title=title)
    for column in words:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _predictors(report: Report) -> list[str]:
    """Those of some dtype, measured ones first."""
    measured = [each["predictor"] for cache in report["caches"] for each in cache["coded"]]
    return list(dict.fromkeys(measured + [kind for cache in report["caches"] for kind in cache["reference_ratios"]]))


def _notes(report: Report) -> list[str]:
    lines = []
    if report["measured_tokens"]:
        lines.append(
            f"Beside each size, stored bytes per coded byte, measured here on "
            f"{_counted(report['measured_tokens'], 'token')}."
        )
    if any(cache["reference_ratios"] for cache in report["caches"]):
        lines.append(
            "*: what was measured on smollm2:135m (docs/benchmarks.md), a hint: no profile is kept here for this model "
            "and dtype. `prolepsis calibrate` makes one."
        )
    return lines


def _restores(report: Report) -> Table:
    measured = report["restores"][0]["measured"]
    where = "measured here" if measured else "typical tiers, as the planner guesses them"
    context = _counted(report["context"], "token")
    table = _table(
        f"One context of {context} in {report['store_dtype']}, back from the store; {where}",
        ("tier", "predictor", "planner"),
        ("MB/s", "latency", "restore", "compute"),
    )
    table.caption = (
        f"Computing goes at {report['prefill_tok_s']:,.0f} tokens a second here, measured on "
        f"{report['measured_tokens']:,}; of long contexts it is slower."
    )
    if measured and any(each["kind"] == "disk" or each["tier"].startswith("file:") for each in report["restores"]):
        table.caption += "\nFiles come from the system's file cache here; after a restart the disk is slower."
    for each in report["restores"]:
        table.add_row(
            escape(each["tier"]),
            each["predictor"],
            each["reason"].replace("_", " "),
            "-" if each["bytes_per_s"] is None else f"{each['bytes_per_s'] / 1e6:,.0f}",
            f"{each['latency_s'] * 1000:.3g} ms",
            _seconds(each["restore_s"]),
            _seconds(each["recompute_s"]),
        )
    return table


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _size(count: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count / 1e3:.0f} kB"
