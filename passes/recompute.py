"""Recompute: what the backward computes again instead of keeping it since the forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.utils.checkpoint import CheckpointPolicy

from zerofx.program import Level, Mark, Phase, Program
from zerofx.recomputing import must_keep, regions

# Above any id that a user's own checkpoint regions get, and below that of gathers.
_REGION = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A call of a submodule: the nodes that the backward computes again, and those that it must not."""

    module: str
    number: int
    again: tuple[str, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recompute:
    """Tag the activations that ``Config.recompute`` says are not kept: the backward computes each part again, just before its use.

    Source: Chen et al. (2016), Training Deep Nets with Sublinear Memory Cost, section 4; Korthikanti et al. (2022), section 5.
    """

    takes: ClassVar[Level] = Level.UNSHARDED
    gives: ClassVar[Level] = Level.UNSHARDED

    def plan(self, program: Program) -> tuple[Part, ...]:
        """Find the parts, by the modules that computed the nodes of a joint graph."""
        if program.phase is not Phase.JOINT:
            return ()
        return tuple(
            Part(region.call.module, region.call.number, *(tuple(node.name for node in nodes) for nodes in (region.again, region.kept)))
            for region in regions(list(program.graph.nodes), program.recompute)
        )

    def apply(self, program: Program, plan: tuple[Part, ...]) -> Program:
        """Set the tags that the partitioner reads, and mark what will be computed again."""
        nodes = program.nodes()
        for number, part in enumerate(plan):
            for name in part.kept:
                must_keep(nodes[name])
            for name in part.again:
                meta = nodes[name].meta
                meta["recompute"], meta["ac_graph_id"] = CheckpointPolicy.MUST_RECOMPUTE, _REGION + number
                meta.setdefault("zerofx", Mark("recompute", (), number))
        return program
