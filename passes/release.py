"""Release: end the life of each whole parameter after its last use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zerofx import ops
from zerofx.program import Level, Mark, Program, last_use


@dataclass(frozen=True, slots=True)
class End:
    """A whole parameter, by the name of its node, and the last node that reads it or a view of it."""

    index: int
    whole: str
    after: str


@dataclass(frozen=True, slots=True)
class Release:
    """Insert a release after the last use of each whole parameter; one kept for the backward is released there."""

    takes: ClassVar[Level] = Level.RECOMPUTED
    gives: ClassVar[Level] = Level.RELEASED

    def plan(self, program: Program) -> tuple[End, ...]:
        """Find the last use of each whole parameter, views included."""
        places = program.positions()
        ends = [(mark.params[0], node, last_use(node, places)) for node, mark in program.marked("gather")]
        return tuple(End(index, node.name, last.name) for index, node, last in ends if last.op != "output")

    def apply(self, program: Program, plan: tuple[End, ...]) -> Program:
        """Insert the releases, in the order of the plan where several follow one node."""
        nodes = program.nodes()
        for end in reversed(plan):
            with program.graph.inserting_after(nodes[end.after]):
                release = program.graph.call_function(ops.release, (nodes[end.whole],))
            release.meta["zerofx"] = Mark("release", (end.index,))
        return program
