"""Unshard: fold the marker ops to one source per parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from zerofx import ops
from zerofx.program import Level, Mark, Program, aliases, arguments, output_of


@dataclass(frozen=True, slots=True)
class Fold:
    """All reads of one parameter: the marker that stays, those that fold into it, and where the value comes from."""

    index: int
    keep: str
    drop: tuple[str, ...]
    source: str  # "gather", "whole" (a persistent copy), "shard" (replicated: the shard is the whole)


@dataclass(frozen=True, slots=True)
class Unshard:
    """Replace each parameter's marker ops by one gather, its persistent whole copy, or the replicated value itself."""

    takes: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.UNSHARDED

    def plan(self, program: Program) -> tuple[Fold, ...]:
        """Group the markers by parameter, in order of first use."""
        reads: dict[int, list[torch.fx.Node]] = {}
        for node, index in program.markers(ops.UNSHARD):
            reads.setdefault(index, []).append(node)
        return tuple(
            Fold(index, nodes[0].name, tuple(node.name for node in nodes[1:]), _source(nodes[0])) for index, nodes in reads.items()
        )

    def apply(self, program: Program, plan: tuple[Fold, ...]) -> Program:
        """Fold; the first marker is at the first use, so it comes before all the others."""
        nodes, output = program.nodes(), output_of(program.graph)
        for fold in plan:
            keep = nodes[fold.keep]
            for name in fold.drop:
                nodes[name].replace_all_uses_with(keep)
                program.graph.erase_node(nodes[name])
            if fold.source == "gather":
                keep.meta["zerofx"] = Mark("gather", (fold.index,))
                continue
            shard, whole = arguments(keep)[:2]
            value = whole if fold.source == "whole" else shard
            value.meta["zerofx"] = Mark(fold.source, (fold.index,))
            escapes = any(output in alias.users for alias in aliases(keep))
            if escapes or value.meta["val"].dtype != keep.meta["val"].dtype:
                # a fresh tensor, as tracing saw: a cast, or a parameter that the model returns
                dtype = keep.meta["val"].dtype
                if value.meta["val"].dtype == dtype:
                    keep.target, keep.args = torch.ops.aten.clone.default, (value,)
                else:
                    keep.target, keep.args = torch.ops.prims.convert_element_type.default, (value, dtype)
                keep.kwargs = {}
            else:
                keep.replace_all_uses_with(value)
                program.graph.erase_node(keep)
        return program


def _source(marker: torch.fx.Node) -> str:
    _, whole, _, _, dim, *_ = arguments(marker)
    if dim == -1:
        return "shard"
    return "gather" if whole is None else "whole"
