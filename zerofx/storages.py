"""Parameters under construction: each has its whole memory only while something works on it, and else this rank's shard.

A closed parameter is an ordinary one whose storage has no bytes. So all views and aliases of it stay what they are, and work again
once the storage is open.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.device_mesh import DeviceMesh

from zerofx import _torch, layout
from zerofx.errors import OffloadError
from zerofx.groups import Group
from zerofx.heap import Heap
from zerofx.mapped import GrowingFiles, MappedTensors
from zerofx.offload import Offload
from zerofx.params import Param, choose_dim


@dataclass(slots=True)
class Held:
    """What stands for a parameter's values while its storage is closed."""

    param: Param
    name: str
    shard: Tensor | None = None  # None before the parameter was first closed
    checksum: int = 0
    is_pinned: bool = False  # its address was handed out, so it stays open


class Storages:
    """Opens and closes the storages of parameters; all ranks do so in the same order, because they run the same code."""

    def __init__(self, mesh: DeviceMesh, group: Group, offload: Offload | None = None) -> None:
        self._mesh, self._group = mesh, group
        self.mapped = MappedTensors()
        directory = None if offload is None or offload.parameters is None else offload.directory("parameters")
        self._directory, self._files = directory, None if directory is None else GrowingFiles(directory)
        self._least_bytes = 0 if offload is None else offload.min_bytes
        self._held: weakref.WeakKeyDictionary[UntypedStorage, Held] = weakref.WeakKeyDictionary()
        self._open: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()
        self._heap = Heap()
        if self._files is not None:
            self._heap.keep_large_out()

    def add(self, tensor: Tensor) -> None:
        """Take charge of a parameter, open, and close the one before; one that cannot be cut, or shares its storage, is left whole."""
        if not _is_plain(tensor) or tensor.device.type != self._mesh.device_type or not self._can_close(tensor):
            return
        storage = tensor.untyped_storage()
        if storage in self._held:
            return
        self.use((), gather=False)
        self._held[storage] = Held(self.param_of(tensor), _unnamed(tensor))
        self._open.add(storage)

    def stand_in(self, shard: Tensor, param: Param, *, requires_grad: bool) -> nn.Parameter:
        """Return a closed whole parameter for a shard, which is what it will be written to."""
        whole = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device=shard.device), requires_grad)
        storage = whole.untyped_storage()
        storage.resize_(0)
        self._held[storage] = Held(param, _unnamed(whole), shard)
        return whole

    def find(self, tensor: Tensor) -> UntypedStorage | None:
        """Return the storage that a tensor lies in, if it is one of these."""
        if not _is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        return storage if storage in self._held else None

    def is_all(self, tensor: Tensor) -> bool:
        """Whether a tensor is all of one of these storages."""
        held = self._held.get(tensor.untyped_storage())
        return held is not None and tensor.is_contiguous() and tensor.numel() * tensor.element_size() == _bytes(held.param)

    def use(self, storages: Collection[UntypedStorage], *, gather: bool) -> None:
        """Open these and close all others; ``gather`` their values, or leave them to be written."""
        for storage in list(self._open):
            if storage not in storages and not self._held[storage].is_pinned:
                self.close(storage)
        for storage in storages:
            if storage not in self._open:
                self._open_one(storage, gather=gather)

    def pin(self, storage: UntypedStorage) -> None:
        """Open a storage for good."""
        self.use([storage], gather=True)
        self._held[storage].is_pinned = True

    def close(self, storage: UntypedStorage) -> None:
        """Keep the shard of an open storage, and free the rest unless it is pinned."""
        held = self._held[storage]
        if storage.nbytes() != _bytes(held.param):  # resized by its owner: no longer the parameter that was cut
            self.forget(storage)
            return
        whole = self._whole(storage)
        held.checksum = checksum(whole)
        cut = layout.cut(whole, held.param, self._group)
        if held.shard is None:
            held.shard = self._kept(cut, held.name)
        elif held.shard in self.mapped:
            with self._writing(held.name):
                self.mapped.write(held.shard, cut)
        else:
            held.shard.copy_(cut)
            torch.autograd.graph.increment_version(held.shard)  # inside of a mode nothing counts
        if not held.is_pinned:
            storage.resize_(0)
            self._open.discard(storage)
            self._heap.freed(_bytes(held.param))

    def _kept(self, cut: Tensor, name: str) -> Tensor:
        if self._files is None or cut.nbytes < self._least_bytes:
            return cut.clone(memory_format=torch.contiguous_format)
        with self._writing(name):
            return self.mapped.put(cut, self._files.region(cut.nbytes))

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OffloadError(
                f"the shard of {name} cannot be written: {error.strerror}",
                where=f"{self._directory}, rank {self._group.rank}",
                why="parameters go to disk while the model is built, and it is not known before how many there will be",
                remedy="make space there, or name another directory: zerofx.init(offload={'parameters': 'disk:DIRECTORY'})",
            ) from error

    def forget(self, storage: UntypedStorage) -> None:
        """Leave an open storage to its owner."""
        del self._held[storage]
        self._open.discard(storage)

    def take(self, tensor: Tensor, name: str) -> Held | None:
        """Return what is held for a parameter, closed; None where it is whole and not in charge here.

        One that is no longer what was cut, such as a transposed one, is opened and left whole.
        """
        storage = self.find(tensor)
        if storage is None:
            return None
        held = self._held[storage]
        if tuple(tensor.shape) != held.param.shape or not self._can_close(tensor, _bytes(held.param)):
            self.use([storage], gather=True)
            self.forget(storage)
            return None
        held.name = name
        if storage in self._open:
            self.close(storage)
        return held

    def left(self) -> Iterator[tuple[UntypedStorage, Held]]:
        """Yield the closed storages that someone still has."""
        yield from ((storage, held) for storage, held in list(self._held.items()) if storage not in self._open)

    def _open_one(self, storage: UntypedStorage, *, gather: bool) -> None:
        held = self._held[storage]
        storage.resize_(_bytes(held.param))
        self._open.add(storage)
        if gather:
            assert held.shard is not None
            whole = layout.whole(layout.dtensor(held.shard, held.param, self._mesh), self._group)
            self._whole(storage).copy_(whole)
            self.mapped.evict([held.shard])

    def _whole(self, storage: UntypedStorage) -> Tensor:
        """Return a new tensor on a storage; its writes do not count in versions of the parameter."""
        param = self._held[storage].param
        whole: Tensor = torch.empty(0, dtype=param.dtype, device=storage.device).set_(storage)
        return whole.view(param.shape)

    def _can_close(self, tensor: Tensor, nbytes: int | None = None) -> bool:
        """Whether a parameter is its storage, as it lies there, and has a dimension to cut."""
        storage = tensor.untyped_storage()
        expected = storage.nbytes() if nbytes is None else nbytes
        fills = tensor.is_contiguous() and tensor.storage_offset() == 0 and tensor.numel() * tensor.element_size() == expected
        return fills and storage.resizable() and choose_dim(tuple(tensor.shape), self._group.size) is not None

    def param_of(self, tensor: Tensor) -> Param:
        """Return how a whole parameter is cut, without a place in a model's table."""
        shape = tuple(tensor.shape)
        return Param(0, (), shape, tensor.dtype, tensor.dtype, self._group.size, choose_dim(shape, self._group.size))


def checksum(whole: Tensor) -> int:
    """Return a number that differs when values do, whatever their dtype: the sum of their memory, read as integers."""
    raw = whole.contiguous().view(-1).view(torch.uint8)
    raw = raw.clone() if raw.storage_offset() % 8 else raw  # a view of more memory, that begins where no integer may
    words = raw.numel() // 8 * 8
    return int(raw[:words].view(torch.int64).sum()) + int(raw[words:].sum())


def _unnamed(tensor: Tensor) -> str:
    return f"a parameter of shape {tuple(tensor.shape)}"


def _bytes(param: Param) -> int:
    return math.prod(param.shape) * param.dtype.itemsize


def _is_plain(tensor: Tensor) -> bool:
    is_ordinary = type(tensor) in (Tensor, nn.Parameter) and not _torch.is_transformed(tensor)
    return is_ordinary and tensor.layout is torch.strided and not tensor.is_meta
