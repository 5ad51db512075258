"""Refresh: wait for updated parameters that stay whole where they are first used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zerofx import ops
from zerofx.program import Level, Mark, Phase, Program


@dataclass(frozen=True, slots=True)
class Arrival:
    """One bucket of whole copies, and the node before which it must have arrived."""

    bucket: int
    params: tuple[int, ...]
    before: str


@dataclass(frozen=True, slots=True)
class Refresh:
    """Put a wait before the first use of each bucket of persistent whole copies.

    The runtime launches the gathers, in this order, when a forward starts and an optimizer step made the copies stale.
    """

    takes: ClassVar[Level] = Level.UNSHARDED
    gives: ClassVar[Level] = Level.REDUCED

    def plan(self, program: Program) -> tuple[Arrival, ...]:
        """Find each bucket's first use in a forward."""
        if program.phase is not Phase.FORWARD:
            return ()
        bucket_of = {index: bucket for bucket, members in enumerate(program.refresh_buckets) for index in members}
        places = program.positions()
        first: dict[int, int] = {}
        names = {place: node.name for node, place in places.items()}
        for node, mark in program.marked("whole"):
            if node.users and (bucket := bucket_of.get(mark.params[0])) is not None:
                place = min(places[user] for user in node.users)
                first[bucket] = min(place, first.get(bucket, place))
        return tuple(
            Arrival(bucket, program.refresh_buckets[bucket], names[place])
            for bucket, place in sorted(first.items(), key=lambda item: (item[1], item[0]))
        )

    def apply(self, program: Program, plan: tuple[Arrival, ...]) -> Program:
        """Insert the waits, in the order of the plan."""
        if not plan:
            return program
        graph, nodes = program.graph, program.nodes()
        arrivals = program.add_input("arrivals", Mark("arrivals", ()))
        for arrival in plan:
            with graph.inserting_before(nodes[arrival.before]):
                wait = graph.call_function(ops.refresh_wait, (arrivals, arrival.bucket))
            wait.meta["zerofx"] = Mark("refresh_wait", arrival.params, arrival.bucket)
        return program
