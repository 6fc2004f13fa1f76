"""The report of `kv bench` as tables."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Report = Mapping[str, Any]

_WORDS = ("dtype", "predictor", "coder", "part")
_SPEEDS = {
    "encode_mb_s": "encode\nMB/s",
    "decode_mb_s": "decode\nMB/s",
    "encode_tok_s": "encode\ntok/s",
    "decode_tok_s": "decode\ntok/s",
}
_SIZES = {"bits_per_scalar": "bits a\nscalar", "ideal_bits": "ideal\nbits", "ratio": "ratio"}
_ROW = {"dtype": "dtype", "predictor": "predictor", **_SIZES, **_SPEEDS}
_OTHER = {"dtype": "dtype", "coder": "coder", "ratio": "ratio"} | {k: _SPEEDS[k] for k in list(_SPEEDS)[:2]}
_REFERENCE = {"dtype": "dtype", "predictor": "predictor", "ideal_bits": "ideal\nbits", "ideal_ratio": "ideal\nratio"}
_PART = {"dtype": "dtype", "predictor": "predictor", "part": "part", "tokens": "tokens"}
_PART |= {"bits_per_scalar": "bits a\nscalar", "ideal_bits": "ideal\nbits"}
_PART |= {"k_coded": "K\nbits", "v_coded": "V\nbits", "k_ideal": "K\nideal", "v_ideal": "V\nideal"}


def show_tables(report: Report, per_layer: bool) -> None:
    """Print the report on standard output."""
    console = Console(highlight=False)
    threads = dict.fromkeys(str(row["threads"]) for row in report["rows"])
    title = f"{report['model']}: {report['measured_tokens']} tokens of {report['text']}"
    if report["generated_tokens"]:
        title += f", {report['generated_tokens']} of them generated after it"
    caption = f"threads: {'/'.join(threads)}; recompute: {report['cores']}"
    console.print(_table(title, caption, _ROW, _with_recompute(report), "predictor"))
    if report["references"]:
        caption = "nothing is coded: ideal rates under the three-part mixture"
        console.print(_table("references", caption, _REFERENCE, report["references"], "predictor"))
    parts = [{**part, **_kinds(part)} for part in report["parts"]]
    if report["generated_tokens"]:
        console.print(_table("prompt and generated tokens", "bits a scalar", _PART, parts, "part"))
    if per_layer:
        for place in dict.fromkeys(map(_place, parts)):
            console.print(_layer_table(", ".join(place), [part for part in parts if _place(part) == place]))
    if report["others"]:
        console.print(_table("other coders", "threads: 1", _OTHER, report["others"], "coder"))
    for line in _sources(report["calibrated_on"]):
        console.print(line, markup=False, soft_wrap=True)


def _with_recompute(report: Report) -> list[Report]:
    """The rows, and behind those of each dtype how fast the engine computes the KV instead of decoding it."""
    out: list[Report] = []
    for dtype, rows in groupby(report["rows"], lambda row: row["dtype"]):
        speed = report["recompute"][dtype]
        again = {"predictor": "recompute", "decode_mb_s": speed["mb_s"], "decode_tok_s": speed["tok_s"]}
        out += [*rows, {**dict.fromkeys(_ROW), "dtype": dtype, **again}]
    return out


def _sources(calibrated_on: Mapping[str, Mapping[str, str]]) -> Iterable[str]:
    """A line for each predictor and what it was calibrated on."""
    for predictor, sources in calibrated_on.items():
        for source in dict.fromkeys(sources.values()):
            dtypes = [dtype for dtype, where in sources.items() if where == source]
            yield f"{predictor} was calibrated on {source} ({', '.join(dtypes)})"


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


def _place(part: Report) -> tuple[str, str]:
    return part["dtype"], part["part"]


def _kinds(part: Report) -> dict[str, float | None]:
    """Bits a scalar of K and of V, over all layers."""
    return {name: _mean([layer[name] for layer in part["layers"]]) for name in part["layers"][0] if name != "layer"}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _layer_table(title: str, parts: Sequence[Report]) -> Table:
    """Bits a scalar of each layer, K/V, for each predictor; ideal ones where nothing is coded."""
    table = Table(title=title, caption="bits a scalar: K/V", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("layer", justify="right")
    for part in parts:
        table.add_column(part["predictor"], justify="right", overflow="fold")
    for n in range(len(parts[0]["layers"])):
        table.add_row(str(n), *(_layer_cell(part["layers"][n]) for part in parts))
    return table


def _layer_cell(layer: Report) -> str:
    sort = "ideal" if layer["k_coded"] is None else "coded"
    return "/".join(f"{layer[f'{kind}_{sort}']:.2f}" for kind in "kv")


def _cell(name: str, rows: Sequence[Report]) -> str:
    value = rows[0][name]
    if value is None:
        return "-"
    if name in _SPEEDS:
        return "/".join(_short(row[name]) for row in rows)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _short(speed: float) -> str:
    return f"{speed:.1f}" if speed < 10 else f"{speed:.0f}" if speed < 9999.5 else f"{speed / 1000:.0f}k"
