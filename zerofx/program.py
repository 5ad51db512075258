"""A traced graph and the facts about it that passes read."""

from __future__ import annotations

import enum
import hashlib
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx import _torch, ops
from zerofx.config import Config
from zerofx.groups import Group
from zerofx.params import Param


class Phase(enum.Enum):
    """Which part of a step a graph computes."""

    JOINT = "joint"
    FORWARD = "forward"
    BACKWARD = "backward"


class Level(enum.IntEnum):
    """What a program is made of; passes only ever raise it. ``verify`` holds the invariants of each level."""

    TRACED = 0  # marker ops as traced
    UNSHARDED = 1  # at most one unshard per parameter
    RECOMPUTED = 2  # what the backward gathers again is tagged; the last level of a joint graph
    RELEASED = 3  # each whole parameter ends at a release
    REDUCED = 4  # one reduction per parameter
    BUCKETED = 5  # starts and waits, by bucket
    SCHEDULED = 6  # in the order that runs
    LOWERED = 7  # collectives and compute regions only


class Sync(enum.Enum):
    """What a backward does with whole gradients: average them, keep them, or average them with those kept before."""

    REDUCE = "reduce"
    KEEP = "keep"
    REDUCE_KEPT = "reduce_kept"


@dataclass(frozen=True, slots=True)
class Mark:
    """What a node means to zerofx. ``params`` are indices into the parameter table; ``why`` says why an event stands where it does."""

    kind: str
    params: tuple[int, ...]
    bucket: int = -1
    why: str = ""


@dataclass(frozen=True, slots=True)
class Stashed:
    """A value that a forward saves in another form: the node of that name in both graphs, and the module that it belongs to.

    Each rank of the ``group`` keeps a part of it; without one it is in a file.
    """

    name: str
    module: str
    group: Group | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """A graph module that it owns, with the phase, level, parameter table, ranks and settings.

    ``keeps`` says whether the backward may keep whole parameters of the forward, ``recompute`` which activations it does not keep:
    as ``Config.recompute``, with a choice in the place of an amount; ``stashed`` are the values that the backward gets in another form.
    """

    module: GraphModule
    phase: Phase
    level: Level
    params: tuple[Param, ...]
    group: Group
    config: Config
    refresh_buckets: tuple[tuple[int, ...], ...] = ()
    sync: Sync = Sync.REDUCE
    keeps: bool = True
    recompute: Any = None
    stashed: tuple[Stashed, ...] = ()

    @property
    def graph(self) -> Graph:
        return self.module.graph

    def at(self, level: Level) -> Program:
        """Return the same program, raised to a level."""
        return replace(self, level=max(level, self.level))

    def copy(self) -> Program:
        """Return a program with a graph of its own; submodules and constants are shared."""
        graph = Graph()
        values: dict[Node, Node] = {}
        output = graph.graph_copy(self.graph, val_map=values)
        source = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        graph.output(output).meta = dict(source.meta)
        return replace(self, module=_torch.LazyGraphModule(self.module, graph))

    def marked(self, *kinds: str) -> Iterator[tuple[Node, Mark]]:
        """Yield the nodes that carry a mark of one of the kinds, in graph order."""
        for node in self.graph.nodes:
            mark = node.meta.get("zerofx")
            if mark is not None and mark.kind in kinds:
                yield node, mark

    def markers(self, target: Any) -> Iterator[tuple[Node, int]]:
        """Yield the marker-op nodes of a kind with the index of their parameter, in graph order."""
        place = 2 if target is ops.UNSHARD else 1
        for node in self.graph.find_nodes(op="call_function", target=target, sort=True):
            yield node, arguments(node)[place]

    def add_input(self, name: str, mark: Mark) -> Node:
        """Add an input behind the others, for what the runtime gives beside what was traced; its mark says what."""
        with self.graph.inserting_after([node for node in self.graph.nodes if node.op == "placeholder"][-1]):
            given = self.graph.placeholder(name)
        given.meta["zerofx"] = mark
        return given

    def nodes(self) -> dict[str, Node]:
        """Return the nodes by name: how an ``apply`` finds what its plan names."""
        return {node.name: node for node in self.graph.nodes}

    def positions(self) -> dict[Node, int]:
        """Return each node's place in the graph."""
        return {node: place for place, node in enumerate(self.graph.nodes)}


def arguments(node: Node) -> tuple[Any, ...]:
    """Return a node's arguments, without the union of everything that FX can store."""
    return node.args


def results_of(graph: Graph) -> list[Any]:
    """Return what a graph returns: nodes, and None where it returns nothing."""
    return list(arguments(output_of(graph))[0])


def output_of(graph: Graph) -> Node:
    """Return the output node."""
    return graph.output_node()


def digest(program: Program) -> str:
    """Return a fingerprint of a program: its ops in order, with their arguments, shapes and buckets. Names of nodes do not count."""
    numbers: dict[Node, int] = {}
    lines = [f"{program.phase.value} {program.level.name} {program.group.size}"]
    for node in program.graph.nodes:
        numbers[node] = len(numbers)
        args = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: f"%{numbers[source]}")
        value = node.meta.get("val") if node.op == "placeholder" else None
        shape = f"{tuple(value.shape)} {value.stride()} {value.dtype}" if isinstance(value, torch.Tensor) else ""
        target = "" if node.op == "placeholder" else getattr(node.target, "__qualname__", node.target)
        lines.append(f"{node.op} {target} {args} {shape} {node.meta.get('zerofx')}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def is_view(node: Node) -> bool:
    """Whether a node computes nothing: a view, or one item of a tuple."""
    return node.target is operator.getitem or (isinstance(node.target, torch._ops.OpOverload) and node.target.is_view)


def storage_of(node: Node) -> int | None:
    """Return an identity of the storage behind a node's traced value, None for anything but a tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def aliases(node: Node) -> list[Node]:
    """Return the node and everything computed from it that may share its storage, in no particular order."""
    found, stack = {node: None}, [node]
    while stack:
        source = stack.pop()
        for user in source.users:
            if user not in found and _may_alias(user, source):
                found[user] = None
                stack.append(user)
    return list(found)


def _may_alias(user: Node, source: Node) -> bool:
    """By the operator first: traced storages tell apart what folding has since made one."""
    if user.target is operator.getitem or user.target is torch.ops.aten._unsafe_view.default:
        return True
    if isinstance(user.target, torch._ops.OpOverload) and any(result.alias_info is not None for result in user.target._schema.returns):
        return True
    return storage_of(user) is not None and storage_of(user) == storage_of(source)


def last_use(node: Node, positions: dict[Node, int]) -> Node:
    """Return the last node that reads a value or an alias of it (the node itself where nothing does)."""
    readers = [user for alias in aliases(node) for user in alias.users]
    return max([node, *readers], key=positions.__getitem__)
