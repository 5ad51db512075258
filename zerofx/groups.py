"""The ranks that share a model, how their backend moves bytes best, and what they tell each other before they train."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerofx.errors import ConfigError, RankMismatchError, ZerofxError


@dataclass(frozen=True, slots=True)
class Transport:
    """How one communication backend moves a bucket.

    ``reduce`` is the collective behind a reduce-scatter. ``alone_bytes`` is the size of a whole parameter from which it
    travels in a collective of its own, without being packed into or unpacked from a shared buffer; ``split_bytes`` the one from
    which it travels in ``pieces``, several collectives at once. What is packed brings ``least_bytes`` together, if need be with
    parameters that else travel alone.
    """

    reduce: str
    alone_bytes: int
    least_bytes: int
    split_bytes: int
    pieces: int

    @property
    def is_concurrent(self) -> bool:
        """Whether several collectives share the link at once; else each waits for the one before."""
        return self.pieces > 1


# gloo's reduce_scatter is an all-reduce inside (twice the bytes), so it exchanges chunks and sums locally (design, fact 15).
# Measured on two ranks at 500 mbit: one collective alone, sending 16 MiB, has 0.47 (exchange) to 0.62 (gather) of the wire, in four
# pieces 0.89 to 0.93; and one of 13 KB among others of 2 MiB costs as much as 1.2 MiB more (0.95 of the wire becomes 0.81).
TRANSPORTS = {
    "gloo": Transport("all_to_all", alone_bytes=2**17, least_bytes=2**21, split_bytes=2**23, pieces=4),
    "nccl": Transport("reduce_scatter", alone_bytes=2**63, least_bytes=0, split_bytes=2**63, pieces=1),
}


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that share one model. ``name`` is c10d's; empty for a single rank without a process group."""

    name: str
    size: int
    rank: int
    backend: str

    @property
    def transport(self) -> Transport:
        return TRANSPORTS.get(self.backend, TRANSPORTS["gloo"])

    @property
    def has_peers(self) -> bool:
        """Whether other processes answer: not those of torch's fake group."""
        return self.size > 1 and self.backend != "fake"


def resolve_mesh(mesh: DeviceMesh | None, device_type: str, where: str = "zerofx.compile") -> tuple[DeviceMesh, Group]:
    """Return the mesh and group to shard over: the given mesh, the default process group, or this process alone.

    Raises ConfigError for a mesh that is not 1-D, or of a single rank among others, or where WORLD_SIZE promises ranks that no
    process group joins.
    """
    if mesh is None and not dist.is_initialized():
        expected = _environment_world_size()
        if expected > 1:
            raise ConfigError(
                f"no process group, but WORLD_SIZE={expected}",
                where=where,
                why="this process was started as one of several ranks, and each would train a model of its own",
                remedy=f"call torch.distributed.init_process_group() before {where}",
            )
        alone = DeviceMesh(device_type, torch.zeros(1, dtype=torch.int), _init_backend=False, _rank=0)
        return alone, Group("", 1, 0, "")
    if mesh is None:
        mesh = dist.init_device_mesh(device_type, (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"mesh={mesh!r} is not a DeviceMesh",
            where=f"{where}(mesh=...)",
            why="the mesh says which ranks share the model",
            remedy="pass torch.distributed.device_mesh.init_device_mesh(device_type, (world_size,)), or nothing for all ranks",
        )
    if mesh.ndim != 1:
        raise ConfigError(
            f"the mesh has {mesh.ndim} dimensions {tuple(mesh.shape)}, zerofx shards over one",
            where=f"{where}(mesh=...)",
            why="a parameter is cut along a single group of ranks",
            remedy='pass a 1-D DeviceMesh, or one dimension of yours: mesh["dp"]',
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}",
            where=f"{where}(mesh=...)",
            why="a rank outside of the mesh holds no shard",
            remedy=f"call {where} only on the ranks of the mesh, or pass a mesh of all ranks",
        )
    if mesh.size() == 1 and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"the mesh {mesh.mesh.tolist()} has one of {dist.get_world_size()} ranks",
            where="zerofx.compile(mesh=...)",
            why="nothing would be sharded, and no gradient reduced: each rank would train a model of its own",
            remedy="pass a mesh of the ranks that share the model; to train apart, use torch.compile",
        )
    return mesh, group_of(mesh)


def device_type() -> str:
    """Return the device type of the default group's ranks, as far as torch knows it without a tensor."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return "cuda"
    default = torch.get_default_device().type
    return "cpu" if default == "meta" else default


def group_of(mesh: DeviceMesh) -> Group:
    """Return the group of a 1-D mesh."""
    if mesh.size() == 1 and not dist.is_initialized():
        return Group("", 1, 0, "")
    process_group = mesh.get_group()
    return Group(process_group.group_name, mesh.size(), mesh.get_local_rank(), dist.get_backend(process_group))


def _environment_world_size() -> int:
    import os

    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() else 1


def exchange(payload: Any, mesh: DeviceMesh, group: Group) -> list[Any]:
    """Return every rank's small picklable payload, in rank order."""
    if group.size == 1:
        return [payload]
    gathered: list[Any] = [None] * group.size
    dist.all_gather_object(gathered, payload, group=mesh.get_group())
    return gathered


def agree(
    local: ZerofxError | None, described: Sequence[str], mesh: DeviceMesh, group: Group, *, doing: str, where: str, remedy: str
) -> None:
    """Let all ranks see whether any has an error, or describes what it does otherwise; then raise on all of them."""
    answers = exchange((local, described), mesh, group)
    if local is not None:
        raise local
    for rank, (error, _) in enumerate(answers):
        if error is not None:
            raise RankMismatchError(
                f"rank {rank} cannot {doing}: {error.what}",
                where=error.where,
                why=error.why or "see the error of that rank",
                remedy=error.remedy,
            ) from error
    for rank, (_, theirs) in enumerate(answers):
        if theirs != answers[0][1]:
            pairs = itertools.zip_longest(answers[0][1], theirs, fillvalue="nothing more")
            here, there = next((here, there) for here, there in pairs if here != there)
            raise RankMismatchError(
                f"rank 0 and rank {rank} {doing} different things",
                where=where,
                why=f"rank 0 has {here}; rank {rank} has {there}",
                remedy=remedy,
            )


def broadcast(tensors: Sequence[Tensor], mesh: DeviceMesh, group: Group) -> None:
    """Overwrite every rank's tensors with those of the group's first rank."""
    if group.size == 1:
        return
    process_group = mesh.get_group()
    source = dist.get_global_rank(process_group, 0)
    for tensor in tensors:
        if tensor.numel():
            staged = tensor.detach().contiguous()
            # gloo broadcasts no bool; a byte view carries any dtype
            wire = staged.view(torch.uint8) if staged.dtype is torch.bool else staged
            dist.broadcast(wire, source, group=process_group)
            if staged.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(staged)


def gather(tensor: Tensor, mesh: DeviceMesh, group: Group, *, first_only: bool = False) -> list[Tensor] | None:
    """Return every rank's tensor, in rank order; all have one shape. With ``first_only``, the group's first rank gets them, others None."""
    if group.size == 1:
        return [tensor]
    process_group = mesh.get_group()
    # a byte view carries any dtype
    sent = tensor.contiguous().reshape(-1).view(torch.uint8)
    if first_only:
        arrived = [torch.empty_like(sent) for _ in range(group.size)] if group.rank == 0 else None
        dist.gather(sent, arrived, dist.get_global_rank(process_group, 0), group=process_group)
    else:
        arrived = [torch.empty_like(sent) for _ in range(group.size)]
        dist.all_gather(arrived, sent, group=process_group)
    return None if arrived is None else [part.view(tensor.dtype).view(tensor.shape) for part in arrived]
