"""Simulate a step: one line of compute, one first-in first-out queue of communication per group. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from zerofx.errors import VerifyError


class Kind(StrEnum):
    """What a task does to the line of compute: work, start a transfer, or block until one has ended."""

    COMPUTE = "compute"
    LAUNCH = "launch"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Task:
    """One event of a program, in program order.

    ``seconds`` is the work of a computation or the length of the transfer that a launch starts; a wait has none. The
    ``collective`` ties a launch to its wait. ``steals_s`` are the seconds of the processor that the transfer needs: 0 where the
    device's copy engines move the bytes, more where the core that computes also feeds the wire. ``whole_bytes`` and
    ``buffer_bytes`` are what the event adds to (or, below 0, frees from) whole parameters and communication buffers.
    """

    name: str
    kind: Kind
    seconds: float = 0.0
    collective: str = ""
    queue: str = ""
    steals_s: float = 0.0
    whole_bytes: int = 0
    buffer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """One task on the timeline, and the bytes alive right after it.

    A computation runs, and a launch's transfer is on the wire, from ``start_s`` to ``end_s``; a wait blocks between them.
    """

    task: Task
    start_s: float
    end_s: float
    whole_bytes: int
    buffer_bytes: int

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def total_bytes(self) -> int:
        return self.whole_bytes + self.buffer_bytes


@dataclass(frozen=True, slots=True)
class Timeline:
    """All events in program order. ``seconds`` is ``compute_s + stolen_s + exposed_s``.

    ``compute_s`` is work alone, ``stolen_s`` by how much transfers slowed it, ``exposed_s`` what the waits paid;
    ``communication_s`` adds up the transfers of all queues.
    """

    events: tuple[Event, ...]
    seconds: float
    compute_s: float
    stolen_s: float
    communication_s: float
    exposed_s: float
    peak_bytes: int

    def in_flight(self) -> Iterator[tuple[str, ...]]:
        """Yield, for each event, the collectives that are launched and not yet waited for after it, oldest first."""
        flying: dict[str, None] = {}
        for event in self.events:
            if event.task.kind is Kind.LAUNCH:
                flying[event.task.collective] = None
            elif event.task.kind is Kind.WAIT:
                del flying[event.task.collective]
            yield tuple(flying)


def simulate(tasks: Iterable[Task]) -> Timeline:
    """Run tasks in order on an idle machine and return when each starts and ends.

    Launches and waits take no time of their own: a transfer starts when it is launched and its queue is free, and a wait blocks
    the line until its transfer has ended. A transfer spreads the seconds that it steals evenly over its length: computing
    beside it goes slower by that share, beside several by the sum of theirs, down to a standstill; while a wait blocks,
    nothing is lost. Linear in the number of tasks.

    A faster wire is never slower, except that where several queues steal it may hold up a launch for another of them.

    Raises VerifyError where launches and waits do not pair.
    """
    events, queues, ends = list[Event](), dict[str, _Queue](), dict[str, float]()
    now = compute_s = stolen_s = communication_s = exposed_s = 0.0
    whole = buffers = peak = 0
    for task in tasks:
        start, end = now, now
        match task.kind:
            case Kind.COMPUTE:
                now = end = _compute(now, task.seconds, queues.values())
                compute_s += task.seconds
                stolen_s += end - start - task.seconds
            case Kind.LAUNCH:
                if task.collective in ends:
                    raise _unpaired(task, "it is in flight already")
                start, end = queues.setdefault(task.queue, _Queue()).add(now, task)
                ends[task.collective] = end
                communication_s += task.seconds
            case Kind.WAIT:
                if task.collective not in ends:
                    raise _unpaired(task, "it is not in flight")
                now = end = max(now, ends.pop(task.collective))
                exposed_s += end - start
        whole, buffers = whole + task.whole_bytes, buffers + task.buffer_bytes
        peak = max(peak, whole + buffers)
        events.append(Event(task, start, end, whole, buffers))
    for event in events:
        if event.task.kind is Kind.LAUNCH and event.task.collective in ends:
            raise _unpaired(event.task, "nothing waits for it")
    return Timeline(tuple(events), now, compute_s, stolen_s, communication_s, exposed_s, peak)


def _unpaired(task: Task, why: str) -> VerifyError:
    return VerifyError(
        f"cannot simulate the {task.kind} of {task.collective!r}",
        where=task.name,
        why=why,
        remedy="give each collective one launch and, after it, one wait",
    )


class _Queue:
    """Transfers of one group that are on the wire or behind it: start, end, and the share of the processor that each takes."""

    def __init__(self) -> None:
        self.free_s = 0.0
        self.transfers: deque[tuple[float, float, float]] = deque()

    def add(self, now: float, task: Task) -> tuple[float, float]:
        start = max(now, self.free_s)
        self.free_s = start + task.seconds
        if task.steals_s > 0 and self.free_s > start:
            self.transfers.append((start, self.free_s, min(1.0, task.steals_s / task.seconds)))
        return start, self.free_s

    def at(self, now: float) -> tuple[float, float]:
        """Return the share taken at a time, not before the last one asked for, and the time when that changes."""
        while self.transfers and self.transfers[0][1] <= now:
            self.transfers.popleft()
        if not self.transfers:
            return 0.0, math.inf
        start, end, share = self.transfers[0]
        return (share, end) if start <= now else (0.0, start)


def _compute(now: float, work_s: float, queues: Iterable[_Queue]) -> float:
    """Return when work that begins now is done."""
    while True:
        stolen = [queue.at(now) for queue in queues]
        speed = max(0.0, 1.0 - sum(share for share, _ in stolen))
        change = min((time for _, time in stolen), default=math.inf)
        if work_s <= speed * (change - now):
            return now + work_s / speed if work_s > 0 else now
        work_s -= speed * (change - now)
        now = change
