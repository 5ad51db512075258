"""What a model runs in a forward and its backward, op by op, on fake tensors and without a compiler."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zerofx import _torch
from zerofx.periods import Item, Line
from zerofx.stacks import Stack, split_names


def log(model: nn.Module, stack: Stack, call: Callable[[], Any]) -> Line:
    """Run a call of a model on fake tensors, and the backward of all that it gives; return the ops with where their inputs come from.

    Raises Irregular where layers of the stack share parameters or buffers, and what the model raises.
    """
    mode = _Log(_named(model, stack))
    with mode:
        outputs = [value for value in _torch.tree_leaves(call()) if isinstance(value, Tensor)]
        forward, inputs = len(mode.ops), list(mode.inputs)
        last = [value for value in outputs if value.requires_grad]
        wanted = [tensor for tensor in inputs if tensor.requires_grad and tensor.is_leaf]
        found = iter(torch.autograd.grad(last, wanted, [torch.ones_like(value) for value in last], allow_unused=True) if last else ())
        grads = [next(found, None) if tensor.requires_grad and tensor.is_leaf else None for tensor in inputs] if last else []
    return mode.line(forward, outputs, grads)


def _named(model: nn.Module, stack: Stack) -> dict[int, tuple[Hashable, tuple[int, ...]]]:
    """Return the names and the group of each parameter and buffer, by its identity."""
    names: dict[int, list[str]] = {}
    for source in (model.named_parameters, model.named_buffers):
        for name, tensor in source(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return {tensor: split_names(stack, found) for tensor, found in names.items()}


class _Log(TorchDispatchMode):
    """Writes down ops. A tensor is the result of the op that gave it last, else of the one that last wrote its storage, else an input."""

    def __init__(self, named: dict[int, tuple[Hashable, tuple[int, ...]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._named = named
        self._kept: list[Tensor] = []  # an id stays valid only while its tensor lives
        self._places: dict[int, int] = {}  # of ops; inputs count down from -1
        self._storages: dict[int, int] = {}
        self.inputs: list[Tensor] = []
        self.ops: list[Item] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        values = [value for value in (result if isinstance(result, list | tuple) else [result]) if isinstance(value, Tensor)]
        if not values and not func._schema.is_mutable:
            return result  # a question about a tensor, such as its device
        refs: list[int] = []

        def read(part: Any) -> Any:
            if not isinstance(part, Tensor):
                return part
            refs.append(self._place(part))
            return "%"

        said = torch.fx.node.map_aggregate((args, kwargs or {}), read)
        key = (func, repr(said), tuple(map(_form, values)), torch.is_grad_enabled())
        for value in values:
            self._made(value, len(self.ops))
        self.ops.append(Item(key, (), tuple(refs)))
        return result

    def line(self, forward: int, outputs: list[Tensor], grads: list[Tensor | None]) -> Line:
        """Put inputs, ops and results in one line."""
        places = [None if value is None else self._place(value) for value in (*outputs, *grads)]
        count, items = len(self.inputs), list(self._inputs())
        items += [Item(op.key, op.groups, tuple(count + ref if ref >= 0 else -1 - ref for ref in op.refs)) for op in self.ops]
        items += [Item("result", (), () if place is None else (count + place if place >= 0 else -1 - place,)) for place in places]
        return Line(items, count, forward, len(self.ops) - forward, len(outputs))

    def _inputs(self) -> Iterator[Item]:
        for tensor in self.inputs:
            names, groups = self._named.get(id(tensor), ((), ()))
            yield Item((names, *_form(tensor), tensor.requires_grad), groups)

    def _place(self, tensor: Tensor) -> int:
        place = self._places.get(id(tensor))
        if place is None:
            place = self._storages.get(tensor.untyped_storage()._cdata)
        if place is None:
            self.inputs.append(tensor)
            place = -len(self.inputs)
            self._made(tensor, place)
        return place

    def _made(self, tensor: Tensor, place: int) -> None:
        self._kept.append(tensor)
        self._places[id(tensor)] = self._storages[tensor.untyped_storage()._cdata] = place


def _form(value: Tensor) -> tuple[Hashable, ...]:
    return tuple(value.shape), value.stride(), value.dtype, value.device
