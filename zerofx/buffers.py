"""Buffers of a module that computes twice: the second time it finds what the first one found, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from zerofx import _torch
from zerofx.errors import ZerofxError


class Buffers:
    """What the buffers of a module and of all within it are when it begins to compute, and after that what it found in them.

    What it changed is held as a copy. Of all else, which may be large, the tensor itself is held: another may take its place later.
    """

    def __init__(self, module: nn.Module, where: str) -> None:
        named = [(part, path, name) for path, part in module.named_modules(prefix=where) for name in part._buffers]
        self._places = [place for place in named if place[0]._buffers[place[2]] is not None]
        self._found: list[_Found] = []
        self._before = [_value(part, name).detach().clone() for part, _, name in self._places]

    def hold(self) -> None:
        """Hold what the module has found in its buffers, the first time that it has computed."""
        if self._before:
            # batch norms count no version of the statistics that they change
            pairs = [(part._buffers.get(name), value) for (part, _, name), value in zip(self._places, self._before, strict=True)]
            self._found = [_Found(now, _version(now)) if _is(now, value) else _Found(value) for now, value in pairs]
            self._before = []

    @contextmanager
    def as_found(self) -> Iterator[None]:
        """Within, what is held stands in the places of the buffers; nothing does before the module has computed once.

        Raises ZerofxError where a buffer that the module did not change has been changed in place since.
        """
        if not self._found:
            yield
            return
        now = [part._buffers.get(name) for part, _, name in self._places]
        try:
            with _torch.outside_checkpoints():
                for (part, path, name), found in zip(self._places, self._found, strict=True):
                    if found.version is not None and _version(found.value) != found.version:
                        raise _changed_error(f"{path}.{name}")
                    # a backward may run twice
                    part._buffers[name] = found.value.clone() if found.version is None else found.value
            yield
        finally:
            for (part, _, name), buffer in zip(self._places, now, strict=True):
                part._buffers[name] = buffer


class _Found(NamedTuple):
    """A buffer that a module found: a copy, or the tensor itself and its version."""

    value: Tensor
    version: int | None = None


def _value(part: nn.Module, name: str) -> Tensor:
    value = part._buffers[name]
    assert value is not None
    return value


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


def _is(buffer: Tensor | None, value: Tensor) -> TypeGuard[Tensor]:
    return buffer is not None and buffer.dtype is value.dtype and torch.equal(buffer, value)


def _changed_error(name: str) -> ZerofxError:
    return ZerofxError(
        f"{name} was changed in place between a forward and its backward",
        where=f'{name}, in a backward with backend="hooks"',
        why="recompute computes its module again, which would read another value than the forward did",
        remedy="assign a new tensor to the buffer, change it after the backward, or do not recompute this module",
    )
