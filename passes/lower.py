"""Lower: replace events by ops that run, and cut the graph into collectives and compute regions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

from zerofx import _torch, collectives, ops
from zerofx.program import Level, Program


@dataclass(frozen=True, slots=True)
class Step:
    """One event and the buckets it belongs to, in the order that runs."""

    node: str
    kind: str
    params: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lower:
    """Expand starts and waits to ``_c10d_functional`` collectives with their packing and unpacking; erase releases.

    After this a buffer ends by liveness. With ``poison``, a released parameter is filled with NaN (tests).
    """

    poison: bool = False
    takes: ClassVar[Level] = Level.REDUCED
    gives: ClassVar[Level] = Level.LOWERED

    def plan(self, program: Program) -> tuple[Step, ...]:
        """List the events; how each moves is the transport table's choice (``collectives.TRANSPORTS``)."""
        kinds = ("gather_start", "gather_wait", "release", "reduce_start", "reduce_wait")
        return tuple(Step(node.name, mark.kind, mark.params) for node, mark in program.marked(*kinds))

    def apply(self, program: Program, plan: tuple[Step, ...]) -> Program:
        """Record each event's ops in its place."""
        collectives.import_functional()
        nodes = program.nodes()
        buffers: dict[Node, list[Node]] = {}
        for step in plan:
            node = nodes[step.node]
            params = tuple(program.params[index] for index in step.params)
            if step.kind == "release":
                if self.poison:
                    with program.graph.inserting_before(node):
                        program.graph.call_function(torch.ops.aten.fill_.Scalar, (node.args[0], float("nan")))
                program.graph.erase_node(node)
            elif step.kind.endswith("_start"):
                sources = list(node.args[0])
                buffers[node] = record(program.graph, node, _start(step.kind, params, program), sources)
            else:
                start = node.args[0]
                results = record(program.graph, node, _wait(step.kind, params, program), buffers[start])
                for item in list(node.users):
                    item.replace_all_uses_with(results[item.args[1]], propagate_meta=False)
                    program.graph.erase_node(item)
                program.graph.erase_node(node)
                program.graph.erase_node(start)
        return program


def _start(kind: str, params: tuple[Any, ...], program: Program) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    if kind == "gather_start":
        return lambda shards: collectives.gather_start(shards, params, program.group)
    return lambda grads: collectives.reduce_start(grads, params, program.group, program.config.reduce_dtype)


def _wait(kind: str, params: tuple[Any, ...], program: Program) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    wait = collectives.gather_wait if kind == "gather_wait" else collectives.reduce_wait
    return lambda buffers: wait(buffers, params, program.group)


class _Recorder(TorchDispatchMode):
    """Write each op that runs on fake tensors into a graph: the nodes of a pure function, with their metadata."""

    def __init__(self, graph: Graph, known: Sequence[tuple[Tensor, Node]], meta: dict[str, Any]) -> None:
        super().__init__()
        self.graph, self.meta = graph, meta
        self.nodes = {id(value): node for value, node in known}
        self.kept = [value for value, _ in known]  # an id stays valid only while its tensor lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor | list | tuple):
            return result  # a question about a tensor, such as its device
        node = self.graph.call_function(func, *torch.fx.node.map_aggregate((args, kwargs or {}), self._node))
        node.meta = {**self.meta, "val": result}
        for position, value in enumerate(result if isinstance(result, list | tuple) else [result]):
            part = node
            if isinstance(result, list | tuple):
                part = self.graph.call_function(operator.getitem, (node, position))
                part.meta = {**self.meta, "val": value}
            self.nodes[id(value)] = part
            self.kept.append(value)
        return result

    def _node(self, value: Any) -> Any:
        return self.nodes[id(value)] if isinstance(value, Tensor) else value


def record(graph: Graph, place: Node, function: Callable[[Sequence[Tensor]], list[Tensor]], sources: list[Node]) -> list[Node]:
    """Insert, before a node, what a function does to the values of some nodes; return the nodes of its results."""
    # a fresh alias for each source: two sources may be one tensor, and ids must tell them apart
    values = [node.meta["val"].view_as(node.meta["val"]) for node in sources]
    meta = {key: value for key, value in place.meta.items() if key in ("nn_module_stack", "zerofx")}
    fake_mode = _torch.detect_fake_mode(values)
    recorder = _Recorder(graph, list(zip(values, sources, strict=True)), meta)
    with torch.no_grad(), fake_mode, graph.inserting_before(place), recorder:
        results = function(values)
    return [recorder.nodes[id(value)] for value in results]
