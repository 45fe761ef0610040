"""Line plots and bar plots as SVG text, drawn by matplotlib. The same data give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN, HEIGHT_IN = 6.4, 3.6
COLORS = ("#1f6feb", "#d1570a", "#1a7f37", "#8250df", "#59636e", "#bf3989")
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "llamarl",  # ids of elements are random without it
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#d1d9e0",
    "legend.frameon": False,
}

Points = Sequence[tuple[float, float]]


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Points],
    dotted: Sequence[str] = (),
    *,
    log: bool = False,
) -> str:
    """One line for each name. Series named in `dotted` are dashed, with a labeled dot at each point. `log`: both axes are
    logarithmic."""

    def draw(axes: Axes) -> None:
        for number, (name, points) in enumerate(series.items()):
            color, single = COLORS[number % len(COLORS)], name in dotted
            style = "o--" if single else "-"
            axes.plot(*zip(*points, strict=True), style, color=color, label=name)
            for x, y in points if single else ():
                axes.annotate(f"{y:.3g}", (x, y), (0, 6), textcoords="offset points", ha="center", color=color)
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        if log:
            axes.set(xscale="log", yscale="log")
        axes.margins(y=0.12)
        axes.legend()

    return _svg(draw, HEIGHT_IN)


def bars(title: str, value_label: str, values: Mapping[str, float], unit: str = "") -> str:
    """One horizontal bar for each name, with its value behind it."""

    def draw(axes: Axes) -> None:
        drawn = axes.barh(list(values), list(values.values()), height=0.6, color=COLORS[0])
        axes.bar_label(drawn, [f"{value:.3g}{unit}" for value in values.values()], padding=4)
        axes.set(title=title, xlabel=value_label)
        axes.margins(x=0.15)
        axes.grid(axis="y", visible=False)
        axes.invert_yaxis()

    return _svg(draw, max(1.2 + 0.4 * len(values), 2.0))


def _svg(draw: Callable[[Axes], None], height_in: float) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    text = io.StringIO()
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
