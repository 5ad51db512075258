"""What the scheduler decides on, apart from any graph: compute between slots, and the collectives to launch at them. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from zerofx.errors import VerifyError
from zerofx.simulate import Kind, Task

Collective = Literal["gather", "reduce"]
_PS = 1_000_000_000_000  # whole picoseconds, so that equal layers compare equal


@dataclass(frozen=True, slots=True)
class Gather:
    """A gather that the computing after slot ``use`` reads; its bytes live from its launch until slot ``release``."""

    seconds: float
    size_bytes: int
    use: int
    release: int
    earliest: int = 0
    steals_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction that can launch at slot ``ready``, and must by ``latest`` (None: at once); its bytes live from launch to wait.

    It is waited for behind its launch and by slot ``wait_by`` (None: behind the line).
    """

    seconds: float
    size_bytes: int
    ready: int
    latest: int | None = None
    wait_by: int | None = None
    steals_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Problem:
    """A line of slots, each followed by ``compute_s`` of its own, and the collectives of one group, which share one queue.

    A slot is a place where communication may stand; what happens at one place in a fixed order is slots with no computing between.
    At a slot reductions launched before are waited for and gathers released, then launches follow in an order that is free, then
    the gathers used here are waited for. ``standing_bytes`` are alive at a slot whatever is decided. Gathers launch in the given
    order, and so do reductions; ``limit_bytes`` bounds all that is alive.
    """

    compute_s: tuple[float, ...]
    standing_bytes: tuple[int, ...]
    gathers: tuple[Gather, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        slots = len(self.compute_s)
        if len(self.standing_bytes) != slots:
            raise _impossible("standing_bytes", f"there are {slots} slots and {len(self.standing_bytes)} of them")
        for number, gather in enumerate(self.gathers):
            if not 0 <= gather.earliest <= gather.use < min(slots, gather.release):
                raise _impossible(f"gather {number}", "earliest <= use < release does not hold on this line")
        for number, reduction in enumerate(self.reductions):
            if not 0 <= reduction.ready <= _latest(reduction) < min(slots, _wait_by(reduction, slots)):
                raise _impossible(f"reduction {number}", "ready <= latest < wait_by does not hold on this line")
        for kind, windows in (("gather", self.gather_windows()), ("reduction", self.reduction_windows())):
            for number, (first, last) in enumerate(windows):
                if first > last:
                    raise _impossible(f"{kind} {number}", f"one before it cannot launch until slot {first}, one after it must by {last}")

    def gather_windows(self) -> list[tuple[int, int]]:
        """Return the first and the last slot where each gather can launch, in the given order."""
        return _windows([gather.earliest for gather in self.gathers], [gather.use for gather in self.gathers])

    def reduction_windows(self) -> list[tuple[int, int]]:
        """Return the first and the last slot where each reduction can launch, in the given order."""
        return _windows([reduction.ready for reduction in self.reductions], [_latest(reduction) for reduction in self.reductions])


@dataclass(frozen=True, slots=True)
class Launch:
    """A collective, by kind and by number among its kind, and the slot where it is launched."""

    kind: Collective
    number: int
    slot: int


def _latest(reduction: Reduction) -> int:
    return reduction.ready if reduction.latest is None else reduction.latest


def _wait_by(reduction: Reduction, slots: int) -> int:
    return slots if reduction.wait_by is None else min(slots, reduction.wait_by)


def _windows(first: list[int], last: list[int]) -> list[tuple[int, int]]:
    return list(zip(accumulate(first, max), reversed(list(accumulate(reversed(last), min))), strict=True))


def _impossible(where: str, why: str) -> VerifyError:
    return VerifyError(
        "a problem of placement contradicts itself", where=where, why=why, remedy="this is a fault in who states the problem"
    )


class Line:
    """The numbers of a problem that the solver asks for again and again; none depends on the limit.

    Transfers count for the seconds that computing can hide, ``seconds - steals_s``. What a transfer steals delays the step by just
    that wherever it runs: beside computing it slows it, and beside a wait it is part of what the wait pays. So the step takes the
    seconds that it takes with net transfers that steal nothing, and all that is stolen (tests/test_simulate.py).
    """

    def __init__(self, problem: Problem) -> None:
        gathers, reductions = problem.gathers, problem.reductions
        self.problem = problem
        self.slots = len(problem.compute_s)
        self.compute_ps = [round(seconds * _PS) for seconds in problem.compute_s]
        self.gather_ps = [_net_ps(gather) for gather in gathers]
        self.reduce_ps = [_net_ps(reduction) for reduction in reductions]
        self.gather_windows = problem.gather_windows()
        self.reduce_windows = problem.reduction_windows()
        wait_by = [_wait_by(reduction, self.slots) for reduction in reductions]
        self.wait_by = list(accumulate(reversed(wait_by), min))[::-1]
        self.gathered = [0, *accumulate(gather.size_bytes for gather in gathers)]
        self.reduced = [0, *accumulate(reduction.size_bytes for reduction in reductions)]
        self.used: list[list[int]] = [[] for _ in range(self.slots)]
        released = [0] * self.slots
        for number, gather in enumerate(gathers):
            self.used[gather.use].append(number)
            if gather.release < self.slots:
                released[gather.release] += gather.size_bytes
        lasts = [last for _, last in self.gather_windows]
        self.due = [bisect.bisect_right(lasts, slot) for slot in range(self.slots)]
        self._fixed = [standing - gone for standing, gone in zip(problem.standing_bytes, accumulate(released), strict=True)]

    @property
    def all_bytes(self) -> int:
        """What no placement can exceed."""
        return self.gathered[-1] + self.reduced[-1] + max(self.problem.standing_bytes, default=0)

    def whole_bytes(self, slot: int, gathers: int) -> int:
        """Return what stands and what is whole at a slot, if so many gathers are launched by then, and at least those due."""
        return self._fixed[slot] + self.gathered[gathers]

    def window(self, launch: Launch) -> tuple[int, int]:
        """Return the first and the last slot where it can launch."""
        return (self.gather_windows if launch.kind == "gather" else self.reduce_windows)[launch.number]

    def size_bytes(self, launch: Launch) -> int:
        """Return what it adds to the bytes alive."""
        return (self.problem.gathers if launch.kind == "gather" else self.problem.reductions)[launch.number].size_bytes

    def seconds_ps(self, launch: Launch) -> int:
        """Return the length of a transfer, in picoseconds."""
        return (self.gather_ps if launch.kind == "gather" else self.reduce_ps)[launch.number]


def _net_ps(transfer: Gather | Reduction) -> int:
    return max(0, round((transfer.seconds - transfer.steals_s) * _PS))


def tasks(problem: Problem, launches: Sequence[Launch], waits: Sequence[int]) -> list[Task]:
    """Write a placement as tasks to simulate: launches in order, and the slot of each reduction's wait (the last: behind the line)."""
    line, found, place, waited = Line(problem), list[Task](), 0, 0
    before = 0
    for slot in range(line.slots + 1):
        while waited < len(waits) and waits[waited] == slot:
            size = problem.reductions[waited].size_bytes
            found.append(Task(f"wait of reduce {waited}", Kind.WAIT, collective=f"reduce {waited}", buffer_bytes=-size))
            waited += 1
        if slot == line.slots:
            break
        if change := line.whole_bytes(slot, 0) - before:
            found.append(Task(f"slot {slot}", Kind.COMPUTE, whole_bytes=change))
            before += change
        while place < len(launches) and launches[place].slot == slot:
            found.append(_launch(problem, launches[place]))
            place += 1
        for number in line.used[slot]:
            found.append(Task(f"wait of gather {number}", Kind.WAIT, collective=f"gather {number}"))
        found.append(Task(f"compute {slot}", Kind.COMPUTE, problem.compute_s[slot]))
    return found


def _launch(problem: Problem, launch: Launch) -> Task:
    name = f"{launch.kind} {launch.number}"
    transfer = problem.gathers[launch.number] if launch.kind == "gather" else problem.reductions[launch.number]
    whole, buffers = (transfer.size_bytes, 0) if launch.kind == "gather" else (0, transfer.size_bytes)
    return Task(name, Kind.LAUNCH, transfer.seconds, name, "", min(transfer.seconds, transfer.steals_s), whole, buffers)
