"""Bytes alive at each step of a lowered program, by kind and by module: what a tape allocates, and when it lets go. Pure."""

from __future__ import annotations

import enum
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from zerofx.program import Program, output_of
from zerofx.render import module_of


class Kind(enum.StrEnum):
    """What an allocation is for."""

    WHOLE = "whole parameters"
    BUFFER = "communication buffers"
    GRADIENT = "gradient shards"
    SAVED = "saved activations"
    WORKING = "working memory"


@dataclass(frozen=True, slots=True)
class Piece:
    """One allocation of a program: the steps between which it lives (its last one included), its size, what and whose it is."""

    born: int
    dies: int
    size_bytes: int
    kind: Kind
    module: str


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes alive at any step, where, and what they are."""

    step: int
    total_bytes: int
    by_kind: dict[Kind, int]
    by_module: dict[str, int]


# its schema says nothing, and it returns the tensor that it waits for
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_MARKED = {"gather_start": Kind.BUFFER, "gather_wait": Kind.WHOLE, "reduce_start": Kind.BUFFER, "reduce_wait": Kind.GRADIENT}


def pieces(program: Program, steps: Sequence[Sequence[Node]], standing: frozenset[int]) -> list[Piece]:
    """Return every allocation of a lowered program whose nodes run in ``steps``.

    What only one step reads and writes is never stored: steps of several nodes are fused kernels. ``standing`` are the storages that
    outlive the program whoever reads them, such as shards and inputs of the caller.
    """
    step_of = {node: place for place, step in enumerate(steps) for node in step}
    end, output = len(steps), output_of(program.graph)
    root: dict[Node, tuple[Node, int]] = {}
    first: dict[int | Node, Node] = {}  # of the placeholders in one storage: what is saved may be a view of what is saved
    dies: dict[tuple[Node, int], int] = defaultdict(lambda: -1)
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        source = _aliased(node) if node.op != "placeholder" else first.setdefault(_storage(node), node)
        if source is None or source is node:
            root[node] = (node, 0)
        elif node.target is operator.getitem and isinstance(source.meta["val"], list | tuple) and root[source] == (source, 0):
            root[node] = (source, node.args[1])
        else:
            root[node] = root[source]
        dies[root[node]] = max(dies[root[node]], step_of.get(node, 0))
        for user in node.users:
            dies[root[node]] = max(dies[root[node]], end if user is output else step_of[user])
    found = []
    for node in program.graph.nodes:
        if node.op == "output" or root[node][0] is not node:
            continue
        for place, size in enumerate(_sizes(node.meta.get("val"), standing)):
            key = (node, place)
            born = 0 if node.op == "placeholder" else step_of[node]
            fused = node.op != "placeholder" and len(steps[born]) > 1 and dies[key] <= born
            if size and not fused:
                found.append(Piece(born, max(dies[key], born), size, _kind(node, dies[key] == end), module_of(node)))
    return found


def _storage(node: Node) -> int | Node:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else node


def _aliased(node: Node) -> Node | None:
    """Return the input whose storage a node's value shares, None for a value of its own."""
    if node.target is operator.getitem or node.target is torch.ops.aten._unsafe_view.default:
        return node.all_input_nodes[0]
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema
    if all(result.alias_info is None for result in schema.returns):
        return node.all_input_nodes[0] if node.target is _WAIT else None
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            return given if isinstance(given, Node) else None
    return None


def _sizes(value: Any, standing: frozenset[int]) -> Iterable[int]:
    for part in value if isinstance(value, list | tuple) else [value]:
        storage = part.untyped_storage() if isinstance(part, Tensor) else None
        yield 0 if storage is None or storage._cdata in standing else storage.nbytes()


def _kind(node: Node, is_result: bool) -> Kind:
    mark = node.meta.get("zerofx")
    if mark is not None and mark.kind in _MARKED:
        return _MARKED[mark.kind]
    if mark is not None and mark.kind == "gather":
        return Kind.WHOLE
    return Kind.SAVED if is_result or node.op == "placeholder" else Kind.WORKING


def peak(found: Sequence[Piece], step_count: int) -> Peak:
    """Return the moment when most is alive."""
    change = [0] * (step_count + 2)
    for piece in found:
        change[piece.born] += piece.size_bytes
        change[piece.dies + 1] -= piece.size_bytes
    alive, most, where = 0, 0, 0
    for step in range(step_count + 1):
        alive += change[step]
        if alive > most:
            most, where = alive, step
    by_kind: dict[Kind, int] = defaultdict(int)
    by_module: dict[str, int] = defaultdict(int)
    for piece in found:
        if piece.born <= where <= piece.dies:
            by_kind[piece.kind] += piece.size_bytes
            by_module[piece.module] += piece.size_bytes
    return Peak(where, most, dict(by_kind), dict(by_module))


def storages(nodes: Iterable[Node]) -> frozenset[int]:
    """Return the storages behind the traced values of nodes."""
    values = [node.meta.get("val") for node in nodes]
    return frozenset(value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor))
