"""Buffers of a module that computes twice: the second time it finds what the first one found, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zerofx import _torch


class Buffers:
    """What the buffers of a module and of all within it are when it begins to compute, and after that what it found in those it changed."""

    def __init__(self, module: nn.Module) -> None:
        named = [(part, name, buffer) for part in module.modules() for name, buffer in part._buffers.items() if buffer is not None]
        self._found = [(part, name, buffer.detach().clone()) for part, name, buffer in named]
        self._is_held = False

    def hold(self) -> None:
        """Hold what the module has changed by computing, as it found it; let go of all else."""
        if not self._is_held:
            # batch norms count no version of the statistics that they change
            self._found = [(part, name, value) for part, name, value in self._found if not _is(part._buffers.get(name), value)]
            self._is_held = True

    @contextmanager
    def as_found(self) -> Iterator[None]:
        """Within, what is held stands in the places of the buffers; nothing does before the module has computed once."""
        if not self._is_held:
            yield
            return
        now = [(part, name, part._buffers[name]) for part, name, _ in self._found]
        try:
            with _torch.outside_checkpoints():
                for part, name, value in self._found:
                    part._buffers[name] = value.clone()  # a backward may run twice
            yield
        finally:
            for part, name, buffer in now:
                part._buffers[name] = buffer


def _is(buffer: Tensor | None, value: Tensor) -> bool:
    return buffer is not None and buffer.dtype is value.dtype and torch.equal(buffer, value)
