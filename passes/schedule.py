"""Schedule: launch gathers ahead of use and let reductions run on, within the memory limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zerofx import memory
from zerofx.errors import MemoryLimitError
from zerofx.program import Level, Program, output_of


@dataclass(frozen=True, slots=True)
class Move:
    """A launch or a wait, by node name, and the node that it moves in front of."""

    node: str
    before: str


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """The moves, in the order to make them; the limit that they keep; the peak that they reach."""

    moves: tuple[Move, ...]
    limit_bytes: int | None
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Move launches to earlier, and waits to later, places where communication happens anyway.

    Moving only between such places adds no boundary between compute regions. Order among gathers, and among
    reductions, never changes: it is the same on all ranks.
    """

    takes: ClassVar[Level] = Level.BUCKETED
    gives: ClassVar[Level] = Level.SCHEDULED

    def plan(self, program: Program) -> SchedulePlan:
        """Place each launch as early, then each wait as late, as order, distance and memory allow.

        Raises MemoryLimitError where the program does not fit even without prefetch.
        """
        base, limit = memory.peak_bytes(program), program.config.memory_limit_bytes
        if limit is not None and base > limit:
            raise limit_error(program, limit, base)
        line = _Line(program)
        moves = [*line.place_gathers(), *line.place_reduces()]
        return SchedulePlan(tuple(moves), limit, line.peak_bytes)

    def apply(self, program: Program, plan: SchedulePlan) -> Program:
        """Make the moves."""
        nodes = program.nodes()
        for move in plan.moves:
            node = nodes[move.node]
            items = list(node.users) if node.meta["zerofx"].kind == "reduce_wait" else []
            nodes[move.before].prepend(node)
            for item in items:
                nodes[move.before].prepend(item)
        return program


def limit_error(program: Program, limit_bytes: int, smallest_bytes: int) -> MemoryLimitError:
    """Build the error for a limit that cannot be met; it names the smallest that can and what sets it."""
    where = program.phase.value
    whole_bytes, buffer_bytes = memory.kept_bytes(program.params, program.config.stage), memory.arriving_bytes(program)
    worst = max(memory.live(program), key=lambda event: event.total_bytes, default=None)
    if worst is not None and worst.total_bytes > whole_bytes + buffer_bytes:
        whole_bytes, buffer_bytes = worst.whole_bytes, worst.buffer_bytes
        mark = worst.node.meta["zerofx"]
        where += f", {mark.kind} of {', '.join(program.params[index].name for index in mark.params)}"
    error = MemoryLimitError(
        f"memory_limit={limit_bytes} bytes cannot be met: the smallest that works is {smallest_bytes} bytes",
        where=where,
        why=f"{whole_bytes} bytes of whole parameters and {buffer_bytes} bytes of communication buffers are needed at once",
        remedy=f"pass memory_limit={smallest_bytes} or more, shard more (a higher stage), or split the module that owns it",
    )
    error.smallest_bytes = smallest_bytes
    return error


class _Line:
    """The events of one program in order, with the bytes alive after each; moves stretch lifetimes on it.

    Without a memory limit, whole parameters may take one bucket more than they need without prefetch.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        events = memory.live(program)
        self.nodes = [event.node for event in events]
        self.place = {node: place for place, node in enumerate(self.nodes)}
        self._whole = [event.whole_bytes for event in events]
        self._total = [event.total_bytes for event in events]
        self._limit = program.config.memory_limit_bytes
        largest = max((memory.bucket_bytes(program, mark) for _, mark in program.marked("gather_start")), default=0)
        self._whole_limit = max(self._whole, default=0) + largest

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive after any event."""
        return max(self._total, default=0)

    def _stretch(self, start: int, stop: int, size: int, *, whole: bool) -> bool:
        """Add bytes to the events in [start, stop), where all of them stay within the limit."""
        if self._limit is not None:
            if any(total + size > self._limit for total in self._total[start:stop]):
                return False
        elif whole and any(alive + size > self._whole_limit for alive in self._whole[start:stop]):
            return False
        self._total[start:stop] = [total + size for total in self._total[start:stop]]
        if whole:
            self._whole[start:stop] = [alive + size for alive in self._whole[start:stop]]
        return True

    def place_gathers(self) -> list[Move]:
        """Launch each gather at the beginning, or at the earliest wait or reduction that the distance and the limit allow."""
        starts = [node for node, _ in self.program.marked("gather_start")]
        waits = [node for node, _ in self.program.marked("gather_wait")]
        first = next(node for node in self.program.graph.nodes if node.op != "placeholder" and node not in starts)
        anchors = [(first, 0), *((node, self.place[node]) for node, _ in self.program.marked("gather_wait", "reduce_start"))]
        ahead, moves, floor = self.program.config.prefetch_buckets, [], 0
        for number, start in enumerate(starts):
            size = memory.bucket_bytes(self.program, start.meta["zerofx"])
            earliest = self.place[waits[number - ahead]] if number >= ahead else 0
            for anchor, place in anchors:
                early_enough = place < self.place[start] or anchor is first
                if max(floor, earliest) <= place and early_enough and self._stretch(place, self.place[start], size, whole=True):
                    moves.append(Move(start.name, anchor.name))
                    floor = place
                    break
            else:
                floor = self.place[start]
        return moves

    def place_reduces(self) -> list[Move]:
        """Wait for each reduction after a later one has started, or at the end."""
        starts = [node for node, _ in self.program.marked("reduce_start")]
        waits = [node for node, _ in self.program.marked("reduce_wait")]
        allowed, moves = self.program.config.reduces_in_flight, []
        for number, wait in enumerate(waits):
            size = memory.bucket_bytes(self.program, wait.meta["zerofx"])
            for later in range(min(number + allowed - 1, len(starts)), number, -1):
                stop = self.place[starts[later]] + 1 if later < len(starts) else len(self.nodes)
                if self._stretch(self.place[wait], stop, size, whole=False):
                    # in front of the later bucket's own wait is right behind its start
                    target = waits[later] if later < len(starts) else output_of(self.program.graph)
                    moves.append(Move(wait.name, target.name))
                    break
        return moves
