"""Cut a lowered graph at its collectives and compile each distinct compute region between them once."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx import _torch, collectives, ops
from zerofx.program import Phase, Program, is_view
from zerofx.tape import Region, Tape

Compiled = Callable[[list[Any]], Sequence[Any]]


class Compiler:
    """Compiles the regions of one model; equal regions are compiled once."""

    def __init__(self) -> None:
        self._compiled: dict[str, Compiled] = {}
        self.region_count = 0

    @property
    def distinct_count(self) -> int:
        """How many different regions were compiled."""
        return len(self._compiled)

    def tape(self, program: Program) -> Tape:
        """Return a callable for a lowered program, by its backend: node by node, region by region, or as one graph."""
        order: list[Node | Region] = []
        for part in cut(program):
            order.extend([self._compile(program, part.nodes)] if part.is_compiled else part.nodes)
        return Tape(program.module, order)

    def _compile(self, program: Program, nodes: list[Node]) -> Region:
        module, inputs, outputs = extract(program, nodes)
        self.region_count += 1
        key = canonical(module)
        _torch.pin_order(module.graph, _pinned(module.graph))
        compiled = self._compiled.get(key) if key else None
        if compiled is None:
            compiled = _torch.inductor_compile(module, is_backward=program.phase is Phase.BACKWARD)
            self._compiled[key or f"unique {self.region_count}"] = compiled
        return Region(compiled, tuple(inputs), tuple(outputs))


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive nodes of a lowered program: one region for the compiler, or ops that run as they are."""

    nodes: list[Node]
    is_compiled: bool


def cut(program: Program) -> Iterator[Part]:
    """Yield the parts of a lowered program, in order."""
    nodes = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    if program.config.backend == "aot_eager":
        yield Part(nodes, is_compiled=False)
        return
    if program.config.whole_graph and not any(node.target in _STEPS for node in nodes):
        yield Part(nodes, is_compiled=True)
        return
    pending: list[Node] = []
    for node in [*nodes, None]:
        if node is not None and not is_boundary(node):
            pending.append(node)
            continue
        if pending:
            # one op alone has nothing to fuse with: its own kernel is as fast, and needs no compiler
            yield Part(pending, is_compiled=sum(not _is_cheap(item) for item in pending) > 1)
        pending = []
        if node is not None:
            yield Part([node], is_compiled=False)


_STORED = (ops.read_ahead, ops.load, ops.evict, ops.store)
_STASHED = (ops.check_replicas, ops.spill_write, ops.spill_start, ops.spill_wait)
_STEPS = (ops.refresh_wait, ops.add_pending, *_STORED, *_STASHED)


def is_boundary(node: Node) -> bool:
    """Whether a node runs between regions: a collective, the buffer that it fills, what empties that, a wait, or a step of the runtime.

    So does the packing of shards for a gather: one copy, that would make a region of its own of each compute that it stands behind.
    """
    if node.target in _STEPS or is_collective(node):
        return True
    mark = node.meta.get("zerofx")
    if mark is None:
        return False
    op = node.all_input_nodes[0].target if node.target is operator.getitem else node.target
    return op in collectives.AS_THEY_ARE or (mark.kind == "gather_start" and (node.target is torch.ops.aten.cat.default or is_view(node)))


def is_collective(node: Node) -> bool:
    """Whether a node is a collective or a wait."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "_c10d_functional"


def _is_cheap(node: Node) -> bool:
    """Whether a node launches nothing, or little: a view, an item, a constant, arithmetic on sizes, the division of a sum over ranks."""
    if node.op == "get_attr" or is_view(node):
        return True
    mark = node.meta.get("zerofx")
    if mark is not None and mark.kind == "reduce_wait" and node.target is torch.ops.aten.div.Tensor:
        return True
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def extract(program: Program, nodes: list[Node]) -> tuple[GraphModule, list[Node], list[Node]]:
    """Return a module of some consecutive nodes, with the nodes that it reads and those that others read from it."""
    inside = set(nodes)
    inputs = list(
        dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside and source.op != "get_attr")
    )
    inputs += _sizes(program, nodes, inputs)
    outputs = [node for node in nodes if node.op != "get_attr" and any(user not in inside for user in node.users)]
    graph, values, attributes = Graph(), dict[Node, Node](), dict[str, Any]()
    for place, node in enumerate(inputs):
        values[node] = graph.placeholder(f"arg{place}")
        values[node].meta = {"val": node.meta["val"]}

    def value_of(node: Node) -> Node:
        if node not in values:
            assert node.op == "get_attr"
            attributes[str(node.target)] = getattr(program.module, str(node.target))
            values[node] = graph.node_copy(node)
        return values[node]

    for node in nodes:
        if node.op != "get_attr":
            values[node] = graph.node_copy(node, value_of)
            values[node].meta.pop("zerofx", None)
    graph.output(tuple(values[node] for node in outputs))
    return GraphModule(attributes, graph), inputs, outputs


def _pinned(graph: Graph) -> dict[Node, Node]:
    """Return what must stay behind what: each collective behind the one before, and a sum behind a product that waits for its other term.

    Inductor would fuse such a product into the sum, and keep what it multiplies until then: a tied embedding's, the whole backward.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    pinned = {node: before for before, node in itertools.pairwise(node for node in graph.nodes if is_collective(node))}
    for node in order:
        if node.target is torch.ops.aten.add.Tensor and len(node.all_input_nodes) == 2:
            first = min(node.all_input_nodes, key=order.__getitem__)
            if first.target is torch.ops.aten.mm.default:
                pinned[node] = first
    return pinned


def _sizes(program: Program, nodes: list[Node], inputs: list[Node]) -> list[Node]:
    """Return the size inputs that a region needs beside its tensors, so that each symbol is bound."""
    symbols: set[Any] = set()
    for node in [*nodes, *inputs]:
        value = node.meta.get("val")
        for part in value if isinstance(value, list | tuple) else [value]:
            sizes = [*part.shape, *part.stride()] if isinstance(part, torch.Tensor) else [part]
            symbols |= {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}
    if not symbols:
        return []
    found = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and node.op == "placeholder" and node not in inputs and value.node.expr in symbols:
            found.append(node)
    return found


def canonical(module: GraphModule) -> str | None:
    """Return a text that is equal for regions with equal code and inputs; None where one holds constants of its own."""
    names: dict[Node, int] = {}
    lines = []
    for node in module.graph.nodes:
        if node.op == "get_attr":
            return None
        names[node] = len(names)
        args = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: f"%{names[source]}")
        value = node.meta.get("val")
        described = _describe(value) if node.op == "placeholder" else ""
        symbolic = isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)
        if symbolic or isinstance(value, torch.SymInt):
            return None  # a symbol belongs to one tracing; equal names may mean different ranges
        lines.append(f"{node.op} {node.target if node.op != 'placeholder' else ''} {args} {described}")
    return "\n".join(lines)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"
    return repr(value)
