"""Schedule: launch gathers ahead of use and let reductions run on, within the memory limit."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from zerofx import memory
from zerofx.errors import MemoryLimitError
from zerofx.program import Level, Program, aliases, arguments, output_of


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

    Whole parameters may take what is in use at once and ``prefetch_buckets`` of the largest bucket, reductions in flight
    ``reduces_in_flight`` of theirs, and all that is whole or in flight no more than the memory limit.
    """

    def __init__(self, program: Program) -> None:
        config = program.config
        self.program = program
        events = memory.live(program)
        self.nodes = [event.node for event in events]
        self.place = {node: place for place, node in enumerate(self.nodes)}
        self.end = output_of(program.graph)
        self._whole = [event.whole_bytes for event in events]
        self._buffers = [event.buffer_bytes for event in events]
        self._limit = config.memory_limit_bytes
        self._most_whole = max(self._in_use_bytes(), default=0) + config.prefetch_buckets * self._largest("gather_start")
        self._most_buffers = config.reduces_in_flight * self._largest("reduce_start")

    def _largest(self, kind: str) -> int:
        return max((memory.bucket_bytes(self.program, mark) for _, mark in self.program.marked(kind)), default=0)

    def _in_use_bytes(self) -> list[int]:
        """Return the bytes that are whole at each event, less what the backward got before, or will get after, its use."""
        places, used = self.program.positions(), list(self._whole)
        spots = [places[node] for node in self.nodes]

        def readers(whole: Node) -> list[int]:
            return [places[user] for alias in aliases(whole) for user in alias.users if user is not self.end]

        for node, mark in self.program.marked("gather"):
            if node.op == "placeholder":
                stop = bisect.bisect_left(spots, min(readers(node), default=0))
                _add(used, 0, stop, -memory.bucket_bytes(self.program, mark))
        for wait, mark in self.program.marked("gather_wait"):
            for item in wait.users:
                if self.end in item.users:
                    size = self.program.params[mark.params[arguments(item)[1]]].whole_bytes
                    _add(used, bisect.bisect_right(spots, max(readers(item), default=0)), len(spots), -size)
        return used

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive after any event."""
        return max(map(sum, zip(self._whole, self._buffers, strict=True)), default=0)

    def _fits(self, line: list[int], most: int, start: int, stop: int, size: int) -> bool:
        """Whether bytes can be added to the events in [start, stop)."""
        if any(alive + size > most for alive in line[start:stop]):
            return False
        limit, alive = self._limit, zip(self._whole[start:stop], self._buffers[start:stop], strict=True)
        return limit is None or all(whole + buffers + size <= limit for whole, buffers in alive)

    def place_gathers(self) -> list[Move]:
        """Launch each gather as early as memory allows: at the beginning, or where a wait or a reduction stands anyway."""
        starts = [node for node, _ in self.program.marked("gather_start")]
        if self.program.config.prefetch_buckets == 0 or not starts:
            return []
        first = next(node for node in self.program.graph.nodes if node.op != "placeholder" and node not in starts)
        anchors = [(first, 0), *((node, self.place[node]) for node, _ in self.program.marked("gather_wait", "reduce_start"))]
        moves, floor = list[Move](), 0
        for start in starts:
            size = memory.bucket_bytes(self.program, start.meta["zerofx"])
            reach, target = self.place[start], first if self.place[start] == 0 else None
            for anchor, place in reversed(anchors):
                if place >= self.place[start]:
                    continue
                if place < floor or not self._fits(self._whole, self._most_whole, place, reach, size):
                    break
                reach, target = place, anchor
            floor = reach
            if target is not None:
                _add(self._whole, reach, self.place[start], size)
                moves.append(Move(start.name, target.name))
        return moves

    def place_reduces(self) -> list[Move]:
        """Wait for each reduction as late as memory allows: behind the launch of a later one, or at the end."""
        starts = [node for node, _ in self.program.marked("reduce_start")]
        waits = [node for node, _ in self.program.marked("reduce_wait")]
        # in front of a bucket's own wait is right behind its start
        anchors = [*((wait, self.place[start] + 1) for start, wait in zip(starts, waits, strict=True)), (self.end, len(self.nodes))]
        moves, last = list[Move](), len(starts)
        for number in reversed(range(len(waits))):
            size = memory.bucket_bytes(self.program, waits[number].meta["zerofx"])
            reach, found = self.place[waits[number]], number
            for later in range(number + 1, last + 1):
                _, stop = anchors[later]
                if not self._fits(self._buffers, self._most_buffers, reach, stop, size):
                    break
                reach, found = stop, later
            if found > number:
                _add(self._buffers, self.place[waits[number]], reach, size)
                moves.append(Move(waits[number].name, anchors[found][0].name))
            last = max(found, number)
        return moves[::-1]


def _add(line: list[int], start: int, stop: int, size: int) -> None:
    line[start:stop] = [alive + size for alive in line[start:stop]]
