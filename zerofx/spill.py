"""Activations of one graph in files: written when the forward is done with them, read back ahead of the backward's use.

Files have no names, so that nobody else opens them, and the system frees their space when the process ends, however it does. They
are read and written by calls, not through mapped memory: a failing disk raises where mapped memory would end the process.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import IO, TypeVar

import torch
from torch import Tensor

from zerofx.errors import OffloadError
from zerofx.heap import Heap
from zerofx.mapped import pages_bytes, private_file

T = TypeVar("T")


class Space:
    """A file with room for all values of one run of the graph, and how many of them are wanted still."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.wanted = file, 0
        weakref.finalize(self, file.close)


@dataclass(frozen=True, slots=True)
class Reading:
    """A tensor that is being read."""

    value: Tensor
    done: Future[None]


class Spill:
    """Keeps values of some sizes, by number. Several runs of a graph may come before the first backward: each has a file of its own.

    What stands for a value is a small tensor; once nobody has it, its place is free for another run.
    """

    def __init__(self, directory: Path, rank: int, sizes_bytes: Sequence[int]) -> None:
        self._directory, self._rank = directory, rank
        self._starts = list(accumulate(map(pages_bytes, sizes_bytes), initial=0))
        self._free: list[Space] = []
        self._running: Space | None = None
        self._places: dict[int, tuple[Space, int]] = {}
        self._count = 0
        self._reader: ThreadPoolExecutor | None = None
        self._heap = Heap()

    def begin(self) -> None:
        """Set space aside for a run. Raises OffloadError where the disk has not enough."""
        if self._free:
            self._running = self._free.pop()
            return
        self._running = Space(self._call("found no space on", partial(private_file, self._directory, self._starts[-1])))

    def write(self, number: int, value: Tensor) -> Tensor:
        """Write a contiguous tensor, and return what stands for it. Raises OffloadError where the disk fails."""
        space = self._running
        assert space is not None
        self._heap.freed(value.nbytes)  # by the one before it: what is written is still in use
        self._call("could not be written to", partial(_all, os.pwritev, space.file.fileno(), value, self._starts[number]))
        ticket = torch.tensor([self._count])
        self._places[self._count] = space, self._starts[number]
        space.wanted += 1
        weakref.finalize(ticket.untyped_storage(), self._release, self._count)
        self._count += 1
        return ticket

    def start(self, ticket: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Reading:
        """Begin to read a value into new memory, beside what goes on here."""
        space, start = self._places[int(ticket)]
        value = torch.empty(shape, dtype=dtype)
        self._heap.freed(value.nbytes)
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="zerofx-spill")
        return Reading(value, self._reader.submit(_all, os.preadv, space.file.fileno(), value, start))

    def wait(self, reading: Reading) -> Tensor:
        """Return a value when it is read. Raises OffloadError where the disk failed."""
        self._call("could not be read from", reading.done.result)
        return reading.value

    def _release(self, count: int) -> None:
        space, _ = self._places.pop(count)
        space.wanted -= 1
        if not space.wanted:
            self._free.append(space)

    def _call(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except OSError as error:
            raise OffloadError(
                f"activations {what} disk",
                where=f"{self._directory}, rank {self._rank}",
                why=f"the system says: {error.strerror}",
                remedy="make space there, or name another directory: offload={'activations': 'disk:DIRECTORY'}; the training state "
                "is as it was before this step",
            ) from error


def _all(call: Callable[[int, list[memoryview], int], int], file: int, value: Tensor, start: int) -> None:
    """Read or write all of a tensor; the system may do less at a time."""
    memory: memoryview = value.view(-1).view(torch.uint8).numpy().data
    while memory:
        done = call(file, [memory], start)
        if not done:
            raise OSError(0, "the file ends too early")
        memory, start = memory[done:], start + done
