"""Tensors in files: mapped into memory for good, and resident only while they are used.

A file has no name, so nobody else opens it, and the system frees its space when the process ends, however it does.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor, UntypedStorage

_GROWTH_BYTES = 2**26
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; the mmap module has no names for them


def private_file(directory: Path, nbytes: int) -> IO[bytes]:
    """Open a file without a name, with space for so many bytes set aside. Raises OSError where a disk has not so many."""
    file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  # mode 0600, and unlinked
    try:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError:
        file.close()
        raise
    return file


class MappedFile:
    """A private file with space for so many bytes, all set aside. Raises OSError where a disk has not so many."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        file = private_file(directory, nbytes)
        weakref.finalize(self, file.close)
        self._number = file.fileno()
        self.memory = mmap.mmap(self._number, nbytes)
        self._taken_bytes = 0

    @property
    def left_bytes(self) -> int:
        return len(self.memory) - self._taken_bytes

    def take(self, nbytes: int) -> int:
        """Take the next bytes, in whole pages; return where they begin."""
        start = self._taken_bytes
        self._taken_bytes += pages_bytes(nbytes)
        return start

    def write(self, start: int, source: Tensor) -> None:
        """Write a tensor's values without making their place resident. Raises OSError."""
        dense = source.detach().resolve_conj().resolve_neg().contiguous()  # in memory it may lie otherwise
        # numpy() would keep the storage from being resized ever after
        left = memoryview((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr())).cast("B")
        while left:
            written = os.pwrite(self._number, left, start)
            left, start = left[written:], start + written

    def sync(self) -> None:
        """Wait until all that was written is on the disk. Raises OSError where it cannot be."""
        os.fdatasync(self._number)


@dataclass(frozen=True, slots=True)
class Region:
    """Where in a file the storage of a tensor lies."""

    file: MappedFile
    start: int
    nbytes: int

    @staticmethod
    def of(file: MappedFile, nbytes: int) -> Region:
        """Take the next bytes of a file."""
        return Region(file, file.take(nbytes), nbytes)

    def advise(self, advice: int) -> None:
        if self.nbytes:
            self.file.memory.madvise(advice, self.start, self.nbytes)


class GrowingFiles:
    """Files for tensors of which nobody knows yet how many there will be."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last: MappedFile | None = None

    def region(self, nbytes: int) -> Region:
        """Take so many bytes. Raises OSError where a disk has not so many."""
        if self._last is None or self._last.left_bytes < pages_bytes(nbytes):
            self._last = MappedFile(self._directory, max(_GROWTH_BYTES, pages_bytes(nbytes)))
        return Region.of(self._last, nbytes)


class MappedTensors:
    """The tensors that lie in files; each is an ordinary tensor, and its place in a file is free again once nobody has it."""

    def __init__(self) -> None:
        self._regions: weakref.WeakKeyDictionary[UntypedStorage, Region] = weakref.WeakKeyDictionary()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self._regions

    def move(self, tensor: Tensor, file: MappedFile, views: Iterable[Tensor] = ()) -> None:
        """Put a tensor, and views of it, into a file; all stay the tensors that they are."""
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        nbytes = extent * tensor.element_size() if tensor.numel() else 0
        region, base = Region.of(file, nbytes), tensor.storage_offset()
        if nbytes:
            moved = torch.frombuffer(file.memory, dtype=tensor.dtype, count=extent, offset=region.start)
            with torch.no_grad():
                moved.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
                for one in (tensor, *views):
                    one.set_(moved.untyped_storage(), one.storage_offset() - base, one.shape, one.stride())
        self._regions[tensor.untyped_storage()] = region

    def put(self, source: Tensor, region: Region) -> Tensor:
        """Return a tensor that lies in a file, with the values of another one; it is not resident. Raises OSError."""
        region.file.write(region.start, source)
        count = source.numel()
        made = torch.frombuffer(region.file.memory, dtype=source.dtype, count=count, offset=region.start).view(source.shape)
        self._regions[made.untyped_storage()] = region
        return made

    def write(self, tensor: Tensor, source: Tensor) -> None:
        """Give one of these tensors the values of another one, without making it resident. Raises OSError."""
        region = self._regions[tensor.untyped_storage()]
        region.file.write(region.start, source)

    def __reduce__(self) -> tuple[type[MappedTensors], tuple[()]]:
        return MappedTensors, ()  # a copy of a tensor lies in memory

    def adopt(self, tensor: Tensor, other: MappedTensors) -> None:
        """Take charge of a tensor that another one put into a file."""
        storage = tensor.untyped_storage()
        if (region := other._regions.get(storage)) is not None:
            self._regions[storage] = region

    def load(self, tensors: Iterable[Tensor], *, to_write: bool) -> None:
        """Make tensors resident. Raises OSError where the disk fails, which would end the process at the access."""
        for region in self._found(tensors):
            try:
                region.advise(_MADV_POPULATE_WRITE if to_write else _MADV_POPULATE_READ)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a kernel before 5.14, which loads each page when it is touched
                    raise

    def read_ahead(self, tensors: Iterable[Tensor]) -> None:
        """Let the system read what is not in its cache, beside what goes on here."""
        for region in self._found(tensors):
            region.advise(mmap.MADV_WILLNEED)

    def evict(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors out of the memory of this process; what was written reaches the file."""
        for region in self._found(tensors):
            region.advise(mmap.MADV_DONTNEED)

    def evict_all(self) -> None:
        """Take everything out of the memory of this process."""
        for region in list(self._regions.values()):
            region.advise(mmap.MADV_DONTNEED)

    def files(self) -> set[MappedFile]:
        """Return the files that have tensors."""
        return {region.file for region in self._regions.values()}

    def _found(self, tensors: Iterable[Tensor]) -> Iterator[Region]:
        for tensor in tensors:
            if (region := self._regions.get(tensor.untyped_storage())) is not None:
                yield region


def pages_bytes(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
