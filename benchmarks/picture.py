"""Draw as an SVG: step time by link rate, with the compute floor and the wire time; and memory by step time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.contestants import FLOOR
from benchmarks.results import Timings

_WIDTH, _HEIGHT = 1000, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 300, 50, 60  # margins in pixels
_LABEL_HEIGHT = 17
_TICKS = 8  # at most
# Okabe and Ito's palette: told apart also by most who see colours differently. Ours first; others repeat it with another dash.
_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
_DASHES = ("", "7 3", "2 3")


@dataclass(frozen=True, slots=True)
class _Scale:
    """From rates (by their place, slowest first) and seconds to pixels."""

    count: int
    most_s: float

    def x(self, place: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * place / max(1, self.count - 1)

    def y(self, seconds: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * seconds / self.most_s


def svg(found: Timings, source: str) -> str:
    """Return a picture of a run; zerofx stage 3's bytes set the wire time."""
    rates = found.rates[::-1]
    lines = {name: [found.median_s(name, rate) for rate in rates] for name in found.contestants if name != FLOOR}
    scale = _Scale(len(rates), 1.05 * max(max(seconds) for seconds in lines.values()))
    ours = next(iter(lines))
    wire = [found.wire_s(ours, rate) for rate in rates]
    labels = [(seconds[0], name, _style(place)) for place, (name, seconds) in enumerate(lines.items())]
    parts = [_axes(scale, rates, found.dtype, source)]
    if FLOOR in found.contestants:
        floor = [found.median_s(FLOOR, rate) for rate in rates]
        parts.append(_line(scale, floor, _BOUND))
        labels.append((floor[0], "compute floor", _BOUND))
    parts.append(_line(scale, [seconds for seconds in wire if seconds is not None], _WIRE))
    if wire[0] is not None:
        labels.append((wire[0], f"wire time of {ours}", _WIRE))
    parts += [_line(scale, seconds, _style(place)) for place, seconds in reversed(list(enumerate(lines.values())))]
    return _document([*parts, *_legend(scale, labels)])


_BOUND = 'stroke="#000000" stroke-width="1.5" stroke-dasharray="10 4"'
_WIRE = 'stroke="#000000" stroke-width="1.5" stroke-dasharray="2 4"'


def _style(place: int) -> str:
    dash = _DASHES[place // len(_COLOURS) % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{_COLOURS[place % len(_COLOURS)]}" stroke-width="{3 if place == 0 else 1.75}"{dashed}'


def _line(scale: _Scale, seconds: Sequence[float], style: str) -> str:
    points = " ".join(f"{scale.x(place):.1f},{scale.y(value):.1f}" for place, value in enumerate(seconds))
    return f'<polyline points="{points}" fill="none" {style}/>' if points else ""


def _axes(scale: _Scale, rates: Sequence[str], dtype: str, source: str) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [_text(_LEFT, 24, f"Seconds per training step by link rate, {dtype}", size=16), _text(_LEFT, _HEIGHT - 12, source, size=10)]
    for tick in _ticks(scale.most_s):
        y = scale.y(tick)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{tick:g}", anchor="end"))
    parts += [_text(scale.x(place), bottom + 20, rate, anchor="middle") for place, rate in enumerate(rates)]
    return "\n".join(parts)


def _ticks(most: float) -> list[float]:
    """Return the multiples up to a value of the least of 1, 2, 5, 10, ... (or their tenths, and so on) that are few enough."""
    power: float = 10 ** math.floor(math.log10(most / _TICKS))
    step = next(factor * power for factor in (1, 2, 5, 10) if most / (factor * power) <= _TICKS)
    return [number * step for number in range(int(most / step) + 1)]


def _legend(scale: _Scale, labels: Sequence[tuple[float, str, str]]) -> list[str]:
    """Label the lines on the right, in their order at the slowest rate, slowest on top."""
    parts = []
    x = _WIDTH - _RIGHT + 20
    for place, (seconds, name, style) in enumerate(sorted(labels, reverse=True)):
        y = _TOP + 10 + place * _LABEL_HEIGHT
        parts.append(f'<line x1="{x}" y1="{y - 4}" x2="{x + 28}" y2="{y - 4}" {style}/>')
        parts.append(_text(x + 36, y, f"{name} ({seconds:.2f})"))
    return parts


@dataclass(frozen=True, slots=True)
class _Plane:
    """From seconds and bytes to pixels."""

    most_s: float
    most_bytes: float

    def at(self, seconds: float, size_bytes: float) -> tuple[float, float]:
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + width * seconds / self.most_s, _HEIGHT - _BOTTOM - height * size_bytes / self.most_bytes


def curves(series: Mapping[str, Mapping[str, tuple[float, float]]], title: str, source: str) -> str:
    """Return a picture of named points (seconds of a step, bytes at its peak): those of a series are joined, and named in the first."""
    points = [point for named in series.values() for point in named.values()]
    plane = _Plane(*(1.1 * max(column) for column in zip(*points, strict=True)))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [_text(_LEFT, 24, title, size=16), _text(_LEFT, _HEIGHT - 12, source, size=10)]
    for tick in _ticks(plane.most_bytes / 1e6):
        y = plane.at(0, 1e6 * tick)[1]
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{tick:g}", anchor="end"))
    parts += [_text(plane.at(tick, 0)[0], bottom + 20, f"{tick:g} s", anchor="middle") for tick in _ticks(plane.most_s)]
    for place, (name, named) in enumerate(series.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in (plane.at(*point) for point in named.values()))
        parts.append(f'<polyline points="{joined}" fill="none" {_style(place)}/>')
        for label, point in named.items():
            x, y = plane.at(*point)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
            parts += [_text(x + 8, y - 6, label, size=10)] if place == 0 else []
        y = _TOP + 10 + place * _LABEL_HEIGHT
        parts += [f'<circle cx="{right + 34}" cy="{y - 4}" r="5" fill="{colour}"/>', _text(right + 56, y, name)]
    return _document(parts)


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


def _document(parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    body = "\n".join(part for part in parts if part)
    return f'{head} font-family="sans-serif">\n<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
