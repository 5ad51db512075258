"""Run given launches along a line: where reductions are then waited for, when it ends, and how early all could launch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from zerofx.placement.problem import Launch, Line


class Why(StrEnum):
    """Why a launch is not earlier, or a wait not later."""

    FIRST = "no earlier work"
    READY = "ready here"
    WINDOW = "window"
    MEMORY = "memory limit"
    ORDER = "canonical order"
    END = "nothing needs its bytes"


@dataclass(frozen=True, slots=True)
class Replay:
    """The slot of each reduction's wait (the last: behind the line) and why it is there, the bytes at each slot, and the end."""

    waits: tuple[int, ...]
    whys: tuple[Why, ...]
    alive_bytes: tuple[int, ...]
    end_ps: int


def replay(line: Line, limit_bytes: int, launches: Sequence[Launch]) -> Replay:
    """Wait for each reduction as late as may be: where the limit needs its bytes, the oldest first, or by its own rule."""
    waits, alive, whole_ends, reduce_ends = list[tuple[int, Why]](), list[int](), list[int](), list[int]()
    now = free = place = 0
    for slot in range(line.slots):
        while (oldest := len(waits)) < len(reduce_ends) and line.wait_by[oldest] <= slot:
            now = max(now, reduce_ends[oldest])
            waits.append((slot, Why.WINDOW))
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


def hoisted(line: Line, limit_bytes: int, launches: Sequence[Launch]) -> list[Launch]:
    """Move each launch to the first slot where it may stand and fits; their order stays.

    In a queue this delays nothing. So an order that was chosen by figures that are somewhat off costs no more than that order does.
    """
    found, floor, alive = list[Launch](), 0, list(replay(line, limit_bytes, launches).alive_bytes)
    for launch in launches:
        slot, size = launch.slot, line.size_bytes(launch)
        first = max(floor, line.window(launch)[0])
        while slot > first and alive[slot - 1] + size <= limit_bytes:
            slot -= 1
            alive[slot] += size
        floor = slot
        found.append(replace(launch, slot=slot))
    return found
