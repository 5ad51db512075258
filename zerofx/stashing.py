"""What the forward saves for the backward in another form, smaller in memory than the value itself: which values, and how. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from zerofx import liveness
from zerofx.ahead import launches_ahead
from zerofx.config import Config
from zerofx.errors import MemoryLimitError
from zerofx.groups import Group
from zerofx.origins import module_of
from zerofx.program import Program, Stashed, aliases, output_of, results_of, storage_of
from zerofx.steps import Step, steps_of
from zerofx.work import bytes_of


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the forward that the backward computes again: the module, and the nodes of it that are kept."""

    module: str
    kept: frozenset[str]


def saved(forward: Program, output_count: int, min_bytes: int = 0) -> Iterator[Node]:
    """Yield the values of at least ``min_bytes`` that a forward saves, whose memory ends with them: nothing that lives on shares it.

    Only of those that are floating point, contiguous and of a known size; inputs, parameters and outputs are not activations.
    """
    results = [node for node in results_of(forward.graph) if isinstance(node, Node)]
    inputs = [node for node in forward.graph.nodes if node.op == "placeholder"]
    held = Counter(storage_of(node) for node in dict.fromkeys([*inputs, *results]))
    outputs = {node for node in results_of(forward.graph)[:output_count] if isinstance(node, Node)}
    for node in dict.fromkeys(results):
        is_alone = node not in outputs and held[storage_of(node)] == 1
        if node.op == "call_function" and is_alone and _is_plain(node) and bytes_of(node) >= min_bytes:
            yield node


def _is_plain(node: Node) -> bool:
    value, mark = node.meta.get("val"), node.meta.get("zerofx")
    if not isinstance(value, torch.Tensor) or (mark is not None and mark.kind == "gather"):
        return False
    is_known = all(type(size) is int for size in value.shape)
    return is_known and value.is_floating_point() and value.is_contiguous()


def partitioned(forward: Program, backward: Program, output_count: int, regions: Mapping[int, Region], group: Group) -> tuple[Stashed, ...]:
    """Return the inputs of what is computed again, each to be stored in parts by a group whose ranks all have it.

    One whose elements do not divide among the ranks stays whole.
    """
    values = {node.name: node for node in saved(forward, output_count)}
    found: dict[str, Stashed] = {}
    for name, region in _read_again(backward):
        if name in values and name not in found and name not in regions[region].kept and values[name].meta["val"].numel() % group.size == 0:
            found[name] = Stashed(name, regions[region].module, group)
    return tuple(found[name] for name in values if name in found)


def _read_again(backward: Program) -> Iterable[tuple[str, int]]:
    """Yield what regions that are computed again read of what was saved, with the number of the region."""
    for node, mark in backward.marked("recompute"):
        yield from ((source.name, mark.bucket) for source in node.all_input_nodes if source.op == "placeholder")


@dataclass(frozen=True, slots=True)
class Idle:
    """A saved value, and the steps, of a forward and of its backward in a row, between which nothing reads it: the last read, the next."""

    stashed: Stashed
    size_bytes: int
    read: int
    next_read: int


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes that a forward and its backward hold at each step, and the values that may lie in files meanwhile."""

    alive_bytes: tuple[int, ...]
    idle: tuple[Idle, ...]
    backward: tuple[Node, ...]  # a node of each step

    @staticmethod
    def of(programs: Sequence[Program], names: Sequence[str]) -> Memory:
        """Read it off the lowered forward and backward; ``names`` are of saved values."""
        forward, backward = programs
        standing = liveness.storages(node for node in forward.graph.nodes if node.op == "placeholder")
        before, after = steps_of(forward), steps_of(backward)
        alive = [liveness.alive_bytes(liveness.pieces(*part, standing), len(part[1])) for part in ((forward, before), (backward, after))]
        start, ends, begins = len(alive[0]), _readers(forward, before, names), _readers(backward, after, names)
        values = forward.nodes()
        idle = [
            Idle(Stashed(name, module_of(values[name])), bytes_of(values[name]), max(ends[name]), start + min(begins[name]))
            for name in names
            if ends[name] and begins[name]
        ]
        return Memory(tuple(itertools.chain(*alive)), tuple(idle), tuple(step.nodes[0] for step in after))

    @property
    def peak_bytes(self) -> int:
        """The most bytes at any step."""
        return max(self.alive_bytes)

    def to_offload(self, most_bytes: int, ahead: int) -> tuple[Stashed, ...]:
        """Return which values to put into files, and to read ``ahead`` of use, so that at most so many bytes are in memory.

        At the step that holds most, the value that is idle for longest, and largest, goes first. Where no value helps, less than it takes.
        """
        chosen: list[Idle] = []
        left = sorted(self.idle, key=lambda value: value.size_bytes * (value.next_read - value.read), reverse=True)
        alive = list(self.alive_bytes)
        while max(alive) > most_bytes:
            where = alive.index(max(alive))
            for value in left:
                tried = self._without([*chosen, value], ahead)
                if value.read < where < value.next_read and tried[where] < alive[where]:
                    left.remove(value)
                    chosen.append(value)
                    alive = tried
                    break
            else:
                break
        return tuple(value.stashed for value in self.idle if value in chosen)

    def _without(self, values: Sequence[Idle], ahead: int) -> list[int]:
        """Return the bytes at each step if some values are in files for as long as they are idle, less what is read ahead."""
        ordered = sorted(values, key=lambda value: value.next_read)
        start = len(self.alive_bytes) - len(self.backward) - 1
        launches = launches_ahead(self.backward, [value.next_read - start for value in ordered], ahead, 0)
        change = [0] * len(self.alive_bytes)
        for value, launch in zip(ordered, launches, strict=True):
            change[value.read + 1] -= value.size_bytes
            change[start + launch] += value.size_bytes
        return [alive + less for alive, less in zip(self.alive_bytes, itertools.accumulate(change), strict=True)]


def _readers(program: Program, steps: Sequence[Step], names: Sequence[str]) -> dict[str, list[int]]:
    """Return the steps of a lowered program that read some values, or views of them."""
    step_of = {node: place for place, step in enumerate(steps) for node in step.nodes}
    nodes, output = program.nodes(), output_of(program.graph)
    users = {name: [user for alias in aliases(nodes[name]) for user in alias.users if user is not output] for name in names}
    return {name: [step_of[user] for user in found if user in step_of] for name, found in users.items()}


def within_limit(
    config: Config,
    names: Sequence[str],
    schedule: Callable[[Sequence[Stashed]], list[Program]],
    lower: Callable[[Program], Program],
) -> list[Program]:
    """Schedule a forward and its backward with as many of the named values in files as it takes for all to fit the memory limit.

    Raises MemoryLimitError where all that help are not enough.
    """
    assert config.memory_limit_bytes is not None
    aim_bytes = limit = config.memory_limit_bytes
    scheduled = schedule(())
    first = found = Memory.of([*map(lower, scheduled)], names)
    peaks, tried = [found.peak_bytes], tuple[Stashed, ...]()
    while found.peak_bytes > limit:
        chosen = first.to_offload(aim_bytes, config.prefetch_buckets)
        if chosen == tried:
            raise too_little(limit, min(peaks))
        scheduled = schedule(chosen)
        found = Memory.of([*map(lower, scheduled)], ())
        peaks.append(found.peak_bytes)
        # what is read ahead, and what else moves with it, was not foreseen in full: aim lower
        tried, aim_bytes = chosen, aim_bytes - max(found.peak_bytes - limit, 0)
    return scheduled


def too_little(limit_bytes: int, smallest_bytes: int) -> MemoryLimitError:
    """Build the error for a limit that a step exceeds with all activations in files that help."""
    error = MemoryLimitError(
        f"memory_limit={limit_bytes} bytes cannot be met: the smallest that works is {smallest_bytes} bytes",
        where="the first training step, with offload.activations",
        why="what a step computes with at once, beside the activations that lie on disk meanwhile, takes that much",
        remedy=f"pass memory_limit={smallest_bytes} or more, recompute more, or make the batch smaller",
    )
    error.smallest_bytes = smallest_bytes
    return error
