"""A bucketed program as a line of slots: where communication may stand, what it takes, and how far it may move. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from zerofx import memory, wire
from zerofx.cost import compute_s
from zerofx.machine import Hardware
from zerofx.placement import Gather, Problem, Reduction
from zerofx.program import Mark, Program, aliases, arguments, output_of
from zerofx.wire import Transfer


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in front of a node, and the event that stands there as traced, if any.

    A wait at an ``is_open`` slot cuts no compute region in two: there is communication on one side of it.
    """

    before: Node
    event: Node | None = None
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of a program, the last one behind all; its gathers and reductions (their starts) in order; how to place them."""

    slots: tuple[Slot, ...]
    gathers: tuple[Node, ...]
    reductions: tuple[Node, ...]
    problem: Problem


def slots_of(program: Program, node_s: Mapping[str, float] | None = None) -> Slots:
    """State where launches and waits of a bucketed program may go: where communication stands anyway, and at both ends.

    Whole parameters may take what is in use at once and ``prefetch_buckets`` of the largest bucket ahead of use, reductions in
    flight ``reduces_in_flight`` of theirs, and all together the memory limit. Times are those of the config's hardware; without it,
    nothing takes any. ``node_s`` are seconds by the name of a node, where they are known already.
    """
    transfers = {
        start: transfer_of(program, mark, program.config.machine) for start, mark in program.marked("gather_start", "reduce_start")
    }
    slots, slot_of, seconds = _walk(program, _clock(program, transfers, node_s))
    whole = _Whole(program, slot_of, len(slots) - 1)
    gathers = []
    for number, (start, first) in enumerate(zip(whole.starts, whole.earliest(), strict=True)):
        transfer, bounds = transfers[start], (whole.uses[number], whole.releases[number], first)
        gathers.append(Gather(transfer.seconds, whole.sizes[number], *bounds, transfer.driving_s))
    starts = tuple(node for node, _ in program.marked("reduce_start"))
    sizes = [memory.bucket_bytes(program, start.meta["zerofx"]) for start in starts]
    ready = [slot_of[start] for start in starts]
    reductions, most = [], program.config.reduces_in_flight * max(sizes, default=0)
    for number, start in enumerate(starts):
        transfer, by = transfers[start], _wait_by(number, sizes, ready, slots, most)
        reductions.append(Reduction(transfer.seconds, sizes[number], ready[number], wait_by=by, steals_s=transfer.driving_s))
    limit = program.config.memory_limit_bytes
    problem = Problem(tuple(seconds), tuple(whole.standing_bytes), tuple(gathers), tuple(reductions), limit)
    return Slots(tuple(slots), tuple(whole.starts), starts, problem)


def transfer_of(program: Program, mark: Mark, hardware: Hardware | None) -> Transfer:
    """Return what the bucket of a gather or a reduction costs; nothing without hardware."""
    if hardware is None:
        return Transfer()
    params = [program.params[index] for index in mark.params]
    if mark.kind.startswith("gather"):
        return wire.gather(params, program.group, hardware)
    return wire.reduction(params, program.group, hardware, program.config.reduce_dtype)


def _clock(program: Program, transfers: Mapping[Node, Transfer], node_s: Mapping[str, float] | None) -> Callable[[Sequence[Node]], float]:
    """Return what tells the seconds of consecutive nodes, the copies around the collectives among them included."""
    hardware = program.config.machine
    if hardware is None:
        return lambda nodes: 0.0

    def seconds(nodes: Sequence[Node]) -> float:
        starts = [
            arguments(node)[0] if _kind(node) == "gather_wait" else node for node in nodes if _kind(node) in ("gather_wait", "reduce_start")
        ]
        # without a compiler each node is a kernel of its own
        parts = [nodes] if program.config.backend == "inductor" else [[node] for node in nodes]
        computing_s = (
            sum(compute_s(part, hardware) for part in parts) if node_s is None else sum(node_s.get(node.name, 0.0) for node in nodes)
        )
        return computing_s + sum(transfers[start].copying_s for start in starts)

    return seconds


def _walk(program: Program, seconds_of: Callable[[Sequence[Node]], float]) -> tuple[list[Slot], dict[Node, int], list[float]]:
    """Return the slots, for each node the last one in front of it (a collective's own), and the seconds behind each but the last."""
    slots, groups, slot_of = list[Slot](), list[list[Node]](), dict[Node, int]()

    def add(slot: Slot) -> None:
        slots.append(slot)
        groups.append([])

    for node in program.graph.nodes:
        kind = _kind(node)
        if node.op == "placeholder" or kind in ("gather_start", "reduce_wait") or _is_reduced(node):
            slot_of[node] = max(0, len(slots) - 1)
            continue
        if node.op == "output" or kind == "gather_wait":
            add(Slot(node, node if kind else None))
        elif not slots:
            add(Slot(node))
        if kind == "reduce_start":
            add(Slot(node, node, is_open=False))
        slot_of[node] = len(slots) - 1
        if kind == "reduce_start":
            add(Slot(_behind(node)))
        groups[-1].append(node)
    return slots, slot_of, [seconds_of(nodes) for nodes in groups[:-1]]


def _is_reduced(node: Node) -> bool:
    """Whether a node is an item of what a reduction gives: it moves with the wait."""
    source = arguments(node)[0] if node.args else None
    return isinstance(source, Node) and _kind(source) == "reduce_wait"


def _kind(node: Node) -> str:
    mark = node.meta.get("zerofx")
    return "" if mark is None else str(mark.kind)


def _behind(start: Node) -> Node:
    """Return the first node behind a reduction's launch that is not its own wait, an item of that, or a launch that may move."""
    node = start.next
    while _is_reduced(node) or _kind(node) in ("gather_start", "reduce_wait"):
        node = node.next
    return node


def _wait_by(number: int, sizes: Sequence[int], ready: Sequence[int], slots: Sequence[Slot], most: int) -> int | None:
    """Return the last open slot in front of the launch with which too much would be in flight; None where none is."""
    in_flight = 0
    if sizes[number] > most:
        return ready[number] + 1
    for later in range(number, len(sizes)):
        in_flight += sizes[later]
        if in_flight > most:
            return next(slot for slot in reversed(range(ready[number] + 1, ready[later])) if slots[slot].is_open)
    return None


class _Whole:
    """Bytes of whole parameters along the slots, and how long each gather's stay."""

    def __init__(self, program: Program, slot_of: dict[Node, int], count: int) -> None:
        self._program, self._slot_of, self._count = program, slot_of, count
        self.starts = [node for node, _ in program.marked("gather_start")]
        self.uses, self.releases, self.sizes = list[int](), list[int](), list[int]()
        gone: dict[int, int] = {}
        for node, mark in program.marked("release"):
            gone |= dict.fromkeys(mark.params, slot_of[node] + 1)
        change, arriving, released = ([0] * (count + 1) for _ in range(3))
        change[0] = memory.kept_bytes(program.params)
        for node, mark in program.marked("gather"):
            if node.op == "placeholder":
                size = memory.bucket_bytes(program, mark)
                change[0] += size
                change[gone.get(mark.params[0], count)] -= size
        for start in self.starts:
            (wait,) = start.users
            params = [program.params[index] for index in start.meta["zerofx"].params]
            ends = [gone.get(param.index, count) for param in params]
            for param, end in zip(params, ends, strict=True):  # one of a bucket may go before the last of it does
                change[end] -= param.whole_bytes
                change[max(ends)] += param.whole_bytes
            arriving[slot_of[wait]] += memory.packed_bytes(params, program.group)
            self.uses.append(slot_of[wait])
            self.releases.append(max(ends))
            self.sizes.append(sum(param.whole_bytes for param in params))
            released[max(ends)] += self.sizes[-1]
        stays = list(itertools.accumulate(change))
        # what no placement changes: beside what is gathered, and the buffers that it arrives in
        self.standing_bytes = [base + extra for base, extra in zip(stays[:count], arriving[:count], strict=True)]
        self._fixed = [base - size for base, size in zip(stays, itertools.accumulate(released), strict=True)][:count]

    def earliest(self) -> Iterator[int]:
        """Yield the first slot for each gather that the window allows: it never closes before that of the gather in front."""
        ahead = self._program.config.prefetch_buckets
        most = max(self._in_use(), default=0) + ahead * max(self.sizes, default=0)
        first = 0
        for use, launched in zip(self.uses, itertools.accumulate(self.sizes), strict=True):
            slot = use
            while ahead and slot > first and self._fixed[slot - 1] + launched <= most:
                slot -= 1
            first = slot
            yield first

    def _in_use(self) -> Iterator[int]:
        """Yield the bytes that are whole at each slot, less what the backward got before, or will get after, its use."""
        end, change = output_of(self._program.graph), [0] * (self._count + 1)
        for use, size in zip(self.uses, self.sizes, strict=True):
            change[use] += size

        def readers(whole: Node) -> list[int]:
            return [self._slot_of[user] for alias in aliases(whole) for user in alias.users if user is not end]

        for node, mark in self._program.marked("gather"):
            if node.op == "placeholder":
                size = memory.bucket_bytes(self._program, mark)
                change[0] -= size
                change[min(readers(node), default=0)] += size
        for wait, mark in self._program.marked("gather_wait"):
            for item in wait.users:
                if end in item.users:
                    last = max(readers(item), default=self._slot_of[wait])
                    change[last + 1] -= self._program.params[mark.params[arguments(item)[1]]].whole_bytes
        return (fixed + size for fixed, size in zip(self._fixed, itertools.accumulate(change[: self._count]), strict=True))
