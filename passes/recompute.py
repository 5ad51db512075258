"""Recompute: what the backward gathers again instead of keeping it since the forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from zerofx.params import block_of
from zerofx.program import Level, Program

# Above any id that a user's own checkpoint regions get: a gather that such a region reads must not be saved for it.
_REGION = 1 << 30


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """Parameters that stay whole from forward to backward, and the nodes to compute again in the backward."""

    keep: tuple[int, ...]
    again: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recompute:
    """Tag gathers, and whatever follows from parameters alone, so that no whole parameter crosses to the backward.

    The parameters that the backward starts with stay: they would be gathered again at once.
    """

    takes: ClassVar[Level] = Level.UNSHARDED
    gives: ClassVar[Level] = Level.RECOMPUTED

    def plan(self, program: Program) -> RecomputePlan:
        """Keep the block that the forward ends with, where half of the memory limit holds it; recompute the rest."""
        gathers = [(node, mark.params[0]) for node, mark in program.marked("gather")]
        keep = _last_block(program, gathers)
        derived: dict[Node, None] = {node: None for node, _ in gathers}
        for node in program.graph.nodes:
            if node not in derived and _follows_from(node, derived):
                derived[node] = None
        kept = {node for node, index in gathers if index in keep}
        return RecomputePlan(keep, tuple(node.name for node in derived if node not in kept))

    def apply(self, program: Program, plan: RecomputePlan) -> Program:
        """Set the tags that the partitioner reads."""
        nodes = program.nodes()
        for node, mark in program.marked("gather"):
            if mark.params[0] in plan.keep:
                _tag(node, CheckpointPolicy.MUST_SAVE)
        for name in plan.again:
            _tag(nodes[name], CheckpointPolicy.MUST_RECOMPUTE)
        return program


def _tag(node: Node, policy: CheckpointPolicy) -> None:
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = _REGION


def _last_block(program: Program, gathers: list[tuple[Node, int]]) -> tuple[int, ...]:
    forward_reads = {node: [user for user in node.users if not _is_backward(user)] for node, _ in gathers}
    places = program.positions()
    last = {index: max((places[user] for user in forward_reads[node]), default=-1) for node, index in gathers}
    if not last:
        return ()
    final = max(last, key=lambda index: last[index])
    block = block_of(program.params[final].name)
    keep = tuple(sorted(index for index in last if block_of(program.params[index].name) == block or index == final))
    total = sum(program.params[index].whole_bytes for index in keep)
    limit = program.config.memory_limit_bytes
    return keep if total <= program.config.bucket_max_bytes and (limit is None or 2 * total <= limit) else ()


def _is_backward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward" or "fwd_nn_module_stack" in node.meta


def _follows_from(node: Node, derived: dict[Node, None]) -> bool:
    """Whether a node computes from parameters alone, and gives the same value when computed again."""
    if node.op != "call_function" or not node.all_input_nodes or not all(source in derived for source in node.all_input_nodes):
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
