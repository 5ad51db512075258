"""Schedule: launch gathers ahead of use and let reductions run on, within the memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from zerofx import memory, placement
from zerofx.errors import MemoryLimitError
from zerofx.placement import Choice, Placement, Why
from zerofx.program import Level, Program
from zerofx.slots import Slots, slots_of


@dataclass(frozen=True, slots=True)
class Move:
    """A launch or a wait, by node name, the node that it moves in front of (None: it stays), and why it stands there."""

    node: str
    before: str | None
    why: str


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """The moves, in the order to make them, and the limit that they keep."""

    moves: tuple[Move, ...]
    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class Schedule:
    """Move launches to earlier, and waits to later, places where communication happens anyway.

    Moving only between such places adds no boundary between compute regions. Order among gathers, and among reductions, never
    changes. With hardware, launches stand where the step takes least by its figures; without, as early as they may. Either depends
    only on what is the same on all ranks.
    """

    takes: ClassVar[Level] = Level.BUCKETED
    gives: ClassVar[Level] = Level.SCHEDULED

    def plan(self, program: Program) -> SchedulePlan:
        """Place each launch and each wait as order, window and memory allow.

        Raises MemoryLimitError where the program does not fit even without prefetch.
        """
        base, limit = memory.peak_bytes(program), program.config.memory_limit_bytes
        if limit is not None and base > limit:
            raise limit_error(program, limit, base)
        line = slots_of(program)
        placed = placement.earliest(line.problem) if program.config.machine is None else placement.solve(line.problem)
        return SchedulePlan(tuple(_moves(line, placed)), limit)

    def apply(self, program: Program, plan: SchedulePlan) -> Program:
        """Make the moves."""
        nodes = program.nodes()
        for move in plan.moves:
            node = nodes[move.node]
            items = list(node.users) if node.meta["zerofx"].kind == "reduce_wait" else []
            node.meta["zerofx"] = replace(node.meta["zerofx"], why=move.why)
            if move.before is not None:
                for moved in (node, *items):
                    nodes[move.before].prepend(moved)
        return program


def limit_error(program: Program, limit_bytes: int, smallest_bytes: int) -> MemoryLimitError:
    """Build the error for a limit that cannot be met; it names the smallest that can and what sets it."""
    where = program.phase.value
    whole_bytes, buffer_bytes = memory.kept_bytes(program.params), memory.arriving_bytes(program)
    worst = max(memory.live(program), key=lambda event: event.total_bytes, default=None)
    if worst is not None and worst.total_bytes > whole_bytes + buffer_bytes:
        whole_bytes, buffer_bytes = worst.whole_bytes, worst.buffer_bytes
        mark = worst.node.meta["zerofx"]
        where += f", {mark.kind} of {', '.join(program.params[index].name for index in mark.params)}"
    error = MemoryLimitError(
        f"memory_limit={limit_bytes} bytes cannot be met: the smallest that works is {smallest_bytes} bytes",
        where=where,
        why=f"{whole_bytes} bytes of whole parameters and {buffer_bytes} bytes of communication buffers are needed at once",
        remedy=f"pass memory_limit={smallest_bytes} or more, shard more (a higher stage), or split the module that owns it; "
        'recompute frees activations, which count here only with recompute="auto"',
    )
    error.smallest_bytes = smallest_bytes
    return error


def _moves(line: Slots, placed: Placement) -> Iterator[Move]:
    """Yield the moves slot by slot: waits of reductions, then launches in the order of the queue."""
    waits: list[list[Choice]] = [[] for _ in line.slots]
    for choice, place in zip(placed.waits, _open_slots(line, placed), strict=True):
        waits[place].append(choice)
    launches: list[list[Choice]] = [[] for _ in line.slots]
    for choice in placed.launches:
        launches[choice.slot].append(choice)
    for number, slot in enumerate(line.slots):
        before = slot.before
        for choice in waits[number]:
            (wait,) = line.reductions[choice.number].users
            yield Move(wait.name, before.name, _reason(line, choice))
        for choice in launches[number]:
            if choice.kind == "reduce":
                before = line.slots[number + 1].before
                yield Move(line.reductions[choice.number].name, None, _reason(line, choice))
            else:
                yield Move(line.gathers[choice.number].name, before.name, _reason(line, choice))


def _open_slots(line: Slots, placed: Placement) -> list[int]:
    """Return the slots of the waits, those that would cut a region moved: behind the launch if memory allows, else to before it."""
    found, last, alive = list[int](), len(line.slots) - 1, list(placed.alive_bytes)
    limit = line.problem.limit_bytes
    for choice in reversed(placed.waits):
        slot, size = choice.slot, line.problem.reductions[choice.number].size_bytes
        if not line.slots[slot].is_open:
            if slot < last and (limit is None or alive[slot] + size <= limit):
                alive[slot] += size
                slot += 1
            else:
                slot = max(other for other in range(slot) if line.slots[other].is_open)
        last = min(slot, last)
        found.append(last)
    return found[::-1]


def _reason(line: Slots, choice: Choice) -> str:
    if choice.why is not Why.MEMORY or choice.full_slot is None:
        return str(choice.why)
    event = next((slot.event for slot in reversed(line.slots[: choice.full_slot + 1]) if slot.event is not None), None)
    if event is None:
        return str(choice.why)
    return f"{choice.why} at {event.meta['zerofx'].kind.partition('_')[0]} {event.meta['zerofx'].bucket}"
