"""Run a lowered graph: a list of steps over slots, where each value leaves its slot at its last use.

A step that is handed the last reference to a tensor can free it while it runs; the code that FX generates cannot,
because the caller's frame still holds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from zerofx import ops
from zerofx._torch import below_autograd
from zerofx.program import output_of

Run = Callable[[list[Any]], None]
_WAITS = (torch.ops._c10d_functional.wait_tensor.default, ops.refresh_wait, ops.load, ops.spill_wait)


@dataclass(frozen=True, slots=True)
class Region:
    """Consecutive compute nodes as one callable that takes a list of inputs and returns a sequence of outputs."""

    call: Callable[[list[Any]], Sequence[Any]]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


class Tape:
    """A callable made of steps. Takes a list of inputs and empties it; returns the list of outputs.

    ``waited_s`` is what all its runs so far have spent waiting for communication.
    """

    _boxed_call = True

    def __init__(self, module: GraphModule, order: Sequence[Node | Region]) -> None:
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.waited_s = 0.0
        self._slots: dict[Node, int] = {}
        for node in placeholders:
            self._slot(node)
        result = output_of(module.graph).args[0]
        last: dict[Node, int] = {}
        for place, item in enumerate(order):
            for node in _reads(item):
                last[node] = place
        kept = set(output_of(module.graph).all_input_nodes)
        self._steps: list[Run] = []
        for place, item in enumerate(order):
            ending = [node for node in dict.fromkeys(_reads(item)) if last[node] == place and node not in kept]
            self._steps.append(self._step(module, item, tuple(self._slot(node) for node in ending)))
            unread = [node for node in _writes(item) if node not in last and node not in kept]
            if unread:
                self._steps.append(_clear(tuple(self._slot(node) for node in unread)))
        self._result = self._template(result)
        self._unused = tuple(self._slot(node) for node in placeholders if node not in last and node not in kept)
        self._size = len(self._slots)
        self._inputs = len(placeholders)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        slots = [*inputs, *[None] * (self._size - self._inputs)]
        inputs.clear()
        for slot in self._unused:
            slots[slot] = None
        # nothing here is recorded by autograd, and its dispatch costs 75 us for each collective
        with below_autograd():
            for step in self._steps:
                step(slots)
        results: list[Any] = self._result(slots)
        return results

    def _slot(self, node: Node) -> int:
        return self._slots.setdefault(node, len(self._slots))

    def _step(self, module: GraphModule, item: Node | Region, ending: tuple[int, ...]) -> Run:
        if isinstance(item, Region):
            inputs = tuple(self._slot(node) for node in item.inputs)
            return _region_step(item.call, inputs, ending, tuple(self._slot(node) for node in item.outputs))
        out = self._slot(item)
        if item.op == "get_attr":
            return _constant_step(_attribute(module, str(item.target)), out)
        assert item.op == "call_function", item.format_node()
        step = _call_step(item.target, self._template(item.args), self._template(item.kwargs) if item.kwargs else None, ending, out)
        return self._timed(step) if item.target in _WAITS else step

    def _timed(self, step: Run) -> Run:
        def run(slots: list[Any]) -> None:
            start = time.perf_counter()
            step(slots)
            self.waited_s += time.perf_counter() - start

        return run

    def _template(self, value: Any) -> Callable[[list[Any]], Any]:
        """Return a function from slots to the value with its nodes filled in."""
        if isinstance(value, Node):
            slot = self._slot(value)
            return lambda slots: slots[slot]
        if isinstance(value, list | tuple):
            if not any(isinstance(part, Node | list | tuple | dict | slice) for part in value):
                return lambda slots: value
            parts = [self._template(part) for part in value]
            make = list if isinstance(value, list) else tuple
            return lambda slots: make([part(slots) for part in parts])
        if isinstance(value, dict):
            items = {key: self._template(part) for key, part in value.items()}
            return lambda slots: {key: part(slots) for key, part in items.items()}
        if isinstance(value, slice):
            edges = [self._template(edge) for edge in (value.start, value.stop, value.step)]
            return lambda slots: slice(*[edge(slots) for edge in edges])
        return lambda slots: value


def _reads(item: Node | Region) -> Sequence[Node]:
    return item.inputs if isinstance(item, Region) else item.all_input_nodes


def _writes(item: Node | Region) -> Sequence[Node]:
    return item.outputs if isinstance(item, Region) else (item,)


def _region_step(
    call: Callable[[list[Any]], Sequence[Any]], inputs: tuple[int, ...], ending: tuple[int, ...], outputs: tuple[int, ...]
) -> Run:
    def run(slots: list[Any]) -> None:
        values = [slots[slot] for slot in inputs]
        for slot in ending:
            slots[slot] = None
        for slot, value in zip(outputs, call(values), strict=True):
            slots[slot] = value

    return run


def _call_step(
    target: Any, args: Callable[[list[Any]], Any], kwargs: Callable[[list[Any]], Any] | None, ending: tuple[int, ...], out: int
) -> Run:
    def run(slots: list[Any]) -> None:
        values = args(slots)
        named = {} if kwargs is None else kwargs(slots)
        for slot in ending:
            slots[slot] = None
        slots[out] = target(*values, **named)

    return run


def _constant_step(value: Any, out: int) -> Run:
    def run(slots: list[Any]) -> None:
        slots[out] = value

    return run


def _clear(dead: tuple[int, ...]) -> Run:
    def run(slots: list[Any]) -> None:
        for slot in dead:
            slots[slot] = None

    return run


def _attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module
