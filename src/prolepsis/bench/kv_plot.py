"""The report of `kv bench` as a picture: ratio against decoding speed. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any

_COLOURS = {  # told apart by colour-blind readers, and in print by their markers
    "bf16": ("#0072B2", "o"),
    "fp16": ("#D55E00", "s"),
    "fp8_e4m3": ("#009E73", "^"),
    "fp8_e5m2": ("#CC79A7", "v"),
    "int8": ("#000000", "D"),
    "int4": ("#E69F00", "P"),
}
_PLACES = ((6, 0), (-6, 0), (0, 7), (0, -7), (6, 6), (-6, 6), (6, -6), (-6, -6), (8, 12), (-8, 12), (8, -12), (-8, -12))


def draw(report: Mapping[str, Any]) -> Any:
    """A matplotlib figure of the rows with the fewest threads, and of the other coders on the first dtype."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.4), layout="constrained")
    FigureCanvasAgg(figure)  # which can tell how large a label is
    fewest = min((row["threads"] for row in report["rows"]), default=1)
    plural = "" if fewest == 1 else "s"
    axes = figure.add_subplot(
        xscale="log",
        xlabel=f"decoding speed, MB of cache a second, {fewest} thread{plural}",
        ylabel="stored bytes per coded byte",
        title=f"{report['model']}, {report['measured_tokens']} tokens",
    )
    labels = []
    rows = [row for row in report["rows"] if row["threads"] == fewest]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    for dtype in dtypes:
        line = [row for row in rows if row["dtype"] == dtype]
        colour, marker = _COLOURS[dtype]
        speeds, ratios = [row["decode_mb_s"] for row in line], [row["ratio"] for row in line]
        axes.plot(speeds, ratios, color=colour, marker=marker, label=dtype, linewidth=1.5)
        if dtype == dtypes[0]:
            labels += [(row["decode_mb_s"], row["ratio"], row["predictor"], colour) for row in line]
    others = [other for other in report["others"] if other["dtype"] in dtypes[:1]]
    if others:
        points = [(other["decode_mb_s"], other["ratio"]) for other in others]
        axes.scatter(*zip(*points, strict=True), s=14, color="0.55", marker="x", label=f"other coders, {dtypes[0]}")
        labels += [(*point, other["coder"], "0.35") for point, other in zip(points, others, strict=True)]
    axes.grid(alpha=0.25, which="both")
    axes.legend(fontsize=8)
    _label(figure, axes, labels)
    return figure


def _label(figure: Any, axes: Any, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each label beside its point, where it hides no other label."""
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    taken: list[Any] = [axes.get_legend().get_window_extent(renderer)]
    for x, y, text, colour in labels:
        for dx, dy in _PLACES:
            across = "left" if dx > 0 else "right" if dx < 0 else "center"
            up = "center" if dy == 0 else "bottom" if dy > 0 else "top"
            note = axes.annotate(
                text, (x, y), (dx, dy), textcoords="offset points", ha=across, va=up, fontsize=7, color=colour
            )
            box = note.get_window_extent(renderer)
            if axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1) and box.count_overlaps(taken) == 0:
                break
            if (dx, dy) != _PLACES[-1]:
                note.remove()
        taken.append(box)
