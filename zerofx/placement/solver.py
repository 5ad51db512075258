"""Solve a problem of placement: search, compare with the plain rules, launch as early as that order allows, say why here. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zerofx.errors import MemoryLimitError
from zerofx.placement.problem import Collective, Launch, Line, Problem, tasks
from zerofx.placement.replay import Replay, Why, hoisted, replay
from zerofx.placement.room import Room, Tightest, pack, tightest
from zerofx.placement.search import Search
from zerofx.simulate import Timeline, simulate


@dataclass(frozen=True, slots=True)
class Choice:
    """A launch of either kind or the wait of a reduction, by number among its kind: its slot, and why it is there.

    ``full_slot`` is the slot where memory would not suffice, if that is why.
    """

    event: Literal["launch", "wait"]
    kind: Collective
    number: int
    slot: int
    why: Why
    full_slot: int | None = None

    @property
    def reason(self) -> str:
        return str(self.why) if self.full_slot is None else f"{self.why} at event {self.full_slot}"


@dataclass(frozen=True, slots=True)
class Placement:
    """The launches in the order of the queue, the waits of the reductions in theirs, the bytes alive at each slot, and what comes of it.

    The last slot that a wait can have stands behind the line. Gathers are waited for where they are used.
    """

    launches: tuple[Choice, ...]
    waits: tuple[Choice, ...]
    alive_bytes: tuple[int, ...]
    timeline: Timeline


def solve(problem: Problem, *, width: int = 8) -> Placement:
    """Order launches so that the step takes least within the limit; each stands as early, each wait as late, as that order allows.

    Depends on the problem alone, so it is the same on all ranks that state the same problem. ``width`` is what the search keeps
    at each slot, for each of four opinions on how far to prefetch; time grows in proportion.

    Raises MemoryLimitError, with the smallest limit that works, where even no prefetch is too much.
    """
    line, limit_bytes, packed = _begin(problem)
    room = Room(line, limit_bytes, packed)
    found = [Search(line, room, width).launches(), *plain(line, room, packed)]
    best = min(found, key=lambda launches: replay(line, limit_bytes, launches).end_ps)
    return _placed(line, limit_bytes, best)


def earliest(problem: Problem) -> Placement:
    """Launch as early, and wait for reductions as late, as order and memory allow, gathers before reductions.

    The rule for who does not know how long anything takes. Raises MemoryLimitError as ``solve`` does.
    """
    line, limit_bytes, packed = _begin(problem)
    return _placed(line, limit_bytes, plain(line, Room(line, limit_bytes, packed), packed)[-1])


def _begin(problem: Problem) -> tuple[Line, int, list[int]]:
    line = Line(problem)
    limit_bytes = line.all_bytes if problem.limit_bytes is None else problem.limit_bytes
    packed = pack(line, limit_bytes)
    if packed is None:
        raise _limit_error(limit_bytes, tightest(line))
    return line, limit_bytes, packed


def _placed(line: Line, limit_bytes: int, launches: Sequence[Launch]) -> Placement:
    launches = hoisted(line, limit_bytes, launches)
    final = replay(line, limit_bytes, launches)
    timeline = simulate(tasks(line.problem, launches, final.waits))
    return Placement(tuple(_launched(line, limit_bytes, launches, final)), tuple(_waited(final)), final.alive_bytes, timeline)


def plain(line: Line, room: Room, packed: Sequence[int]) -> list[list[Launch]]:
    """Return the launches of three plain rules: no prefetch, one gather ahead, and as early as memory allows.

    All three launch reductions as soon as they fit.
    """
    uses = [last for _, last in line.gather_windows]
    return [_from(line, room.most, packed, starts) for starts in (uses, [0, *uses[:-1]], [0] * len(uses))]


def _from(line: Line, most: Sequence[int], packed: Sequence[int], starts: Sequence[int]) -> list[Launch]:
    """Launch each gather at the first slot from its start where it may and fits."""
    found, slot = [Launch("reduce", number, slot) for number, slot in enumerate(packed)], 0
    for number, ((first, last), start) in enumerate(zip(line.gather_windows, starts, strict=False)):
        slot = max(slot, first, min(start, last))
        while most[slot] <= number:
            slot += 1
        found.append(Launch("gather", number, slot))
    return sorted(found, key=lambda launch: (launch.slot, launch.kind, launch.number))


def _launched(line: Line, limit_bytes: int, launches: Sequence[Launch], final: Replay) -> list[Choice]:
    found = list[Choice]()
    for launch in launches:
        kind, number, slot = launch.kind, launch.number, launch.slot
        if slot == line.window(launch)[0]:
            choice = Choice("launch", kind, number, slot, Why.READY if kind == "reduce" else Why.WINDOW if slot else Why.FIRST)
        elif final.alive_bytes[slot - 1] + line.size_bytes(launch) > limit_bytes:
            choice = Choice("launch", kind, number, slot, Why.MEMORY, slot - 1)
        else:
            choice = Choice("launch", kind, number, slot, Why.ORDER)
        found.append(choice)
    return found


def _waited(final: Replay) -> list[Choice]:
    return [
        Choice("wait", "reduce", number, slot, why, slot if why is Why.MEMORY else None)
        for number, (slot, why) in enumerate(zip(final.waits, final.whys, strict=True))
    ]


def _limit_error(limit_bytes: int, least: Tightest) -> MemoryLimitError:
    error = MemoryLimitError(
        f"a limit of {limit_bytes} bytes cannot be met: the smallest that works is {least.limit_bytes} bytes",
        where=f"event {least.slot}",
        why=f"{least.whole_bytes} bytes of whole parameters and {least.buffer_bytes} bytes of reductions are needed at once",
        remedy=f"allow {least.limit_bytes} bytes or more, or shard more",
    )
    error.smallest_bytes = least.limit_bytes
    return error
