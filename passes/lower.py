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
from zerofx.kernels import is_constant
from zerofx.params import Param
from zerofx.program import Level, Program, Stashed, arguments


@dataclass(frozen=True, slots=True)
class Step:
    """One event and the bucket, or the stashed value, that it belongs to, in the order that runs."""

    node: str
    kind: str
    params: tuple[int, ...]
    number: int


@dataclass(frozen=True, slots=True)
class Lower:
    """Expand starts and waits to ``_c10d_functional`` collectives with their packing and unpacking; erase releases.

    After this a buffer ends by liveness. With ``poison``, a released parameter is filled with NaN (tests).
    """

    poison: bool = False
    takes: ClassVar[Level] = Level.REDUCED
    gives: ClassVar[Level] = Level.LOWERED

    def plan(self, program: Program) -> tuple[Step, ...]:
        """List the events; how each moves is the transport table's choice (``groups.TRANSPORTS``)."""
        kinds = ("gather_start", "gather_wait", "release", "reduce_start", "reduce_wait", "stash", "restore_start", "restore_wait")
        return tuple(Step(node.name, mark.kind, mark.params, mark.bucket) for node, mark in program.marked(*kinds))

    def apply(self, program: Program, plan: tuple[Step, ...]) -> Program:
        """Record each event's ops in its place."""
        collectives.import_functional()
        nodes = program.nodes()
        recorder = _Recorder(program)
        buffers: dict[Node, list[Node]] = {}
        for step in plan:
            node = nodes[step.node]
            params = tuple(program.params[index] for index in step.params)
            if step.kind in ("stash", "restore_start", "restore_wait"):
                result = recorder.insert_stashed(node, step.kind, program.stashed[step.number])
                node.replace_all_uses_with(result, propagate_meta=False)
                program.graph.erase_node(node)
            elif step.kind == "release":
                if self.poison:
                    with program.graph.inserting_before(node):
                        program.graph.call_function(torch.ops.aten.fill_.Scalar, (arguments(node)[0], float("nan")))
                program.graph.erase_node(node)
            elif step.kind.endswith("_start"):
                buffers[node] = recorder.insert(node, step.kind, params, list(arguments(node)[0]))
            else:
                start = arguments(node)[0]
                results = recorder.insert(node, step.kind, params, buffers[start])
                for item in list(node.users):
                    item.replace_all_uses_with(results[arguments(item)[1]], propagate_meta=False)
                    program.graph.erase_node(item)
                program.graph.erase_node(node)
                program.graph.erase_node(start)
        if program.config.backend == "inductor":
            _make_where_read(program.graph)
        return program


def _make_where_read(graph: Graph) -> None:
    """Give each reader of a constant one of its own: one that several regions read would be stored, from the first of them to the last."""

    def own(source: Node) -> Node:
        return graph.node_copy(source, own) if is_constant(source) else source

    nodes = [node for node in graph.nodes if node.op == "call_function"]
    constants = {node: None for node in nodes if is_constant(node)}
    for node in nodes:
        if node not in constants and not constants.keys().isdisjoint(node.all_input_nodes):
            with graph.inserting_before(node):
                node.args, node.kwargs = torch.fx.node.map_arg((node.args, node.kwargs), own)
    for node in reversed(constants):
        if not node.users:
            graph.erase_node(node)


class _Recorder:
    """Inserts the ops of a collective's functions; buckets of equal geometry are recorded once and replayed."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._recordings: dict[Any, _Recording] = {}
        # what is traced around was decomposed for Inductor; so must be what goes beside it
        table = _torch.inductor_decompositions() if program.config.backend == "inductor" else {}
        left = () if program.config.whole_graph else collectives.AS_THEY_ARE
        self._decompositions = {op: function for op, function in table.items() if op not in left}

    def insert(self, place: Node, kind: str, params: tuple[Param, ...], sources: list[Node]) -> list[Node]:
        """Insert, before a node, what an event of a kind does to the values of some nodes; return its results."""
        geometry = tuple((param.shape, param.dim, param.dtype, param.compute_dtype, param.whole_dtype) for param in params)
        return self._insert(place, (kind, geometry), self._function(kind, params), sources)

    def insert_stashed(self, place: Node, kind: str, stashed: Stashed) -> Node:
        """Insert, before a node, what an event of a stashed value does to the node that it reads; return the result."""
        value, group = place.meta["val"], stashed.group
        if group is None:
            return self._insert_spill(place, kind)
        functions: dict[str, Callable[[Tensor], Tensor]] = {
            "stash": lambda whole: collectives.own_part(whole, group),
            "restore_start": lambda part: collectives.whole_start(part, group),
            "restore_wait": lambda buffer: collectives.whole_wait(buffer, value.shape, value.dtype, group),
        }
        function, key = functions[kind], (kind, group, tuple(value.shape), value.dtype)
        (result,) = self._insert(place, key, lambda sources: [function(*sources)], [arguments(place)[0]])
        return result

    def _insert_spill(self, place: Node, kind: str) -> Node:
        graph, value, source = self._program.graph, place.meta["val"], arguments(place)[0]
        spill = next(node for node, _ in self._program.marked("spill"))
        calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            "stash": (ops.spill_write, (spill, source, place.meta["zerofx"].bucket)),
            "restore_start": (ops.spill_start, (spill, source, tuple(value.shape), value.dtype)),
            "restore_wait": (ops.spill_wait, (source, spill)),
        }
        with graph.inserting_before(place):
            node = graph.call_function(*calls[kind])
        node.meta = dict(place.meta)
        return node

    def _insert(
        self, place: Node, key: tuple[Any, ...], function: Callable[[Sequence[Tensor]], list[Tensor]], sources: list[Node]
    ) -> list[Node]:
        values = [node.meta["val"] for node in sources]
        key = *key, tuple((value.shape, value.stride(), value.dtype) for value in values)
        if key not in self._recordings:
            self._recordings[key] = _record(function, values, self._decompositions)
        return self._recordings[key].replay(self._program.graph, place, sources)

    def _function(self, kind: str, params: tuple[Param, ...]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        group, config = self._program.group, self._program.config
        dtype, divisor = config.reduce_dtype, config.divisor(group.size)
        if kind == "gather_start":
            return lambda shards: collectives.gather_start(shards, params, group)
        if kind == "reduce_start":
            return lambda grads: collectives.reduce_start(grads, params, group, dtype, divisor)
        if kind == "gather_wait":
            return lambda buffers: collectives.gather_wait(buffers, params, group)
        return lambda buffers: collectives.reduce_wait(buffers, params, group, divisor)


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of a tensor in a recording: sources first, then results of ops."""

    number: int


@dataclass(frozen=True, slots=True)
class _Recording:
    """The ops that a pure function runs: (target, args, kwargs, value), tensors as slots; and the slots of its results."""

    ops: tuple[tuple[Any, Any, Any, Any], ...]
    results: tuple[_Slot, ...]

    def replay(self, graph: Graph, place: Node, sources: list[Node]) -> list[Node]:
        """Write the ops into a graph, before a node. Replays share traced values: at worst, Inductor sees an alias too many."""
        nodes = list(sources)
        meta = {key: value for key, value in place.meta.items() if key in ("nn_module_stack", "zerofx")}

        def node_of(part: Any) -> Any:
            return nodes[part.number] if isinstance(part, _Slot) else part

        def fill(value: Any) -> Any:
            return torch.fx.node.map_aggregate(value, node_of)

        with graph.inserting_before(place):
            for target, args, kwargs, value in self.ops:
                node = graph.call_function(target, fill(args), fill(kwargs))
                node.meta = {**meta, "val": value}
                nodes.append(node)
        return [nodes[slot.number] for slot in self.results]


class _Tracer(TorchDispatchMode):
    """Writes down each op that runs on fake tensors."""

    def __init__(self, sources: Sequence[Tensor], decompositions: dict[Any, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._decompositions = decompositions
        self.ops: list[tuple[Any, Any, Any, Any]] = []
        self.kept = list(sources)  # an id stays valid only while its tensor lives
        self.slots = {id(value): _Slot(number) for number, value in enumerate(sources)}
        self._count = len(sources)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (decomposition := self._decompositions.get(func)) is not None:
            with self:
                decomposed = decomposition(*args, **(kwargs or {}))
            if decomposed is not NotImplemented:
                return decomposed
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor | list | tuple):
            return result  # a question about a tensor, such as its device
        slotted_args, slotted_kwargs = torch.fx.node.map_aggregate((args, kwargs or {}), self._slot_of)
        source = self._write(func, slotted_args, slotted_kwargs, result)
        if not isinstance(result, Tensor):
            for position, value in enumerate(result):
                self._write(operator.getitem, (source, position), {}, value)
        return result

    def _slot_of(self, part: Any) -> Any:
        return self.slots[id(part)] if isinstance(part, Tensor) else part

    def _write(self, target: Any, args: Any, kwargs: Any, value: Any) -> _Slot:
        slot = _Slot(self._count)
        self._count += 1
        self.ops.append((target, args, kwargs, value))
        self.slots[id(value)] = slot
        self.kept.append(value)
        return slot


def _record(function: Callable[[Sequence[Tensor]], list[Tensor]], values: list[Tensor], decompositions: dict[Any, Any]) -> _Recording:
    # a fresh alias for each source: two sources may be one tensor, and ids must tell them apart
    sources = [value.view_as(value) for value in values]
    tracer = _Tracer(sources, decompositions)
    fake_mode = _torch.detect_fake_mode(sources)
    assert fake_mode is not None
    with torch.no_grad(), fake_mode, tracer:
        results = function(sources)
    return _Recording(tuple(tracer.ops), tuple(tracer.slots[id(value)] for value in results))
