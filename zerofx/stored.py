"""Shards of parameters and of gradients that lie in files between their uses."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor

from zerofx import _torch, memory
from zerofx.config import Config
from zerofx.disk import Disk
from zerofx.heap import Heap
from zerofx.mapped import MappedFile, Region, pages_bytes
from zerofx.params import Param

ATTRIBUTE = "_zerofx_mapped"  # of a parameter that zerofx.init has put into a file: who knows where


class Stored:
    """Moves one model's shards into files, loads them for what reads them, and takes reduced gradients.

    Of shards that are padded, ``padded`` has all of their memory.
    """

    def __init__(
        self,
        disk: Disk,
        config: Config,
        params: Sequence[Param],
        tensors: Sequence[nn.Parameter],
        padded: Sequence[Tensor | None],
    ) -> None:
        self._disk, self._params, self._tensors, self._padded = disk, params, tensors, padded
        self._shards = sorted(memory.stored_shards(params, config))
        self._gradients = memory.stored_gradients(params, config)
        self._places: dict[int, Region] = {}
        self._holders: dict[int, weakref.ref[UntypedStorage]] = {}
        self._heap = Heap()
        self._is_ready = False
        for tensor in tensors:
            if (other := vars(tensor).pop(ATTRIBUTE, None)) is not None:
                disk.tensors.adopt(_torch.local_tensor(tensor), other)

    def prepare(self) -> None:
        """Set space aside, and move what lies in memory, before the first forward; later, take out of memory what others have read.

        Raises OffloadError on all ranks, with nothing changed, where a disk has not the space.
        """
        if self._is_ready:
            self._disk.tensors.evict_all()
            return
        waiting = [index for index in self._shards if _torch.local_tensor(self._tensors[index]) not in self._disk.tensors]
        moved = sum(pages_bytes(_shard_bytes(self._params[index])) for index in waiting)
        trained = [index for index in sorted(self._gradients) if self._tensors[index].requires_grad]
        where = "the first forward, with offload"
        shards = self._disk.set_aside("parameters", moved, where) if self._shards else None  # what waits may differ between ranks
        kept = sum(pages_bytes(_shard_bytes(self._params[index])) for index in trained)
        gradients = self._disk.set_aside("gradients", kept, where) if kept else None
        with self._disk.failing():
            for index in waiting:
                assert shards is not None
                self._move(index, shards)
            for index in trained:
                assert gradients is not None
                nbytes = _shard_bytes(self._params[index])
                self._places[index] = Region.of(gradients, nbytes)
        self._is_ready = True

    def read_ahead(self, members: Iterable[int]) -> None:
        """Let the system read shards that will be loaded."""
        self._disk.tensors.read_ahead(self._locals(members))

    def load(self, members: Iterable[int]) -> None:
        """Make shards resident. Raises OffloadError where the disk fails."""
        with self._disk.failing():
            self._disk.tensors.load(self._locals(members), to_write=False)

    def evict(self, members: Iterable[int]) -> None:
        """Take shards out of memory."""
        self._disk.tensors.evict(self._locals(members))

    @contextmanager
    def resident(self, members: Sequence[int]) -> Iterator[None]:
        """Have shards in memory within."""
        self.load(members)
        try:
            yield
        finally:
            self.evict(members)

    def store(self, index: int, gradient: Tensor) -> Tensor | None:
        """Put a padded gradient shard into its place on the disk, and return it from there; None where it was added to the one there."""
        if index not in self._places and index not in self._gradients:
            return gradient
        with self._disk.failing():
            if (earlier := self._accumulated(index)) is not None:
                self._disk.tensors.load([earlier], to_write=True)
                param = self._params[index]
                earlier.add_(gradient if param.dim is None else gradient.narrow(param.dim, 0, earlier.shape[param.dim]))
                self._disk.tensors.evict([earlier])
                return None
            made = self._disk.tensors.put(gradient, self._free_place(index))
        self._holders[index] = weakref.ref(made.untyped_storage())
        return made

    def _accumulated(self, index: int) -> Tensor | None:
        """Return what earlier backwards left of a gradient, where it lies on the disk."""
        grad = self._tensors[index].grad
        if not isinstance(grad, DTensor) or grad.placements[0].is_partial():
            return None
        local = _torch.local_tensor(grad)
        return local if local in self._disk.tensors else None

    def _free_place(self, index: int) -> Region:
        """Return where the next gradient goes: where the last one was, unless somebody still has that."""
        holder = self._holders.get(index)
        if index in self._places and (holder is None or holder() is None):
            return self._places[index]
        nbytes = _shard_bytes(self._params[index])
        self._places[index] = Region.of(MappedFile(self._disk.settings.directory("gradients"), nbytes), nbytes)
        return self._places[index]

    def _move(self, index: int, file: MappedFile) -> None:
        local, padded = _torch.local_tensor(self._tensors[index]), self._padded[index]
        if padded is None:
            self._disk.tensors.move(local, file)
        else:
            self._disk.tensors.move(padded, file, [local])
        self._disk.tensors.evict([local])
        self._heap.freed(_shard_bytes(self._params[index]))

    def _locals(self, members: Iterable[int]) -> list[Tensor]:
        return [_torch.local_tensor(self._tensors[index]) for index in members]


def _shard_bytes(param: Param) -> int:
    return param.shard_numel * param.dtype.itemsize
