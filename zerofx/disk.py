"""The files of one model: space that is set aside on all ranks or on none, and whether a disk has failed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from zerofx.consensus import Consensus
from zerofx.errors import OffloadError
from zerofx.groups import Group
from zerofx.heap import Heap
from zerofx.mapped import MappedFile, MappedTensors
from zerofx.offload import Offload

_TIMEOUT_S = 600.0  # for a rank that comes to where space is set aside later than the others


class Disk:
    """Sets space aside, and remembers that a disk failed, so that all ranks raise when they next communicate."""

    def __init__(self, settings: Offload, group: Group) -> None:
        self.settings, self.tensors = settings, MappedTensors()
        self._rank = group.rank
        self._consensus = Consensus(f"{group.name}/offload", group, _TIMEOUT_S)
        self._written: Future[None] | None = None
        self._failure: OffloadError | None = None
        Heap().keep_large_out()

    def set_aside(self, kind: str, nbytes: int, where: str) -> MappedFile | None:
        """Return a file with so many bytes for a kind of state, None for no bytes. All ranks call it together.

        Raises OffloadError on all of them where one has not the space, or where the disk of one has failed.
        """
        directory = self.settings.directory(kind)

        def create() -> tuple[MappedFile | None, None]:
            self.settle()
            try:
                return (MappedFile(directory, nbytes) if nbytes else None), None
            except OSError as error:
                raise self._full(kind, nbytes, error) from error

        file, _ = self._consensus.step(where, create, lambda given: given)
        return file

    def more(self, kind: str, nbytes: int) -> MappedFile:
        """Return a file with so many bytes more for a kind of state, on this rank alone. Raises OffloadError."""
        try:
            return MappedFile(self.settings.directory(kind), nbytes)
        except OSError as error:
            raise self._full(kind, nbytes, error) from error

    def _full(self, kind: str, nbytes: int, error: OSError) -> OffloadError:
        return OffloadError(
            f"there is no space for {nbytes} bytes of {kind}: {error.strerror}",
            where=f"{self.settings.directory(kind)}, rank {self._rank}",
            why="space for all of it is set aside before anything is changed, and nothing was changed",
            remedy=f"make space there, or name another directory: offload={{'{kind}': 'disk:DIRECTORY'}}",
        )

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Remember that the disk failed."""
        try:
            yield
        except OSError as error:
            self._failure = OffloadError(
                f"the disk fails under offloaded state: {error}",
                where=f"rank {self._rank}, offload={self.settings}",
                why="what it holds can be neither read nor written any more, so this model cannot be trained on",
                remedy="start again from the last checkpoint, with offload to another disk",
            )
            raise self._failure from error

    def sync(self) -> None:
        """Begin to write to the disk what the system still has in its memory."""
        executor = ThreadPoolExecutor(1, thread_name_prefix="zerofx-offload")
        self._written = executor.submit(_sync, self.tensors.files())
        executor.shutdown(wait=False)

    def settle(self, *, waits: bool = True) -> None:
        """Wait for the last writing, or only look. Raises OffloadError where it failed, or where anything did before."""
        if self._written is not None and (waits or self._written.done()):
            with self.failing():
                self._written.result()
            self._written = None
        if self._failure is not None:
            raise self._failure


def _sync(files: set[MappedFile]) -> None:
    for file in files:
        file.sync()
