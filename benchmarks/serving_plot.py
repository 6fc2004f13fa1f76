"""The figures of `serve.py`, drawn."""

from typing import Any

_PANELS = (("tokens/s", "output tokens/s"), ("TTFT p50 ms", "TTFT p50, ms"), ("ITL p50 ms", "ITL p50, ms"))
_CLOSED = " clients"


def plot(rows: list[dict[str, Any]], chats: list[dict[str, Any]], path: str) -> None:
    """Speeds and times by clients, a line for each server, and the chats as bars."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    grid = figure.subplots(2, 2).ravel()
    for axes, (key, label) in zip(grid, _PANELS, strict=False):
        axes.set(xscale="log", yscale="log", xlabel="clients", ylabel=label)
        _lines(axes, rows, key)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
    grid[0].legend()
    _bars(grid[3], chats)
    figure.savefig(path, metadata={"Date": None})


def _lines(axes: Any, rows: list[dict[str, Any]], key: str) -> None:
    for server in dict.fromkeys(row["server"] for row in rows):
        points = [
            (int(row["load"].removesuffix(_CLOSED)), row[key])
            for row in rows
            if row["server"] == server and row["load"].endswith(_CLOSED) and row[key] is not None
        ]
        if points:
            clients, values = zip(*points, strict=True)
            axes.plot(clients, values, marker="o", label=server)
            axes.set_xticks(clients, map(str, clients))


def _bars(axes: Any, chats: list[dict[str, Any]]) -> None:
    names = [row["chats"] for row in chats]
    bars = axes.barh(range(len(chats)), [row["TTFT p50 ms"] for row in chats])
    axes.bar_label(bars, fmt="%.0f", padding=2)
    axes.set_yticks(range(len(chats)), names)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="chats: TTFT p50 of later turns, ms")
