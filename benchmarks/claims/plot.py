"""Two kinds of plots as SVG text: lines over a number, and bars by name. They need nothing but a browser."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 48, 48
COLOURS = ("#1f6feb", "#d1570a", "#1a7f37", "#8250df", "#59636e")

Points = Sequence[tuple[float, float]]


def lines(title: str, x_label: str, y_label: str, series: Mapping[str, Points], dotted: Sequence[str] = ()) -> str:
    """One line for each name; those in `dotted` as single points joined by a dashed line."""
    xs, ys = zip(*(point for points in series.values() for point in points), strict=True)
    x, y = _Axis(min(0.0, *xs), max(xs), LEFT, WIDTH - RIGHT), _Axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    parts = [_frame(title, x_label, y_label), *_grid(x, y)]
    for number, (name, points) in enumerate(series.items()):
        color, single = COLOURS[number % len(COLOURS)], name in dotted
        path = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in points)
        dash = ' stroke-dasharray="4 4"' if single else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        if single:
            parts += [_dot(x.at(a), y.at(b), color, f"{b:.3g}") for a, b in points]
        parts.append(_text(LEFT + 12, TOP + 18 + 18 * number, name, color=color, anchor="start"))
    return _document(parts)


def bars(title: str, y_label: str, values: Mapping[str, float], unit: str = "") -> str:
    y = _Axis(0.0, max(values.values()) * 1.1, HEIGHT - BOTTOM, TOP)
    step = (WIDTH - LEFT - RIGHT) / len(values)
    parts = [_frame(title, "", y_label), *_marks(y)]
    for number, (name, value) in enumerate(values.items()):
        left, top = LEFT + (number + 0.2) * step, y.at(value)
        color = COLOURS[number % len(COLOURS)]
        size = f'width="{0.6 * step:.1f}" height="{y.at(0) - top:.1f}"'
        parts.append(f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="{color}"/>')
        parts.append(_text(left + 0.3 * step, top - 6, f"{value:.3g}{unit}"))
        parts.append(_text(left + 0.3 * step, HEIGHT - BOTTOM + 18, name))
    return _document(parts)


class _Axis:
    """From values to places on the page; `ticks` are round numbers."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._step = _round_step((high - low) or 1.0)
        self.low = math.floor(low / self._step) * self._step
        self.high = max(math.ceil(high / self._step) * self._step, self.low + self._step)
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        return self._start + (value - self.low) / (self.high - self.low) * (self._end - self._start)

    @property
    def ticks(self) -> list[float]:
        return [self.low + number * self._step for number in range(round((self.high - self.low) / self._step) + 1)]


def _round_step(length: float) -> float:
    rough = length / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def _grid(x: _Axis, y: _Axis) -> list[str]:
    return [*_marks(y), *(_text(x.at(tick), HEIGHT - BOTTOM + 18, f"{tick:g}") for tick in x.ticks)]


def _marks(y: _Axis) -> list[str]:
    across = [f'<path d="M{LEFT} {y.at(t):.1f}H{WIDTH - RIGHT}" stroke="#d1d9e0" stroke-width="1"/>' for t in y.ticks]
    return across + [_text(LEFT - 8, y.at(tick) + 4, f"{round(tick, 6):g}", anchor="end") for tick in y.ticks]


def _dot(x: float, y: float, color: str, label: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' + _text(x, y - 10, label, color=color)


def _frame(title: str, x_label: str, y_label: str) -> str:
    turned = f'<g transform="translate(16 {HEIGHT / 2}) rotate(-90)">{_text(0, 0, y_label)}</g>'
    return _text(WIDTH / 2, 24, title, size=15) + _text(WIDTH / 2, HEIGHT - 8, x_label) + turned


def _text(x: float, y: float, text: str, *, color: str = "#1f2328", anchor: str = "middle", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
    )


def _document(parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"
