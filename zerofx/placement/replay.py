"""Run given launches along a line: where reductions are then waited for, when it ends, and how late gathers could launch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from zerofx.placement.problem import Collective, Launch, Line


class Why(StrEnum):
    """Why a launch is not earlier, or a wait not later."""

    FIRST = "no earlier work"
    READY = "ready here"
    WINDOW = "window"
    MEMORY = "memory limit"
    ORDER = "canonical order"
    ENOUGH = "early enough"
    ENDED = "has ended"
    END = "nothing needs its bytes"


@dataclass(frozen=True, slots=True)
class Replay:
    """The slot of each reduction's wait (the last: behind the line) and why it is there, the bytes at each slot, and the end."""

    waits: tuple[int, ...]
    whys: tuple[Why, ...]
    alive_bytes: tuple[int, ...]
    end_ps: int


def replay(line: Line, limit_bytes: int, launches: Sequence[Launch], margin: float | None) -> Replay:
    """Wait for each reduction where it has ended, with a margin of its length: there it costs nothing. Without a margin, nothing ends.

    Earlier only where the limit needs its bytes, the oldest first; behind the line where neither comes to pass.
    """
    waits, alive, whole_ends, reduce_ends = list[tuple[int, Why]](), list[int](), list[int](), list[int]()
    now = free = place = 0
    for slot in range(line.slots):
        while (oldest := len(waits)) < len(reduce_ends):
            ended = margin is not None and reduce_ends[oldest] + round(margin * line.reduce_ps[oldest]) <= now
            if not ended and line.wait_by[oldest] > slot:
                break
            now = max(now, reduce_ends[oldest])
            waits.append((slot, Why.ENDED if ended else Why.WINDOW))
        first = place
        while place < len(launches) and launches[place].slot == slot:
            place += 1
        gathers = len(whole_ends) + sum(launch.kind == "gather" for launch in launches[first:place])
        taken = line.whole_bytes(slot, gathers) + line.reduced[place - gathers]
        while (oldest := len(waits)) < len(reduce_ends) and taken - line.reduced[oldest] > limit_bytes:
            now = max(now, reduce_ends[oldest])
            waits.append((slot, Why.MEMORY))
        alive.append(taken - line.reduced[len(waits)])
        for launch in launches[first:place]:
            free = max(now, free) + line.seconds_ps(launch)
            (whole_ends if launch.kind == "gather" else reduce_ends).append(free)
        now = max([now, *(whole_ends[number] for number in line.used[slot])]) + line.compute_ps[slot]
    end = max([now, *reduce_ends[len(waits) :]])
    waits += [(line.slots, Why.END)] * (len(reduce_ends) - len(waits))
    return Replay(tuple(slot for slot, _ in waits), tuple(why for _, why in waits), tuple(alive), end)


def latest(line: Line, launches: Sequence[Launch], waits: Sequence[int]) -> list[int]:
    """Return, for each launch, the last slot from which the line ends no later; their order and the reductions stay.

    Walks back from the end with the latest times at which the line may come to each slot, and each transfer may start.
    """
    due = start = 0  # of the line, and of the transfer behind; the end is at 0
    ends: dict[tuple[Collective, int], int] = {}  # the latest end of each transfer whose wait has been met
    slots, place, waited = [launch.slot for launch in launches], len(launches) - 1, len(waits) - 1
    for slot in reversed(range(line.slots + 1)):
        if slot < line.slots:
            due -= line.compute_ps[slot]
            ends |= {("gather", number): due for number in line.used[slot]}
        while place >= 0 and slot >= slots[place] and (end := ends.get((launches[place].kind, launches[place].number))) is not None:
            begun = min(end, start) - line.seconds_ps(launches[place])
            if slot > slots[place] and (launches[place].kind == "reduce" or begun < due):
                break
            slots[place], start, due, place = slot, begun, min(due, begun), place - 1
        while waited >= 0 and waits[waited] == slot:
            ends["reduce", waited] = due
            waited -= 1
    return slots
