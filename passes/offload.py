"""Offload: load what lies on disk ahead of its use, take it out of memory behind, and put reduced gradients there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from zerofx import memory, ops
from zerofx.params import block_of
from zerofx.program import Level, Mark, Program, aliases, arguments, output_of


@dataclass(frozen=True, slots=True)
class Visit:
    """The stay of some shards in memory: from in front of one node to behind another, announced in front of a third."""

    params: tuple[int, ...]
    bucket: int
    announced: str
    first: str
    last: str


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """When shards are in memory, and which nodes give gradients (node, parameter) that go to disk."""

    visits: tuple[Visit, ...]
    gradients: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Offload:
    """Put nodes for ``Config.offload`` around gathers, or where there is one rank around each block's use, and behind reductions.

    The system is asked to read the shards of a gather when the one before begins, so that one gather's reading is beside another's
    way to its use. Source: ZeRO-Infinity (Rajbhandari et al., 2021), sections 5.1 and 6.2.
    """

    takes: ClassVar[Level] = Level.SCHEDULED
    gives: ClassVar[Level] = Level.SCHEDULED

    def plan(self, program: Program) -> OffloadPlan:
        """Find the stays, in order, and the gradients."""
        stored = memory.stored_shards(program.params, program.config)
        gradients = memory.stored_gradients(program.params, program.config)
        visits: list[Visit] = []
        for params, bucket, first, last in [*_gathered(program, stored), *_in_place(program, stored)]:
            announced = visits[-1].first if visits else first.name
            visits.append(Visit(params, bucket, announced, first.name, last.name))
        results = [
            (item.name, mark.params[arguments(item)[1]])
            for wait, mark in program.marked("reduce_wait")
            for item in wait.users
            if mark.params[arguments(item)[1]] in gradients
        ]
        return OffloadPlan(tuple(visits), tuple(results))

    def apply(self, program: Program, plan: OffloadPlan) -> Program:
        """Insert the nodes."""
        if not plan.visits and not plan.gradients:
            return program
        graph, nodes = program.graph, program.nodes()
        stored = program.add_input("stored", Mark("stored", ()))
        for visit in plan.visits:
            with graph.inserting_before(nodes[visit.first]):
                load = graph.call_function(ops.load, (stored, visit.params))
            with graph.inserting_before(load if visit.announced == visit.first else nodes[visit.announced]):
                read_ahead = graph.call_function(ops.read_ahead, (stored, visit.params))
            with graph.inserting_after(nodes[visit.last]):
                evict = graph.call_function(ops.evict, (stored, visit.params))
            for node, kind in ((read_ahead, "read_ahead"), (load, "load"), (evict, "evict")):
                node.meta["zerofx"] = Mark(kind, visit.params, visit.bucket)
        for name, index in plan.gradients:
            gradient = nodes[name]
            readers = list(gradient.users)
            with graph.inserting_after(gradient):
                kept = graph.call_function(ops.store, (stored, gradient, index))
            for reader in readers:
                reader.replace_input_with(gradient, kept)
            kept.meta = {"val": gradient.meta["val"], "zerofx": Mark("store", (index,))}
        return program


def _gathered(program: Program, stored: frozenset[int]) -> Iterator[tuple[tuple[int, ...], int, Node, Node]]:
    """Yield the stays around gathers."""
    places = program.positions()
    for start, mark in program.marked("gather_start"):
        members = tuple(index for index in mark.params if index in stored)
        if members:
            (wait,) = start.users
            yield members, mark.bucket, start, max([wait, *wait.users], key=places.__getitem__)


def _in_place(program: Program, stored: frozenset[int]) -> Iterator[tuple[tuple[int, ...], int, Node, Node]]:
    """Yield the stays of what a single rank reads as it lies there, block by block in order of first use."""
    places, output = program.positions(), output_of(program.graph)
    readers: dict[str, set[Node]] = {}
    members: dict[str, list[int]] = {}
    for node, mark in program.marked("shard"):
        used = [user for alias in aliases(node) for user in alias.users if user is not output]
        if used and mark.params[0] in stored:
            block = block_of(program.params[mark.params[0]].name)
            readers.setdefault(block, set()).update(used)
            members.setdefault(block, []).append(mark.params[0])
    stays = [(min(nodes, key=places.__getitem__), max(nodes, key=places.__getitem__), block) for block, nodes in readers.items()]
    for number, (first, last, block) in enumerate(sorted(stays, key=lambda stay: places[stay[0]])):
        yield tuple(members[block]), number, first, last
