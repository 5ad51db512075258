"""Bytes alive at each step of a lowered program, by kind and by module: what a tape allocates, and when it lets go. Pure."""

from __future__ import annotations

import enum
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from zerofx import ops
from zerofx.memory import shards_bytes
from zerofx.origins import module_of
from zerofx.params import block_of
from zerofx.program import Program, arguments, output_of
from zerofx.steps import Step
from zerofx.work import allocated_bytes

Root = tuple[Node, int]


class Kind(enum.StrEnum):
    """What an allocation is for."""

    WHOLE = "whole parameters"
    BUFFER = "communication buffers"
    GRADIENT = "gradient shards"
    SAVED = "saved activations"
    LOADED = "shards from disk"
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


_functional = torch.ops._c10d_functional
# its schema says nothing, and it returns the tensor that it waits for
_WAIT = _functional.wait_tensor.default
# What is in flight holds what it sends. A sum over the ranks is made in a copy, which is its result.
_SENDS = (_functional.all_gather_into_tensor_out.default, _functional.all_to_all_single.default, _functional.reduce_scatter_tensor.default)
_MARKED = {
    "gather_start": Kind.WHOLE,
    "gather_wait": Kind.WHOLE,
    "reduce_start": Kind.BUFFER,
    "reduce_wait": Kind.GRADIENT,
    "restore_start": Kind.SAVED,
}


def pieces(program: Program, steps: Sequence[Step], standing: frozenset[int]) -> list[Piece]:
    """Return every allocation of a lowered program that runs in ``steps``.

    What only one step reads and writes is never stored. ``standing`` are the storages that outlive the program whoever reads them,
    such as shards and inputs of the caller.
    """
    step_of = {node: place for place, step in enumerate(steps) for node in step.nodes}
    end, output = len(steps), output_of(program.graph)
    roots = _roots(program)
    dies: dict[Root, int] = defaultdict(lambda: -1)
    for node, root in roots.items():
        dies[root] = max(dies[root], step_of.get(node, -1))
        for user in _holders(node):
            dies[root] = max(dies[root], end if user is output else step_of.get(user, -1))
    found: dict[Root, Piece] = {}
    for node, root in roots.items():
        if root[0] is not node or (node.op != "placeholder" and node not in step_of):
            continue
        born = 0 if node.op == "placeholder" else step_of[node]
        for place, size in enumerate(_sizes(node.meta.get("val"), standing)):
            last = max(dies[node, place], born)
            stays_inside = node.op != "placeholder" and steps[born].is_fused and last == born
            if size and not stays_inside and node.target is not ops.store:
                found[node, place] = Piece(born, last, size, _kind(node, last == end), module_of(node))
    return [*_written_in_place(found, roots, steps), *_loaded(program, step_of)]


def _loaded(program: Program, step_of: dict[Node, int]) -> Iterator[Piece]:
    """Yield the stays in memory of shards that lie on disk."""
    ends = {mark.params: step_of[node] for node, mark in program.marked("evict")}
    for node, mark in program.marked("load"):
        params = [program.params[index] for index in mark.params]
        yield Piece(step_of[node], ends[mark.params], shards_bytes(params), Kind.LOADED, block_of(params[0].name))


def _holders(node: Node) -> Iterator[Node]:
    """Yield what needs a node's value: its users, and the waits for those that send it."""
    for user in node.users:
        yield user
        if user.target in _SENDS:
            yield from (wait for wait in user.users if wait.target is _WAIT)


def _roots(program: Program) -> dict[Node, Root]:
    """Return for each node the allocation that its value lies in: the node that made it, and which of its results."""
    roots: dict[Node, Root] = {}
    first: dict[int | Node, Node] = {}  # of the placeholders in one storage: what is saved may be a view of what is saved
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        source = _aliased(node) if node.op != "placeholder" else first.setdefault(_storage(node), node)
        if source is None or source is node:
            roots[node] = (node, 0)
        elif node.target is operator.getitem and isinstance(source.meta["val"], list | tuple) and roots[source] == (source, 0):
            roots[node] = (source, arguments(node)[1])
        else:
            roots[node] = roots[source]
    return roots


def _written_in_place(found: dict[Root, Piece], roots: dict[Node, Root], steps: Sequence[Step]) -> list[Piece]:
    """Let what a fused kernel writes take the place of what dies there, where nothing that it writes later still reads that."""
    result = dict(found)
    born: dict[int, list[Root]] = defaultdict(list)
    for root, piece in found.items():
        if root[0].op != "placeholder" and steps[piece.born].is_fused:
            born[piece.born].append(root)
    for place, written in born.items():
        read = _read_by(steps[place].nodes, written, roots)
        for position, root in enumerate(written):
            later = set().union(*(read[other] for other in written[position + 1 :]))
            for source in read[root]:
                dying = result.get(source)
                if source not in later and dying is not None and _is_replaced(dying, found[root], steps):
                    result[source] = replace(dying, dies=place - 1)
                    break
    return list(result.values())


def _is_replaced(dying: Piece, written: Piece, steps: Sequence[Step]) -> bool:
    same_region = steps[dying.born].region == steps[written.born].region
    return dying.born < dying.dies == written.born and dying.size_bytes == written.size_bytes and same_region


def _read_by(nodes: Sequence[Node], written: Sequence[Root], roots: dict[Node, Root]) -> dict[Root, dict[Root, None]]:
    """Return which allocations from before a kernel each of those that it writes is computed from, through what it never stores."""
    stored = {root[0] for root in written}
    sources: dict[Node, dict[Root, None]] = {}
    for node in nodes:
        sources[node] = {}
        for source in node.all_input_nodes:
            if source not in sources:
                sources[node][roots[source]] = None
            elif source not in stored:
                sources[node].update(sources[source])
    return {root: sources[root[0]] for root in written}


def _storage(node: Node) -> int | Node:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else node


def _aliased(node: Node) -> Node | None:
    """Return the input whose storage a node's value shares, None for a value of its own."""
    if node.target in (operator.getitem, torch.ops.aten._unsafe_view.default, ops.spill_wait):
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
        if isinstance(part, list | tuple):  # of an operator within an operator
            yield sum(_sizes(part, standing))
            continue
        storage = part.untyped_storage() if isinstance(part, Tensor) else None
        yield 0 if storage is None or storage._cdata in standing else allocated_bytes(part)


def _kind(node: Node, is_result: bool) -> Kind:
    mark = node.meta.get("zerofx")
    if mark is not None and mark.kind in _MARKED:
        return _MARKED[mark.kind]
    if mark is not None and mark.kind == "gather":
        return Kind.WHOLE
    return Kind.SAVED if is_result or node.op == "placeholder" else Kind.WORKING


def alive_bytes(found: Sequence[Piece], step_count: int) -> list[int]:
    """Return the bytes alive at each step, and after the last."""
    change = [0] * (step_count + 2)
    for piece in found:
        change[piece.born] += piece.size_bytes
        change[piece.dies + 1] -= piece.size_bytes
    return list(itertools.accumulate(change[:-1]))


def peak(found: Sequence[Piece], step_count: int) -> Peak:
    """Return the moment when most is alive."""
    alive = alive_bytes(found, step_count)
    where = max(range(len(alive)), key=alive.__getitem__)
    by_kind: dict[Kind, int] = defaultdict(int)
    by_module: dict[str, int] = defaultdict(int)
    for piece in found:
        if piece.born <= where <= piece.dies:
            by_kind[piece.kind] += piece.size_bytes
            by_module[piece.module] += piece.size_bytes
    return Peak(where, alive[where], dict(by_kind), dict(by_module))


def storages(nodes: Iterable[Node]) -> frozenset[int]:
    """Return the storages behind the traced values of nodes."""
    values = [node.meta.get("val") for node in nodes]
    return frozenset(value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor))
