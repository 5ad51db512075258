"""A simulated step as a trace for Perfetto, and as a picture: what computes, what travels, what waits, and the bytes alive. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape

from zerofx.simulate import Event, Kind, Timeline

_ROWS = ("compute", "wait", "gather", "reduce")
_US = 1e6


def row_of(event: Event) -> str:
    """Return the row that an event is drawn in."""
    if event.task.kind is Kind.COMPUTE:
        return "compute"
    if event.task.kind is Kind.WAIT:
        return "wait"
    return "gather" if "gather" in event.task.name or "refresh" in event.task.name else "reduce"


def perfetto(timeline: Timeline, alive_bytes: Sequence[int]) -> str:
    """Return a Chrome trace: a row a kind of event, in microseconds, and a counter of bytes."""
    events = [{"ph": "M", "pid": 0, "tid": place, "name": "thread_name", "args": {"name": row}} for place, row in enumerate(_ROWS)]  # type: list[dict[str, object]]
    for event, alive in zip(timeline.events, alive_bytes, strict=True):
        if event.seconds > 0:
            place = {"ts": event.start_s * _US, "dur": event.seconds * _US, "pid": 0, "tid": _ROWS.index(row_of(event))}
            events.append({"ph": "X", "name": event.task.name, **place})
        if event.task.kind is not Kind.LAUNCH:
            events.append({"ph": "C", "name": "bytes alive", "ts": event.start_s * _US, "pid": 0, "args": {"bytes": alive}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


_WIDTH, _LEFT, _RIGHT = 1200, 80, 30
_ROW, _GAP, _TOP, _MEMORY = 34, 10, 60, 180  # heights in pixels
# Okabe and Ito's palette: told apart also by most who see colours differently.
_COLOURS = {"compute": "#0072b2", "wait": "#d55e00", "gather": "#009e73", "reduce": "#cc79a7"}
_TICKS = 8


def svg(timeline: Timeline, alive_bytes: Sequence[int], title: str) -> str:
    """Return the timeline as an SVG, the bytes alive under it."""
    end_s = max((event.end_s for event in timeline.events), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / end_s
    tops = {row: _TOP + place * (_ROW + _GAP) for place, row in enumerate(_ROWS)}
    parts = [_text(_LEFT, 24, title, 16), _text(_LEFT, 44, _summary(timeline), 12)]
    parts += [_text(_LEFT - 8, top + _ROW / 2 + 4, row, 12, "end") for row, top in tops.items()]
    for event in timeline.events:
        if event.seconds > 0:
            row = row_of(event)
            x, width = _LEFT + event.start_s * scale, max(event.seconds * scale, 0.3)
            box = f'x="{x:.2f}" y="{tops[row]}" width="{width:.2f}" height="{_ROW}" fill="{_COLOURS[row]}"'
            label = f"{event.task.name}: {1e3 * event.start_s:.3f} to {1e3 * event.end_s:.3f} ms"
            parts.append(f'<rect {box} stroke="#ffffff" stroke-width="0.4"><title>{escape(label)}</title></rect>')
    bottom = _TOP + len(_ROWS) * (_ROW + _GAP) + 20 + _MEMORY
    parts += _memory(timeline, alive_bytes, scale, bottom)
    parts += _axis(end_s, scale, bottom)
    height = bottom + 40
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    body = "\n".join(parts)
    return f'{head} font-family="sans-serif">\n<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'


def _summary(timeline: Timeline) -> str:
    shares = {"computing": timeline.compute_s, "waiting": timeline.exposed_s, "driving": timeline.stolen_s}
    parts = [f"{name} {seconds / (timeline.seconds or 1.0):.0%}" for name, seconds in shares.items()]
    return f"{1e3 * timeline.seconds:.4g} ms: {', '.join(parts)}; communication {1e3 * timeline.communication_s:.4g} ms"


def _memory(timeline: Timeline, alive_bytes: Sequence[int], scale: float, bottom: float) -> Iterator[str]:
    """Yield the bytes alive as an area, with its greatest value named."""
    most = max(alive_bytes, default=0) or 1
    points, here = [f"{_LEFT},{bottom}"], bottom
    for event, alive in zip(timeline.events, alive_bytes, strict=True):
        if event.task.kind is not Kind.LAUNCH:
            x, y = _LEFT + event.start_s * scale, bottom - _MEMORY * alive / most
            points += [f"{x:.2f},{here:.1f}", f"{x:.2f},{y:.1f}"]
            here = y
    right = _LEFT + max((event.end_s for event in timeline.events), default=0.0) * scale
    points += [f"{right:.2f},{here:.1f}", f"{right:.2f},{bottom}"]
    yield f'<polygon points="{" ".join(points)}" fill="#e69f00" fill-opacity="0.6"/>'
    yield _text(_LEFT - 8, bottom - _MEMORY + 4, f"{most / 1e9:.3g} GB", 12, "end")
    yield _text(_LEFT - 8, bottom - _MEMORY / 2, "alive", 12, "end")


def _axis(end_s: float, scale: float, bottom: float) -> Iterator[str]:
    yield f'<line x1="{_LEFT}" y1="{bottom}" x2="{_WIDTH - _RIGHT}" y2="{bottom}" stroke="#000000"/>'
    for tick in range(_TICKS + 1):
        seconds = end_s * tick / _TICKS
        yield _text(_LEFT + seconds * scale, bottom + 18, f"{1e3 * seconds:.4g}" + (" ms" if tick == _TICKS else ""), 11, "middle")


def _text(x: float, y: float, text: str, size: int, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
