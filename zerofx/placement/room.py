"""Where reductions fit beside the gathers that are due, the smallest limit that works, and whether a choice leaves a way on. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from zerofx.placement.problem import Line


def pack(line: Line, limit_bytes: int) -> list[int] | None:
    """Return the earliest slots of the reductions, each waited for at the slot after, without prefetch; None where nothing fits.

    Each takes the first slot with room, in order: any other way to pack is behind this one at every reduction.
    """
    room = [limit_bytes - line.whole_bytes(slot, line.due[slot]) for slot in range(line.slots)]
    if min(room, default=0) < 0:
        return None
    found, slot = list[int](), 0
    for (ready, latest), reduction in zip(line.reduce_windows, line.problem.reductions, strict=True):
        slot = max(slot, ready)
        while slot <= latest and room[slot] < reduction.size_bytes:
            slot += 1
        if slot > latest:
            return None
        room[slot] -= reduction.size_bytes
        found.append(slot)
    return found


@dataclass(frozen=True, slots=True)
class Tightest:
    """The least limit that some placement keeps, a slot that needs it, and what is alive there."""

    limit_bytes: int
    slot: int
    whole_bytes: int
    buffer_bytes: int


def tightest(line: Line) -> Tightest:
    """Find the least limit by bisection; ``whole_bytes`` include what stands at the slot."""
    limit_bytes = bisect.bisect_left(range(line.all_bytes), True, key=lambda limit: pack(line, limit) is not None)
    buffers = [0] * line.slots
    for slot, reduction in zip(pack(line, limit_bytes) or (), line.problem.reductions, strict=True):
        buffers[slot] += reduction.size_bytes
    whole = [line.whole_bytes(slot, line.due[slot]) for slot in range(line.slots)]
    slot = max(range(line.slots), key=lambda slot: whole[slot] + buffers[slot])
    return Tightest(limit_bytes, slot, whole[slot], buffers[slot])


class Room:
    """Tells which launches leave a way to finish within the limit. ``packed`` is what ``pack`` returned for it."""

    def __init__(self, line: Line, limit_bytes: int, packed: Sequence[int]) -> None:
        self._line, self._limit_bytes = line, limit_bytes
        self._due = [bisect.bisect_left(packed, slot) for slot in range(line.slots + 1)]
        self._rigid = all(slot == latest for slot, (_, latest) in zip(packed, line.reduce_windows, strict=True))
        self._known: dict[tuple[int, int, int], bool] = {}
        self.most = self.ahead(0.0)

    def ahead(self, share: float) -> list[int]:
        """Return how many gathers may be launched by each slot, so that all that comes later fits with each reduction at its earliest.

        From the first reduction on, prefetch leaves a share of the room to reductions in flight.
        """
        line, most = self._line, [len(self._line.gather_ps)] * (self._line.slots + 1)
        first = min((ready for ready, _ in line.reduce_windows), default=line.slots)
        for slot in reversed(range(line.slots)):
            room = self._limit_bytes - line.reduced[self._due[slot + 1]] + line.reduced[self._due[slot]]
            if slot >= first:
                room -= int(share * (room - line.whole_bytes(slot, line.due[slot])))
            most[slot] = min(most[slot + 1], bisect.bisect_right(line.gathered, room - line.whole_bytes(slot, 0)) - 1)
        return most

    def left_bytes(self, slot: int, gathers: int) -> int:
        """Return what the limit leaves to reductions at a slot."""
        return self._limit_bytes - self._line.whole_bytes(slot, gathers)

    def finishes(self, slot: int, gathers: int, reductions: int) -> bool:
        """Whether the rest fits from a slot on, after so many launches, if it prefetches no more and waits at once."""
        if self._packs(slot, gathers, reductions):
            return True
        if self._rigid:
            return False
        key = slot, gathers, reductions
        if key not in self._known:
            self._known[key] = self._walk(*key)
        return self._known[key]

    def _packs(self, slot: int, gathers: int, reductions: int) -> bool:
        return gathers <= self.most[slot] and reductions >= self._due[slot]

    def _walk(self, slot: int, gathers: int, reductions: int) -> bool:
        line, windows = self._line, self._line.reduce_windows
        while not self._packs(slot, gathers, reductions):
            if slot == line.slots:
                return False
            room = self.left_bytes(slot, max(gathers, line.due[slot]))
            if room < 0:
                return False
            while reductions < len(windows) and windows[reductions][0] <= slot <= windows[reductions][1]:
                room -= line.problem.reductions[reductions].size_bytes
                if room < 0:
                    break
                reductions += 1
            if reductions < len(windows) and windows[reductions][1] <= slot:
                return False
            slot += 1
        return True
