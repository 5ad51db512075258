"""Buffers of a module that computes twice: the second time it finds what the first one found, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class Buffers:
    """What the buffers of a module and of all within it are when it begins to compute."""

    def __init__(self, module: nn.Module) -> None:
        named = [(part, name, buffer) for part in module.modules() for name, buffer in part._buffers.items() if buffer is not None]
        self._found = [(part, name, buffer, buffer._version, buffer.detach().clone()) for part, name, buffer in named]
        self._held: list[tuple[nn.Module, str, Tensor]] = []
        self._is_held = False

    def hold(self) -> None:
        """Of what the module has changed by computing, hold the values that it found; let go of all else."""
        if self._is_held:
            return
        changed = [item for item in self._found if item[2]._version != item[3] or item[0]._buffers.get(item[1]) is not item[2]]
        self._held, self._found, self._is_held = [(part, name, value) for part, name, _, _, value in changed], [], True

    @contextmanager
    def as_found(self) -> Iterator[None]:
        """Within, what is held stands in the places of the buffers."""
        now = [(part, name, part._buffers[name]) for part, name, _ in self._held]
        try:
            for part, name, value in self._held:
                part._buffers[name] = value.clone()  # a backward may run twice
            yield
        finally:
            for part, name, buffer in now:
                part._buffers[name] = buffer
