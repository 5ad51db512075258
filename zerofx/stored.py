"""Shards of parameters and of gradients that lie in files between their uses."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, UntypedStorage, nn

from zerofx import _torch, memory
from zerofx.config import Config
from zerofx.disk import Disk
from zerofx.heap import Heap
from zerofx.mapped import MappedFile, MappedTensors, Region, pages_bytes
from zerofx.params import Param

ATTRIBUTE = "_zerofx_mapped"  # of a parameter that zerofx.init has put into a file: who knows where


@dataclass(slots=True)
class _Place:
    """Where a gradient can lie, and the storage that lies there, as long as anybody has it."""

    region: Region
    holder: weakref.ref[UntypedStorage] | None = None

    @property
    def is_free(self) -> bool:
        return self.holder is None or self.holder() is None

    def put(self, gradient: Tensor, tensors: MappedTensors) -> Tensor:
        made = tensors.put(gradient, self.region)
        self.holder = weakref.ref(made.untyped_storage())
        return made


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
        self._places: dict[int, list[_Place]] = {index: [] for index in self._gradients}
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
        moved = sum(pages_bytes(memory.shards_bytes([self._params[index]])) for index in waiting)
        trained = [index for index in sorted(self._gradients) if self._tensors[index].requires_grad]
        where = "the first forward, with offload"
        shards = self._disk.set_aside("parameters", moved, where) if self._shards else None  # what waits may differ between ranks
        kept = sum(pages_bytes(memory.shards_bytes([self._params[index]])) for index in trained)
        gradients = self._disk.set_aside("gradients", kept, where) if kept else None
        with self._disk.failing():
            for index in waiting:
                assert shards is not None
                self.move(index, shards)
            if gradients is not None:
                self._spread(gradients, trained)
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

    def store(self, index: int, gradient: Tensor) -> Tensor:
        """Put a padded gradient shard into a file, and return it from there."""
        if index not in self._gradients:
            return gradient
        place = next((place for place in self._places[index] if place.is_free), None) or self._add_places(index)
        with self._disk.failing():
            return place.put(gradient, self._disk.tensors)

    def _add_places(self, index: int) -> _Place:
        """Make one more place for the gradient of each trained parameter, because one is held by somebody, or is added to."""
        trained = [other for other in sorted(self._gradients) if self._tensors[other].requires_grad or other == index]
        nbytes = sum(pages_bytes(memory.shards_bytes([self._params[other]])) for other in trained)
        self._spread(self._disk.more("gradients", nbytes), trained)
        return self._places[index][-1]

    def _spread(self, file: MappedFile, members: Iterable[int]) -> None:
        for index in members:
            if not self._places[index]:
                self._evict_accumulated(index)
            self._places[index].append(_Place(Region.of(file, memory.shards_bytes([self._params[index]]))))

    def _evict_accumulated(self, index: int) -> None:
        """From now on, when a gradient was added to the one that is there, take both out of memory."""
        this = weakref.ref(self)

        def accumulated(_: Tensor) -> None:
            if (found := this()) is not None:
                for place in found._places[index]:
                    place.region.advise(mmap.MADV_DONTNEED)

        self._tensors[index].register_post_accumulate_grad_hook(accumulated)

    def move(self, index: int, file: MappedFile) -> None:
        """Put a shard that lies in memory into a file."""
        local, padded = _torch.local_tensor(self._tensors[index]), self._padded[index]
        if padded is None:
            self._disk.tensors.move(local, file)
        else:
            self._disk.tensors.move(padded, file, [local])
        self._disk.tensors.evict([local])
        self._heap.freed(memory.shards_bytes([self._params[index]]))

    def _locals(self, members: Iterable[int]) -> list[Tensor]:
        return [_torch.local_tensor(self._tensors[index]) for index in members]
