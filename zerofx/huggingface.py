"""Weights in the safetensors format, read slice by slice through DCP's own reader."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader, Metadata
from torch.distributed.checkpoint.filesystem import FileSystem

from zerofx.errors import CheckpointError
from zerofx.storage import damaged

INDEX = "model.safetensors.index.json"


class _Listed(FileSystem):
    """A file system that lists the files of one model only: a directory may hold others, or the same weights twice."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [str(file) for file in self._files]


def weights(path: str | os.PathLike[str]) -> tuple[FileSystemReader, Metadata]:
    """Open a file, or a directory with an index or with one set of files; return its reader and what it holds.

    Raises CheckpointError where there are no such files, one is damaged, or the ``safetensors`` package is missing.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise CheckpointError(
            "the package safetensors is not installed",
            where=f"zerofx.load_safetensors({os.fspath(path)!r})",
            why="it reads the files, and zerofx needs it for nothing else",
            remedy="pip install safetensors",
        )
    files = _files(Path(path))
    for file in files:
        _check(file)
    reader = HuggingFaceStorageReader(str(Path(path) if Path(path).is_dir() else Path(path).parent))
    reader.fs = _Listed(files)
    return reader, reader.read_metadata()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / INDEX).is_file():
        try:
            return [path / name for name in sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise damaged(path / INDEX, f"it is no index of weights: {error}") from error
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{path} holds no weights",
            where=str(path),
            why="there is neither a .safetensors file nor an index of such files",
            remedy="pass the file, or the directory that it is in",
        )
    return files


def _check(file: Path) -> None:
    from safetensors import safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            opened.keys()
    except Exception as error:
        raise damaged(file, "it is not there" if isinstance(error, FileNotFoundError) else str(error)) from error
