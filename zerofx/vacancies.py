"""Which tensors of a model have no values yet: those on the meta device, and those that were only given memory since."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerofx import _torch
from zerofx.errors import ShardingError


class Vacancies:
    """Knows the tensors without values of a model that was compiled on the meta device, until the last of them has some."""

    def __init__(self, modules: tuple[tuple[str, nn.Module], ...], *, is_open: bool) -> None:
        self._modules, self.is_open = modules, is_open
        self._given: dict[tuple[nn.Module, str], tuple[Tensor, int]] = {}

    @contextmanager
    def watching(self, root: nn.Module) -> Iterator[None]:
        """Note the tensors without values that are given memory within, as by ``to_empty``."""
        before = [(module, name) for module in root.modules() for name, _ in self._vacant(module)] if self.is_open else []
        yield
        for module, name in before:
            tensor = dict(_own(module)).get(name)
            if tensor is not None and not tensor.is_meta:
                self._given[module, name] = tensor, _version(tensor)

    def check(self) -> None:
        """Raise ShardingError where a tensor has no values."""
        if not self.is_open:
            return
        names = [".".join(filter(None, (path, name))) for path, module in self._modules for name, _ in self._vacant(module)]
        if names:
            raise ShardingError(
                f"{names[0]} never got values" + (f" (and {len(names) - 1} more)" if len(names) > 1 else ""),
                where=f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}, at the start of a forward",
                why="the model was compiled on the meta device; a state dict has no buffers that are not persistent",
                remedy="call load_state_dict, or the modules' own initialisation inside zerofx.init(model), and assign such buffers anew",
            )
        self.is_open = False
        self._given.clear()

    def _vacant(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in _own(module):
            given = self._given.get((module, name))
            if tensor.is_meta or (given is not None and given[0] is tensor and given[1] == _version(tensor)):
                yield name, tensor


def give_memory(module: nn.Module, device_type: str, *, recurse: bool) -> None:
    """Move the tensors of a module off the meta device, without values; others stay as they are."""
    if any(tensor.is_meta for inner in (module.modules() if recurse else (module,)) for _, tensor in _own(inner)):
        module._apply(lambda tensor: torch.empty_like(tensor, device=device_type) if tensor.is_meta else tensor, recurse)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters and buffers."""
    members = itertools.chain(module._parameters.items(), module._buffers.items())
    yield from ((name, tensor) for name, tensor in members if tensor is not None)


def _version(tensor: Tensor) -> int:
    return tensor._version + (_torch.local_tensor(tensor)._version if isinstance(tensor, DTensor) else 0)
