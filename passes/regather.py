"""Regather: what the backward gathers again instead of keeping it since the forward."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from zerofx.keeping import worth_keeping
from zerofx.origins import is_backward
from zerofx.params import block_of
from zerofx.program import Level, Program

# Above any id that a user's own checkpoint regions get: a gather that such a region reads must not be saved for it.
_REGION = 1 << 30


@dataclass(frozen=True, slots=True)
class RegatherPlan:
    """Parameters that stay whole from forward to backward, and the nodes to compute again in the backward."""

    keep: tuple[int, ...]
    again: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Regather:
    """Tag gathers, and whatever follows from parameters alone, so that no whole parameter crosses to the backward.

    The parameters that the backward starts with stay: they would be gathered again at once, ahead of use.
    """

    takes: ClassVar[Level] = Level.UNSHARDED
    gives: ClassVar[Level] = Level.RECOMPUTED

    def plan(self, program: Program) -> RegatherPlan:
        """Keep the blocks that the forward ends with, as the window and half of the memory limit have room for; recompute the rest.

        With hardware, keep more of them within the memory limit: those whose gathers would make the backward wait.
        """
        gathers = [(node, mark.params[0]) for node, mark in program.marked("gather")]
        keep, machine, limit = _last(program, gathers), program.config.machine, program.config.memory_limit_bytes
        if program.keeps and limit is not None and machine is not None:
            keep = worth_keeping(program, keep, machine, limit)
        derived: dict[Node, None] = {node: None for node, _ in gathers}
        for node in program.graph.nodes:
            if node not in derived and _follows_from(node, derived):
                derived[node] = None
        kept = {node for node, index in gathers if index in keep}
        return RegatherPlan(keep, tuple(node.name for node in derived if node not in kept))

    def apply(self, program: Program, plan: RegatherPlan) -> Program:
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


def _last(program: Program, gathers: list[tuple[Node, int]]) -> tuple[int, ...]:
    if not program.keeps:
        return ()
    places = program.positions()
    last = {index: max((places[user] for user in node.users if not is_backward(user)), default=-1) for node, index in gathers}
    limit = program.config.memory_limit_bytes
    most = (1 + program.config.prefetch_buckets) * _largest_bytes(program)  # one in use, the others ahead of use
    if limit is not None:
        most = min(most, limit // 2)
    keep, total = list[int](), 0
    order = sorted(last, key=lambda index: last[index], reverse=True)
    # whole blocks, so that the others stay equal and compile once
    for _, block in itertools.groupby(order, key=lambda index: block_of(program.params[index].name)):
        members = list(block)
        total += sum(program.params[index].whole_bytes for index in members)
        if total > most:
            break
        keep += members
    return tuple(sorted(keep))


def _largest_bytes(program: Program) -> int:
    """Return the size of the largest bucket that gathers will have: a block, or a parameter larger than a bucket may be."""
    blocks: Counter[str] = Counter()
    for param in program.params:
        blocks[block_of(param.name)] += param.whole_bytes
    largest = max((param.whole_bytes for param in program.params), default=0)
    return max(largest, min(program.config.bucket_max_bytes, max(blocks.values(), default=0)))


def _follows_from(node: Node, derived: dict[Node, None]) -> bool:
    """Whether a node computes from parameters alone, and gives the same value when computed again."""
    if node.op != "call_function" or not node.all_input_nodes or not all(source in derived for source in node.all_input_nodes):
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
