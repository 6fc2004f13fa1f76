"""The report of `kv bench` as a picture: ratio against decoding speed. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any

_STYLES = {  # told apart by colour-blind readers, and in print by their markers
    "bf16": ("#0072B2", "o"),
    "fp16": ("#D55E00", "s"),
    "fp8_e4m3": ("#009E73", "^"),
    "fp8_e5m2": ("#CC79A7", "v"),
    "int8": ("#000000", "D"),
    "int4": ("#E69F00", "P"),
}
_PLACES = (  # of a label, in points from what it names; the last one whatever it hides
    (6, 0), (-6, 0), (0, 7), (0, -7), (6, 6), (-6, 6), (6, -6), (-6, -6), (8, 12), (-8, 12), (8, -12), (-8, -12), (6, 3)
)  # fmt: skip
_CLEAR = 5  # pixels around a point that labels keep clear
_GREY = "0.4"


def draw(report: Mapping[str, Any]) -> Any:
    """A matplotlib figure of the rows with the fewest threads, and of the other coders on the first dtype.

    Twins in open loop, which nobody would save with, are left out.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.4), layout="constrained")
    FigureCanvasAgg(figure)  # which can tell how large a label is
    fewest = min(row["threads"] for row in report["rows"])
    rows = [row for row in report["rows"] if row["threads"] == fewest and not row["predictor"].endswith("-open")]
    first = rows[0]["dtype"]
    others = [other for other in report["others"] if other["dtype"] == first]
    axes = _axes(figure, f"{report['model']}, {report['measured_tokens']} tokens", fewest)
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        line = [row for row in rows if row["dtype"] == dtype]
        colour, marker = _STYLES[dtype]
        axes.plot(*_coordinates(line), color=colour, marker=marker, label=dtype, linewidth=1.5)
    if others:
        axes.scatter(*_coordinates(others), s=14, color=_GREY, marker="x", label=f"other coders, {first}")
    predictors = dict.fromkeys(row["predictor"] for row in rows)
    axes.legend(fontsize=8, title=f"upwards: {', '.join(predictors)}", title_fontsize=8)
    labels = [(row["predictor"], _STYLES[first][0]) for row in rows if row["dtype"] == first]
    labels += [(other["coder"], _GREY) for other in others]
    # The points that have labels come first, as rows of the first dtype do.
    points = [row for row in rows if row["dtype"] == first] + others + [row for row in rows if row["dtype"] != first]
    _write_labels(axes, list(zip(*_coordinates(points), strict=True)), labels)
    return figure


def _axes(figure: Any, title: str, threads: int) -> Any:
    from matplotlib.ticker import LogFormatter

    speed = f"decoding speed, MB of cache a second, {threads} thread{'' if threads == 1 else 's'}"
    axes = figure.add_subplot(xscale="log", xlabel=speed, ylabel="stored bytes per coded byte", title=title)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.tick_params(axis="x", which="both", pad=5, length=3)
    axes.grid(alpha=0.25, which="both")
    return axes


def _coordinates(points: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    return [point["decode_mb_s"] for point in points], [point["ratio"] for point in points]


def _write_labels(axes: Any, points: Sequence[tuple[float, float]], labels: Sequence[tuple[str, str]]) -> None:
    """Write labels (text, colour) beside the first points, where they hide nothing if there is such a place."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()
    middles = axes.transData.transform(points)
    taken = [Bbox([middle - _CLEAR, middle + _CLEAR]) for middle in middles]
    taken.append(axes.get_legend().get_window_extent())
    for point, (text, colour) in zip(points, labels, strict=False):
        for place in _PLACES:
            note = _annotate(axes, text, point, place, colour)
            box = note.get_window_extent()
            inside = axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1)
            if (inside and not box.count_overlaps(taken)) or place == _PLACES[-1]:
                break
            note.remove()
        note.set_path_effects([withStroke(linewidth=2, foreground="white")])
        taken.append(box)


def _annotate(axes: Any, text: str, point: tuple[float, float], place: tuple[int, int], colour: str) -> Any:
    across = "left" if place[0] > 0 else "right" if place[0] < 0 else "center"
    up = "bottom" if place[1] > 0 else "top" if place[1] < 0 else "center"
    return axes.annotate(text, point, place, textcoords="offset points", ha=across, va=up, fontsize=7, color=colour)
