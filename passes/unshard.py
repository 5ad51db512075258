"""Unshard: fold the marker ops to one source per parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch.fx import Node

from zerofx import ops
from zerofx.program import Level, Mark, Program, aliases, arguments, output_of


@dataclass(frozen=True, slots=True)
class Fold:
    """All reads of one parameter: the marker that stays, those that fold into it, and where the value comes from."""

    index: int
    keep: str
    drop: tuple[str, ...]
    source: str  # "gather", "whole" (a persistent copy), "shard" (replicated: the shard is the whole)
    cast: torch.dtype | None = None  # what is gathered, where all reads cast to that narrower dtype


@dataclass(frozen=True, slots=True)
class Unshard:
    """Replace each parameter's marker ops by one gather, its persistent whole copy, or the replicated value itself.

    Where all that reads a gathered parameter casts it to one narrower dtype, as ``torch.autocast`` does, the shard is cast before
    it travels; its gradient keeps the wider one.
    """

    takes: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.UNSHARDED

    def plan(self, program: Program) -> tuple[Fold, ...]:
        """Group the markers by parameter, in order of first use."""
        reads: dict[int, list[Node]] = {}
        for node, index in program.markers(ops.UNSHARD):
            reads.setdefault(index, []).append(node)
        return tuple(_fold(index, nodes) for index, nodes in reads.items())

    def apply(self, program: Program, plan: tuple[Fold, ...]) -> Program:
        """Fold; the first marker is at the first use, so it comes before all the others."""
        nodes, output, params = program.nodes(), output_of(program.graph), list(program.params)
        for fold in plan:
            keep = nodes[fold.keep]
            for name in fold.drop:
                nodes[name].replace_all_uses_with(keep)
                program.graph.erase_node(nodes[name])
            if fold.source == "gather":
                keep.meta["zerofx"] = Mark("gather", (fold.index,))
                if fold.cast is not None:
                    _cast_first(keep, fold.cast)
                    params[fold.index] = replace(params[fold.index], gather_dtype=fold.cast)
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
        return replace(program, params=tuple(params))


def _fold(index: int, reads: list[Node]) -> Fold:
    source = _source(reads[0])
    users = [user for read in reads for user in read.users]
    dtypes = {_cast_dtype(user) for user in users}
    dtype = dtypes.pop() if source == "gather" and len(dtypes) == 1 else None
    narrower = dtype is not None and dtype.is_floating_point and dtype.itemsize < reads[0].meta["val"].dtype.itemsize
    return Fold(index, reads[0].name, tuple(read.name for read in reads[1:]), source, dtype if narrower else None)


def _cast_dtype(node: Node) -> torch.dtype | None:
    """Return the dtype that a node casts to, None for one that does anything else."""
    if node.target is torch.ops.prims.convert_element_type.default:
        found: torch.dtype = arguments(node)[1]
        return found
    if node.target is torch.ops.aten._to_copy.default and node.kwargs.keys() == {"dtype"}:
        return cast("torch.dtype", node.kwargs["dtype"])
    return None


def _cast_first(marker: Node, dtype: torch.dtype) -> None:
    """Let a marker give what its users would cast it to."""
    casts = list(marker.users)
    value = casts[0].meta["val"]
    shard, whole, index, shape, dim, _, *group = arguments(marker)
    marker.args = (shard, whole, index, shape, dim, dtype, *group)
    marker.meta["val"] = value
    for node in casts:
        node.replace_all_uses_with(marker, propagate_meta=False)
        marker.graph.erase_node(node)


def _source(marker: Node) -> str:
    _, whole, _, _, dim, *_ = arguments(marker)
    if dim == -1:
        return "shard"
    return "gather" if whole is None else "whole"
