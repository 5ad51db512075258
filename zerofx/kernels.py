"""Which nodes of a compute region run as one kernel, and what each kernel computes and moves. Pure; no hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from zerofx.program import is_view
from zerofx.work import bytes_of, flops, functions, is_free, keeps_rows, kind_of, packet, read_bytes, run_share, tensor_bytes, tensors

aten = torch.ops.aten

# What Inductor computes within a loop, beside the ops tagged as pointwise, as reductions or as copies of views.
_FUSED_TAGS = frozenset({torch.Tag.pointwise, torch.Tag.reduction, torch.Tag.view_copy})
_FUSED = frozenset(
    getattr(aten, name)
    for name in (
        "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "_to_copy", "_unsafe_index",
        "_unsafe_masked_index", "arange", "as_strided_scatter", "cat", "constant_pad_nd", "copy", "copy_", "embedding", "fill_", "flip",
        "full", "full_like", "gather", "index", "index_select", "logsumexp", "native_dropout", "native_layer_norm",
        "native_layer_norm_backward", "ones", "ones_like", "repeat", "scalar_tensor", "select_scatter", "slice_scatter", "zeros",
        "zeros_like",
    )
) | {torch.ops.prims.iota}  # fmt: skip
# glibc takes an allocation from this size from the system each time, which hands out pages as they are first written to
# (DEFAULT_MMAP_THRESHOLD_MAX on 64 bits).
FRESH_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Kernel:
    """Nodes that run as one: flops by torch's registry and how many of them run (causal attention skips some), and bytes that move.

    ``kind`` and ``dtype`` choose the rate of the flops; ``elements`` are (function, count); ``fresh_bytes`` are those of results
    on a CPU of at least ``FRESH_BYTES`` each.
    """

    nodes: tuple[Node, ...]
    kind: str
    dtype: torch.dtype
    flops: int
    run_flops: float
    moved_bytes: int
    elements: tuple[tuple[str, int], ...]
    fresh_bytes: int


def kernels(nodes: Sequence[Node]) -> list[Kernel]:
    """Return the kernels of consecutive nodes, in the order of their last nodes, but each before those that read it.

    Nodes that compute nothing are in none.

    A kernel is one op that Inductor does not write itself, such as a matrix product, or a chain that it fuses. Two nodes are in
    one chain where one reads the other row by row. A value is computed as late as all that read it allow; a sum over columns
    is in a chain with what nothing else reads.
    """
    return _Region(nodes).kernels()


def is_constant(node: Node) -> bool:
    """Whether a node's values follow from numbers alone, or it is a view of such: a compiler makes them where they are read."""
    sources = [source for source in node.all_input_nodes if next(tensors(source), None) is not None]
    if is_view(node):
        return all(is_constant(source) for source in sources)
    return not sources and _is_fused(node)


def _is_fused(node: Node) -> bool:
    return packet(node) in _FUSED or not _FUSED_TAGS.isdisjoint(getattr(node.target, "tags", ()))


class _Region:
    """Nodes by level: what a level reads was made by lower levels, or by the same chain."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._level: dict[Node, int] = {}
        self._base: dict[Node, Node] = {}  # what a view is of
        self._free: set[Node] = set()
        self._inlined: set[Node] = set()  # constants, made where they are read
        self._alone: set[Node] = set()
        self._whole: set[Node] = set()  # what no chain can go on from
        self._above: dict[Node, Node] = {}
        fused: dict[Any, bool] = {}
        for node in nodes:
            if node.op != "output":  # what it returns leaves the region
                self._enter(node, fused)
        self._place_late()
        for node in self._level:
            if node not in self._alone and node not in self._free:
                self._join(node)

    def _place_late(self) -> None:
        """Raise levels to those of what reads: a result of the region, or what leads to one only, sets no time, and follows its sources."""
        last: set[Node] = set()
        for node in reversed(self._level):
            readers = [user for user in node.users if user in self._level]
            if all(user in last for user in readers) and (readers or node in self._alone):
                last.add(node)
            elif readers and node not in self._whole and len(readers) == len(node.users):
                self._level[node] = max(self._level[node], min(self._level[user] for user in readers if user not in last))
        for node in self._level:
            if node in last:
                self._level[node] = self._least_level(node)

    def _least_level(self, node: Node) -> int:
        sources = [source for source in node.all_input_nodes if source in self._level]
        return max((self._level[source] + (source in self._whole) for source in sources), default=0)

    def _enter(self, node: Node, fused: dict[Any, bool]) -> None:
        sources = node.all_input_nodes
        self._level[node] = self._least_level(node)
        self._base[node] = node
        if is_free(node):
            self._free.add(node)
            if sources and next(tensors(node), None) is not None:
                self._base[node] = self._base.get(sources[0], sources[0])
            return
        if node.target not in fused:
            fused[node.target] = _is_fused(node)
        if not fused[node.target]:
            self._alone.add(node)
            self._whole.add(node)
        elif is_constant(node):
            self._free.add(node)
            self._inlined.add(node)
        elif not keeps_rows(node):
            self._whole.add(node)

    def _join(self, node: Node) -> None:
        for source in node.all_input_nodes:
            base = self._base.get(source, source)
            if not self._computes(base) or base in self._whole or self._level[base] != self._level[node]:
                continue
            # a sum over columns is a loop of its own, that reads again what others read too
            if node not in self._whole or len(base.users) == len(source.users) == 1:
                self._above[self._root(base)] = self._root(node)

    def _computes(self, node: Node) -> bool:
        return node in self._level and node not in self._free

    def _root(self, node: Node) -> Node:
        """Return the node that stands for a node's chain."""
        while (above := self._above.get(node, node)) is not node:
            self._above[node] = self._above.get(above, above)
            node = above
        return node

    def kernels(self) -> list[Kernel]:
        """Return the kernels."""
        members: dict[Node, list[Node]] = {}
        reads: dict[Node, Counter[Node]] = {}
        written: set[Node] = set()
        for node in self._level:
            if any(user not in self._level for user in node.users):
                written.add(self._base[node])
            if node in self._free:
                continue
            root = self._root(node)
            members.setdefault(root, []).append(node)
            into = reads.setdefault(root, Counter())
            for source in node.all_input_nodes:
                base = self._base.get(source, source)
                if base in self._inlined or (self._computes(base) and self._root(base) is root):
                    continue
                written.add(base)
                # a view may show more than there is (expanded) or less (sliced)
                into[base] = max(into[base], min(read_bytes(node, source), bytes_of(base) or bytes_of(source)))
        return [
            _kernel(tuple(members[root]), reads[root].total(), [node for node in members[root] if node in written])
            for root in self._ordered(members, reads)
        ]

    def _ordered(self, members: dict[Node, list[Node]], reads: dict[Node, Counter[Node]]) -> list[Node]:
        """Return the roots of the chains: a chain may end behind what reads its first results."""
        place = {node: place for place, node in enumerate(self._level)}
        left = sorted(members, key=lambda root: place[members[root][-1]], reverse=True)
        found: dict[Node, None] = {}
        while left:
            root = left[-1]
            before = [self._root(base) for base in reads[root] if self._computes(base)] if root not in found else []
            missing = [other for other in dict.fromkeys(before) if other not in found and other is not root]
            if missing:
                left.extend(missing)
            else:
                found[left.pop()] = None
        return list(found)


def _kernel(nodes: tuple[Node, ...], read: int, written: list[Node]) -> Kernel:
    first = nodes[0]
    count = flops(first) if len(nodes) == 1 else 0
    elements: Counter[str] = Counter()
    for node in nodes:
        for name, number in functions(node):
            elements[name] += number
    results = [(value.device.type, tensor_bytes(value)) for node in written for value in tensors(node)]
    return Kernel(
        nodes,
        kind=kind_of(first) if count else "fused",
        dtype=next(tensors(first)).dtype,
        flops=count,
        run_flops=count * run_share(first),
        moved_bytes=read + sum(size for _, size in results),
        elements=tuple(elements.items()),
        fresh_bytes=sum(size for device, size in results if device == "cpu" and size >= FRESH_BYTES),
    )
