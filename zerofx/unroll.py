"""The traced graph of a model of few layers, as that of the same model with many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from zerofx import _torch, ops
from zerofx.origins import is_backward
from zerofx.params import Param
from zerofx.periods import Copy, Irregular, Item, Line, lengthened
from zerofx.program import Program, arguments, output_of, results_of
from zerofx.stacks import Stack, split_names

_INDEX: dict[Any, int] = {ops.UNSHARD: 2, ops.REDUCE_GRAD: 1}  # where the marker ops name their parameter
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
# What is there for people to read, what the values say again, and what numbers go up in.
_FOR_PEOPLE = ("desc", "stack_trace", "seq_nr", "from_node", "original_aten", "source_fn_stack", "fwd_source_fn_stack")
_NOT_COMPARED = frozenset((*_STACKS, *_FOR_PEOPLE, "val", "tensor_meta", "ac_graph_id"))


@dataclass(frozen=True, slots=True)
class Unrolled:
    """A joint graph at full depth, and which of its inputs are static."""

    program: Program
    static_inputs: list[int]


def unrolled(
    program: Program,
    stack: Stack,
    params: tuple[Param, ...],
    refresh_buckets: tuple[tuple[int, ...], ...],
    output_count: int,
    static_inputs: Sequence[int],
) -> Unrolled:
    """Return the traced program of a model cut to the least depth of a stack as that of the whole, which has these parameters.

    Raises Irregular where the layers of the graph do not repeat.
    """
    reading = _Reading(program, stack.least, output_count)
    copies = lengthened(reading.line(), stack.extra)
    graph = _Writing(reading, stack, params, copies).graph()
    static = set(static_inputs)
    inputs = [copy.item for copy in copies if copy.item < len(reading.inputs)]
    whole = replace(program, module=_torch.LazyGraphModule(program.module, graph), params=params, refresh_buckets=refresh_buckets)
    return Unrolled(whole, [place for place, item in enumerate(inputs) if item in static])


class _Reading:
    """The nodes of a joint graph, and what makes two of them the same but for their layer."""

    def __init__(self, program: Program, stack: Stack, output_count: int) -> None:
        self.program, self._stack, self._output_count = program, stack, output_count
        self.nodes = [node for node in program.graph.nodes if node.op != "output"]
        self.places = {node: place for place, node in enumerate(self.nodes)}
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.results = results_of(program.graph)
        if self.nodes[: len(self.inputs)] != self.inputs:
            raise Irregular("inputs stand among operations")
        self.owners = _owners(self.nodes)
        self.regions = self._regions()
        self._params = {param.index: split_names(stack, param.names) for param in program.params}
        self._read: dict[Node, int] = {}
        for node, index in program.markers(ops.UNSHARD):
            self._read |= dict.fromkeys((source for source in node.all_input_nodes), index)

    def line(self) -> Line:
        """Return the graph as a line."""
        inputs = len(self.inputs)
        starts = (place for place, node in enumerate(self.nodes) if place >= inputs and is_backward(node))
        forward = next(starts, len(self.nodes)) - inputs
        items = [self._item(node) for node in self.nodes]
        items += [Item("result", (), () if node is None else (self.places[node],)) for node in self.results]
        return Line(items, inputs, forward, len(self.nodes) - inputs - forward, self._output_count)

    def _regions(self) -> int:
        """Return by how much the numbers of checkpointed regions go up from a group of layers to the next."""
        found: dict[int | None, set[int]] = {}
        for node in self.nodes:
            if (region := node.meta.get("ac_graph_id")) is not None:
                for _, group, _ in self._modules(node):
                    found.setdefault(group, set()).add(region)
        first, second = sorted(found.get(1, ())), sorted(found.get(2, ()))
        step = second[0] - first[0] if first and second else 0
        if second != [region + step for region in first]:
            raise Irregular("checkpointed regions differ between layers")
        return step

    def _modules(self, node: Node) -> Iterator[tuple[str, int | None, Any]]:
        """Yield the modules that a node computes: name within the group, group, class."""
        for name in _STACKS:
            for path, kind in (node.meta.get(name) or {}).values():
                yield *self._stack.split(path), kind

    def _item(self, node: Node) -> Item:
        refs: list[int] = []

        def read(source: Node) -> str:
            refs.append(self.places[source])
            return "%"

        args, groups = arguments(node), list[int]()
        said: list[Hashable] = []
        index = self._read.get(node)
        if (place := _INDEX.get(node.target)) is not None:
            index, args = args[place], (*args[:place], *args[place + 1 :])
        if index is not None:
            names, of = self._params[index]
            said.append(names)
            groups += of
        target = "" if node.op == "placeholder" else node.target
        said.append(repr(torch.fx.node.map_arg((args, node.kwargs), read)))
        for path, group, kind in self._modules(node):
            said.append((path, kind))
            groups += () if group is None else (group,)
        said += [(name, repr(value)) for name, value in sorted(node.meta.items()) if name not in _NOT_COMPARED]
        for value in _tensors(node):
            owner, part = self.owners[_storage(value)]
            said.append((_form(value), part))
            if owner is not node:
                refs.append(self.places[owner])
        if not all(isinstance(value, Tensor) for value in _values(node)):
            said.append(repr(_values(node)))
        return Item((node.op, target, *said), tuple(groups), tuple(refs))


class _Writing:
    """Writes the nodes of a lengthened line, each with a traced value of its own."""

    def __init__(self, reading: _Reading, stack: Stack, params: tuple[Param, ...], copies: Sequence[Copy]) -> None:
        self._reading, self._stack, self._copies = reading, stack, copies
        self._params = {param.names: param for param in params}
        self._graph = Graph()
        self._nodes: list[Node] = []
        counts = Counter(copy.item for copy in copies)
        self._repeated = {node for place, node in enumerate(reading.nodes) if counts[place] > 1}
        self._kept: set[Node] = set()  # new nodes with the traced value of an old one
        self._names: dict[tuple[str, int], str] = {}
        self._numbers: Counter[str] = Counter()
        mode = _torch.detect_fake_mode([value for node in reading.nodes for value in _tensors(node)])
        assert mode is not None
        self._mode = mode

    def graph(self) -> Graph:
        """Return the graph."""
        count = len(self._reading.nodes)
        results, places = list[Any](), list[int]()
        for copy in self._copies:
            if copy.item < count:
                self._nodes.append(self._node(copy))
            else:
                results.append(self._nodes[copy.refs[0]] if copy.refs else None)
                places.append(copy.item - count)
        source = output_of(self._reading.program.graph)
        output = self._graph.output(tuple(results) if isinstance(source.args[0], tuple) else results)
        output.meta = dict(source.meta)
        if "desc" in source.meta:
            output.meta["desc"] = [source.meta["desc"][place] for place in places]
        return self._graph

    def _node(self, copy: Copy) -> Node:
        source = self._reading.nodes[copy.item]
        refs = iter(copy.refs)
        args, kwargs = torch.fx.node.map_arg((source.args, source.kwargs), lambda _: self._nodes[next(refs)])
        target, name = source.target, None
        if source.op == "placeholder":
            target = name = self._numbered(str(target))
        elif (place := _INDEX.get(target)) is not None:
            args = (*args[:place], self._shifted_index(args[place], copy.shift), *args[place + 1 :])
        node = self._graph.create_node(source.op, target, args, kwargs, name)
        node.meta = {**source.meta, **self._moved(source, copy.shift)}
        values = [self._value(source, node, value, refs) for value in _values(source)]
        if "val" in source.meta:
            node.meta["val"] = values[0] if not isinstance(source.meta["val"], list | tuple) else type(source.meta["val"])(values)
        return node

    def _numbered(self, name: str) -> str:
        """Number a placeholder anew: what it is called says what it is."""
        stem = name.rstrip("0123456789")
        if stem == name:
            return name
        self._numbers[stem] += 1
        return f"{stem}{self._numbers[stem]}"

    def _shifted_index(self, index: int, shift: int) -> int:
        """Return the index of a parameter of a layer further on."""
        param = self._reading.program.params[index]
        found = self._params.get(tuple(self._shifted(name, shift) for name in param.names))
        if found is None or replace(found, index=index, names=param.names) != param:
            raise Irregular(f"no layer has a parameter like {param.name} {shift} layers further on")
        return found.index

    def _shifted(self, name: str, shift: int) -> str:
        if (name, shift) not in self._names:
            self._names[name, shift] = self._stack.shifted(name, shift)
        return self._names[name, shift]

    def _moved(self, source: Node, shift: int) -> dict[str, Any]:
        """Return what the metadata of a node says of its layer, for a layer further on."""
        if not shift:
            return {}
        moved: dict[str, Any] = {}
        for name in _STACKS:
            if source.meta.get(name):
                stack = source.meta[name].items()
                moved[name] = {key: (self._shifted(path, shift), kind) for key, (path, kind) in stack}
        if "ac_graph_id" in source.meta:
            moved["ac_graph_id"] = source.meta["ac_graph_id"] + shift * self._reading.regions
        return moved

    def _value(self, source: Node, node: Node, value: Any, refs: Iterator[int]) -> Any:
        """Return a traced value like another, in a storage of its own, or in that of the value which the other is a view of."""
        if not isinstance(value, Tensor):
            return value
        owner, part = self._reading.owners[_storage(value)]
        base = None if owner is source else self._nodes[next(refs)]
        if source not in self._repeated and (base is None or base in self._kept):
            self._kept.add(node)
            return value
        with self._mode, torch.no_grad():
            if base is None:
                return _like(value)
            return _view_like(value, _tensors(base)[part])


def _like(value: Tensor) -> Tensor:
    """Make a value with a storage of the same size."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if made.untyped_storage().nbytes() == value.untyped_storage().nbytes() and not value.storage_offset():
        return made
    return _view_like(value, torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8, device=value.device))


def _view_like(value: Tensor, base: Tensor) -> Tensor:
    """Make a value in the storage of another."""
    if base.dtype is value.dtype:
        return base.as_strided(value.shape, value.stride(), value.storage_offset())
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    return empty.set_(base.untyped_storage(), value.storage_offset(), value.shape, value.stride())


def _owners(nodes: Iterable[Node]) -> dict[int, tuple[Node, int]]:
    """Return the node, and which of its values, that made each storage."""
    owners: dict[int, tuple[Node, int]] = {}
    for node in nodes:
        for part, value in enumerate(_tensors(node)):
            owners.setdefault(_storage(value), (node, part))
    return owners


def _values(node: Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, list | tuple) else [value]


def _tensors(node: Node) -> list[Tensor]:
    return [value for value in _values(node) if isinstance(value, Tensor)]


def _storage(value: Tensor) -> int:
    identity: int = value.untyped_storage()._cdata
    return identity


def _form(value: Tensor) -> tuple[Hashable, ...]:
    size = value.untyped_storage().nbytes()
    return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device, size
