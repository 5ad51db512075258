"""Whole parameters for code that reads or edits them: gathered on every rank, and written back to the shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerofx import _torch, groups, layout, sharding
from zerofx.errors import RankMismatchError, ShardingError


@overload
def gathered(model: nn.Module, /, *, writeback: bool = False) -> AbstractContextManager[Mapping[str, Tensor]]: ...


@overload
def gathered(params: Tensor | Iterable[Tensor], /, *, writeback: bool = False) -> AbstractContextManager[tuple[Tensor, ...]]: ...


@contextmanager
def gathered(model_or_params: nn.Module | Tensor | Iterable[Tensor], /, *, writeback: bool = False) -> Iterator[Any]:
    """Gather whole parameters of a sharded model, fresh tensors on every rank: by name, or in order for some of its parameters.

    With ``writeback``, rank 0's edits in place go back to the shards of all ranks at the end; after an exception inside, nothing does.
    All ranks enter together, and leave together.

    Raises ShardingError, on every rank and with nothing written: for what is not sharded; without ``writeback``, where a tensor was
    edited in place; with it, where a rank edited what rank 0 did not. RankMismatchError where another rank left with an exception.
    """
    if isinstance(model_or_params, nn.Module):
        names = sharding.names_of(model_or_params)
        with _gathered({tensor: found[0] for tensor, found in names.items()}, writeback) as wholes:
            yield {name: wholes[tensor] for tensor, found in names.items() for name in found}
    else:
        params = [model_or_params] if isinstance(model_or_params, Tensor) else list(model_or_params)
        places = {tensor: f"parameter {place} of {len(params)}, shape {tuple(tensor.shape)}," for place, tensor in enumerate(params)}
        with _gathered(places, writeback) as wholes:
            yield tuple(wholes[tensor] for tensor in params)


@contextmanager
def _gathered(tensors: Mapping[Any, str], writeback: bool) -> Iterator[dict[Any, Tensor]]:
    _check_sharded(tensors)
    if not tensors:
        yield {}
        return
    mesh = next(iter(tensors)).device_mesh
    group = groups.group_of(mesh)
    with torch.inference_mode(False), torch.no_grad():
        wholes = {tensor: layout.whole(tensor, group) for tensor in tensors}
    versions = {tensor: whole._version for tensor, whole in wholes.items()}
    try:
        yield wholes
    except Exception as error:
        groups.exchange((f"{type(error).__name__}: {error}", []), mesh, group)
        raise
    edited = [name for tensor, name in tensors.items() if wholes[tensor]._version != versions[tensor]]
    _check_edits(groups.exchange((None, edited), mesh, group), writeback)
    if writeback:
        with torch.no_grad():
            groups.broadcast(list(wholes.values()), mesh, group)
            for tensor, whole in wholes.items():
                _torch.local_tensor(tensor).copy_(layout.cut(whole, layout.param_of(tensor, group), group))


def _check_sharded(tensors: Mapping[Any, str]) -> None:
    for tensor, name in tensors.items():
        if not isinstance(tensor, DTensor):
            raise ShardingError(
                f"{name} is not sharded",
                where="the first argument of zerofx.gathered",
                why="only the parameters of a compiled model have shards to gather",
                remedy="call zerofx.compile(model) first, and pass the model that it returns, or parameters of it",
            )


def _check_edits(answers: list[tuple[str | None, list[str]]], writeback: bool) -> None:
    """Raise on all ranks alike, before anything is written."""
    for rank, (error, _) in enumerate(answers):
        if error is not None:
            raise RankMismatchError(
                f"rank {rank} left zerofx.gathered with an exception",
                where="the end of zerofx.gathered",
                why=error,
                remedy="see that rank; nothing was written back",
            )
    for rank, (_, edited) in enumerate(answers):
        if edited and not writeback:
            raise ShardingError(
                f"{edited[0]} was edited in place inside zerofx.gathered",
                where=f"rank {rank}, at the end of zerofx.gathered",
                why="what it yields are copies: without writeback an edit would never reach the shards",
                remedy="pass writeback=True, or edit a clone",
            )
        alone = [name for name in edited if name not in answers[0][1]]
        if alone:
            raise ShardingError(
                f"rank {rank} edited {alone[0]} inside zerofx.gathered, rank 0 did not",
                where=f"rank {rank}, at the end of zerofx.gathered",
                why="rank 0's values are the ones that are written back, so this edit would be lost",
                remedy="edit on rank 0, or on all ranks",
            )
