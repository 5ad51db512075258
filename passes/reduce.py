"""Reduce: one reduction per parameter, of its summed gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from zerofx import memory, ops
from zerofx.program import Level, Mark, Phase, Program, Sync, arguments, output_of

_ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True, slots=True)
class Sum:
    """The gradient of one parameter: where the backward returns it, and the marker ops that it adds up."""

    index: int
    result: str
    terms: tuple[str, ...]
    additions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Turn sums of reduced gradients into one reduction of the summed gradient (averaging over ranks is linear).

    With ``Sync.KEEP`` the backward returns whole gradients instead; with ``Sync.REDUCE_KEPT`` it first adds those kept before.
    """

    takes: ClassVar[Level] = Level.UNSHARDED
    gives: ClassVar[Level] = Level.REDUCED

    def plan(self, program: Program) -> tuple[Sum, ...]:
        """Find, for each gradient that the backward returns, the tree of additions over marker ops behind it."""
        if program.phase is not Phase.BACKWARD:
            return ()
        sums, taken = [], set[Node]()
        for result in output_of(program.graph).all_input_nodes:
            terms, additions = _tree(result)
            if terms and not taken.intersection(terms):
                taken.update(terms)
                sums.append(Sum(arguments(terms[0])[1], result.name, _names(terms), _names(additions)))
        return tuple(sums)

    def apply(self, program: Program, plan: tuple[Sum, ...]) -> Program:
        """Rebuild each tree of additions over whole gradients, and reduce its root."""
        graph, nodes, output = program.graph, program.nodes(), output_of(program.graph)
        places, stored = program.positions(), memory.stored_gradients(program.params, program.config)
        for item in plan:
            whole: dict[Node, Node] = {nodes[name]: arguments(nodes[name])[0] for name in item.terms}
            for addition in sorted((nodes[name] for name in item.additions), key=places.__getitem__):
                left, right = (whole[source] for source in arguments(addition))
                with graph.inserting_before(addition):
                    whole[addition] = graph.call_function(_ADD, (left, right))
                whole[addition].meta = {key: value for key, value in addition.meta.items() if key != "val"}
                whole[addition].meta["val"] = left.meta["val"]
            result, total = nodes[item.result], whole[nodes[item.result]]
            if program.sync is Sync.REDUCE_KEPT:
                total = _add_pending(program, total, result, item.index)
            is_alone = program.group.size == 1 and item.index not in stored  # what goes to disk does so behind a reduction
            if program.sync is Sync.KEEP or is_alone:
                reduced = total
            else:
                with graph.inserting_before(result):
                    reduced = graph.call_function(ops.REDUCE_GRAD, (total, *arguments(nodes[item.terms[0]])[1:]))
                reduced.meta = dict(result.meta)
                reduced.meta["zerofx"] = Mark("reduce", (item.index,))
            output.replace_input_with(result, reduced)
        _erase_unused(program, plan)
        return program


def _names(nodes: list[Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _tree(root: Node) -> tuple[list[Node], list[Node]]:
    """Return the marker ops that a node adds up and the additions between; nothing where anything else takes part."""
    terms: list[Node] = []
    additions: list[Node] = []
    stack = [root]
    while stack:
        node = stack.pop()
        if node.target is ops.REDUCE_GRAD:
            terms.append(node)
        elif node.target is _ADD and len(node.args) == 2 and not node.kwargs and all(isinstance(arg, Node) for arg in node.args):
            additions.append(node)
            stack.extend(reversed(arguments(node)))
        else:
            return [], []
    return terms, additions


def _add_pending(program: Program, total: Node, before: Node, index: int) -> Node:
    graph = program.graph
    pending = program.add_input(f"pending_{index}", Mark("pending", (index,)))
    dtype = program.config.sent_dtype(total.meta["val"].dtype)
    with graph.inserting_before(before):
        added = graph.call_function(ops.add_pending, (total, pending, dtype))
    added.meta = {**total.meta, "val": total.meta["val"].to(dtype)}
    return added


def _erase_unused(program: Program, plan: tuple[Sum, ...]) -> None:
    """Erase the old trees, results before the terms that they add."""
    stale = {name for item in plan for name in (*item.terms, *item.additions)}
    for node in reversed(list(program.graph.nodes)):
        if node.name in stale and not node.users:
            program.graph.erase_node(node)
