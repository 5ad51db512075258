"""How a checkpoint lies on disk: DCP's files, committed by one atomic rename, checked as they are read, and never executed."""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import uuid
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, DEFAULT_SUFFIX
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from zerofx.errors import CheckpointError

FORMAT = 1
METADATA = ".metadata"
ID_LENGTH = 32  # of a save, with which its files begin
# Behind the pickle that DCP reads, which ends before it: a mark, the format, the checksum of the pickle.
_TRAILER = struct.Struct("<6sHI")
_MARK = b"zerofx"
_BLOCK_BYTES = 2**20
_DCP = "torch.distributed.checkpoint."
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    (_DCP + "filesystem", "_StorageInfo"),
    *((_DCP + "metadata", name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *((_DCP + "metadata", name) for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
}


class Writer(FileSystemWriter):
    """Writes files of new names, and then replaces ``.metadata``, which alone says what files a checkpoint consists of.

    A crash before the replacement leaves the checkpoint that was there, one after it the new one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.path: Path = Path(path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.path.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._remove_leftovers()
        name = uuid.uuid4().hex
        plans = super().prepare_global_plan(plans)
        for plan in plans:
            plan.storage_data.prefix = f"{name}{plan.storage_data.prefix}"
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, and note the checksum of each entry."""
        written = super().write_data(plan, planner)
        by_file: dict[str, list[Any]] = {}
        for result in written.value():
            by_file.setdefault(result.storage_data.relative_path, []).append(result.storage_data)
        for name, entries in by_file.items():
            with open(self.path / name, "rb") as file:
                for entry in entries:
                    entry.crc32 = _checksum(file, entry.offset, entry.length)
        _sync_directory(self.path)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have written, and remove what it replaces."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = {result.index: result.storage_data for written in results for result in written}
        content = pickle.dumps(metadata)
        temporary = self.path / f"{METADATA}.tmp"
        with open(temporary, "wb") as file:
            file.write(content + _TRAILER.pack(_MARK, FORMAT, zlib.crc32(content)))
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(self.path)
        os.replace(temporary, self.path / METADATA)
        _sync_directory(self.path)
        _sync_directory(self.path.absolute().parent)
        self._remove_all_but(metadata)

    def _remove_leftovers(self) -> None:
        """Make room: remove what saves wrote that did not finish."""
        if not (self.path / METADATA).exists():
            self._remove_all_but(None)
            return
        with suppress(CheckpointError):  # of a damaged checkpoint nobody knows which files are its own
            self._remove_all_but(Reader(self.path).read_metadata())

    def _remove_all_but(self, metadata: Metadata | None) -> None:
        used = set() if metadata is None else {entry.relative_path for entry in metadata.storage_data.values()}
        for file_path in self.path.glob(f"*{DEFAULT_SUFFIX}"):
            if file_path.name not in used:
                file_path.unlink()


def _checksum(file: IO[bytes], offset: int, length: int) -> int:
    """Return the checksum of a part of a file, a block at a time."""
    file.seek(offset)
    checksum = 0
    for start in range(0, length, _BLOCK_BYTES):
        checksum = zlib.crc32(file.read(min(_BLOCK_BYTES, length - start)), checksum)
    return checksum


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Reader(FileSystemReader):
    """Reads what DCP or ``Writer`` wrote: only DCP's own classes from ``.metadata``, and entries whose checksums hold."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata``. Raises CheckpointError where it is missing, damaged, holds foreign classes, or is of a later format."""
        path = Path(self.path)
        if not path.is_dir():
            raise CheckpointError(
                f"{path} is {'a file' if path.exists() else 'not there'}",
                where=f"the path {str(path)!r}",
                why="a checkpoint is a directory",
                remedy="pass the directory that was given to zerofx.save, on a file system that every rank sees",
            )
        try:
            content = (path / METADATA).read_bytes()
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} holds no checkpoint",
                where=str(path / METADATA),
                why="this file is written last, so no save into this directory has finished",
                remedy="load another checkpoint",
            ) from None
        end = content[-_TRAILER.size :]
        if len(end) == _TRAILER.size and end.startswith(_MARK):
            _, version, checksum = _TRAILER.unpack(end)
            if version > FORMAT:
                raise CheckpointError(
                    f"{path} was written in format {version}, this zerofx reads formats up to {FORMAT}",
                    where=str(path / METADATA),
                    why="a later version of zerofx wrote it",
                    remedy="install that version to load it",
                )
            if zlib.crc32(content[: -_TRAILER.size]) != checksum:
                raise damaged(path / METADATA, "its checksum does not hold")
        try:
            metadata = _Unpickler(io.BytesIO(content)).load()
            if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
                raise pickle.UnpicklingError("it holds something else")
        except Exception as error:
            raise damaged(path / METADATA, f"it cannot be read: {error}") from error
        return metadata

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        file.seek(sinfo.offset)
        content = file.read(sinfo.length)
        if len(content) != sinfo.length:
            raise ValueError("it is shorter than it was")
        if zlib.crc32(content) != getattr(sinfo, "crc32", zlib.crc32(content)):
            raise ValueError("a checksum does not hold")
        return io.BytesIO(content)


class _Unpickler(pickle.Unpickler):
    """Builds only the plain data classes of DCP, which run no code of the file's choice."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint")


class _Planner(DefaultLoadPlanner):
    """Plans by the flat names of entries, and unpickles no code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def read(reader: FileSystemReader, metadata: Metadata, targets: dict[str, Any]) -> dict[str, Any]:
    """Fill the tensors of ``targets``, by entry; in the place of others, put the values read.

    A rank reads only what its shards need. Raises CheckpointError that names the file that is missing, cut off or changed.
    """
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    covered: dict[str, int] = {}
    by_file: dict[str, list[ReadItem]] = {}
    for item in plan.items:
        covered[item.dest_index.fqn] = covered.get(item.dest_index.fqn, 0) + math.prod(item.lengths)
        by_file.setdefault(reader.storage_data[item.storage_index].relative_path, []).append(item)
    for key, target in targets.items():
        local = target.to_local() if isinstance(target, DTensor) else target
        if isinstance(local, torch.Tensor) and covered.get(key, 0) < local.numel():
            raise damaged(Path(reader.path) / METADATA, f"it knows of no more than a part of {key}")
    for name, items in by_file.items():
        _guarded(Path(reader.path) / name, lambda items=items: reader.read_data(LoadPlan(items), planner).wait())  # type: ignore[misc]
    return planner.state_dict


def _guarded(path: Path, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        raise damaged(path, "it is not there" if isinstance(error, FileNotFoundError) else str(error)) from error


def damaged(path: Path, why: str) -> CheckpointError:
    """Build the error for a file that cannot be used."""
    return CheckpointError(
        f"{path} is damaged",
        where=str(path),
        why=why,
        remedy="load another checkpoint: this one has changed since it was written; the model is as it was",
    )
