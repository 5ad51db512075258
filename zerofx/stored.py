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
        self._prepared = dict.fromkeys(self._gradients, 0)
        self._heap = Heap()
        self._is_ready = False
        for tensor in tensors:
            if (other := vars(tensor).pop(ATTRIBUTE, None)) is not None:
                disk.tensors.adopt(_torch.local_tensor(tensor), other)

    def prepare(self, *, trains: bool) -> None:
        """Set space aside, and move what lies in memory, before the first forward; later, take out of memory what others have read.

        A forward that trains gives gradients that autograd adds to those that are there: beside these, they need space too.
        Raises OffloadError on all ranks, with nothing changed, where a disk has not the space.
        """
        shards = None if self._is_ready else self._set_aside_shards()
        trained = [index for index in sorted(self._gradients) if self._tensors[index].requires_grad]
        self._prepare_places(trained, 1)
        if trains and any(self._tensors[index].grad is not None for index in trained):
            self._prepare_places(trained, 2)
        if self._is_ready:
            self._disk.tensors.evict_all()
        elif shards is not None:
            with self._disk.failing():
                for index in self._waiting():
                    self.move(index, shards)
        self._is_ready = True

    def _prepare_places(self, trained: Sequence[int], count: int) -> None:
        """Set space aside for so many gradients of each parameter. Those that one rank alone makes room for do not count."""
        lacking = [index for index in trained if self._prepared[index] < count]
        if lacking:
            file = self._disk.set_aside("gradients", self._size_bytes(lacking), "a forward, with offload")
            assert file is not None
            self._spread(file, lacking)
            self._prepared.update(dict.fromkeys(lacking, count))

    def _waiting(self) -> list[int]:
        return [index for index in self._shards if _torch.local_tensor(self._tensors[index]) not in self._disk.tensors]

    def _set_aside_shards(self) -> MappedFile | None:
        """Set space aside for the shards that lie in memory, which may be others on each rank."""
        if not self._shards:
            return None
        return self._disk.set_aside("parameters", self._size_bytes(self._waiting()), "the first forward, with offload")

    def _size_bytes(self, members: Iterable[int]) -> int:
        """Return the bytes of files that shards of some parameters take."""
        return sum(pages_bytes(memory.shards_bytes([self._params[index]])) for index in members)

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
        self._spread(self._disk.more("gradients", self._size_bytes(trained)), trained)
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
