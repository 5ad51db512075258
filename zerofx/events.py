"""What happens in a step, one event a line, and the folding of layers that do the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

_LONGEST_PERIOD = 8


@dataclass(frozen=True, slots=True)
class Event:
    """One event: what happens, to which bucket or module, the bytes it moves or ends, and what is alive after it."""

    phase: str
    kind: str  # launch, wait, release, keep, compute, recompute, store
    what: str  # gather 3, reduce 0, load 3, part 2, restore 2, or empty
    label: str  # modules
    moved_bytes: int
    in_flight: tuple[str, ...]
    whole_bytes: int
    node: str = ""
    why: str = ""


def fold(events: Sequence[Event]) -> Iterator[tuple[Event | None, int, int]]:
    """Yield events; where a period of them repeats one layer on, yield it once, then (None, repeats, lines of the period).

    Periods are cut at waits and launches of reductions, where layers meet.
    """
    segments = _segments(events)
    place = 0
    while place < len(segments):
        period, repeats = _repeats(segments, place)
        for segment in segments[place : place + period]:
            yield from ((event, 1, 1) for event in segment)
        if repeats:
            yield None, repeats, sum(len(segment) for segment in segments[place : place + period])
        place += period * (repeats + 1)


def _segments(events: Sequence[Event]) -> list[list[Event]]:
    segments: list[list[Event]] = []
    for event in events:
        cut = (event.kind == "wait" and not event.what.startswith("reduce")) or (event.what.startswith("reduce") and event.kind == "launch")
        if not segments or cut or segments[-1][-1].phase != event.phase:
            segments.append([])
        segments[-1].append(event)
    return segments


def _repeats(segments: list[list[Event]], place: int) -> tuple[int, int]:
    """Return (period, repeats after the first) of the longest run that starts at a segment; (1, 0) where none does."""
    best = (1, 0)
    for period in range(1, _LONGEST_PERIOD + 1):
        first = _normal(segments[place : place + period])
        repeats = 0
        while True:
            following = segments[place + period * (repeats + 1) : place + period * (repeats + 2)]
            if len(following) < period or _normal(following) != first:
                break
            repeats += 1
        if repeats and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best


def _normal(segments: list[list[Event]]) -> list[Any]:
    """Rewrite layer and bucket numbers relative to the first of each kind, so that equal layers compare equal."""
    bases: dict[str, int] = {}

    def relative(match: re.Match[str]) -> str:
        kind = match[1]
        return f"{kind}{int(match[2]) - bases.setdefault(kind, int(match[2])):+d}"

    def shift(text: str) -> str:
        return re.sub(r"([A-Za-z_]+[ .])(\d+)", relative, text)

    return [
        replace(
            event,
            what=shift(event.what),
            label=shift(event.label),
            in_flight=tuple(shift(part) for part in event.in_flight),
            node="",
            why=shift(event.why),
        )
        for segment in segments
        for event in segment
    ]
