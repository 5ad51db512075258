"""How a parameter lies on the ranks: its cut, the DTensor that says so, room for padding, and the whole again."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from zerofx import _torch, collectives
from zerofx.groups import Group
from zerofx.params import Param


def cut(whole: Tensor, param: Param, group: Group) -> Tensor:
    """Return the rows of a whole parameter that are this rank's shard, as a view."""
    return whole if param.dim is None else whole.narrow(param.dim, *param.rows(group.rank))


def placement_of(param: Param) -> Placement:
    """Return the DTensor placement of a parameter."""
    return Replicate() if param.dim is None else Shard(param.dim)


def dtensor(local: Tensor, param: Param, mesh: DeviceMesh) -> DTensor:
    """Wrap this rank's shard of a parameter."""
    stride = torch.empty(param.shape, device="meta").stride()
    shape = torch.Size(param.shape)
    return DTensor.from_local(local.contiguous(), mesh, [placement_of(param)], run_check=False, shape=shape, stride=stride)


def param_of(tensor: Tensor, group: Group) -> Param:
    """Return how a DTensor is cut, without a place in a model's table."""
    assert isinstance(tensor, DTensor)
    placement = tensor.placements[0]
    dim = placement.dim if isinstance(placement, Shard) else None
    return Param(0, (), tuple(tensor.shape), tensor.dtype, tensor.dtype, group.size, dim)


def whole(tensor: DTensor, group: Group) -> Tensor:
    """Return the whole of a DTensor over one mesh dimension, in memory of its own. All ranks call it together."""
    param = param_of(tensor, group)
    if param.dim is None:
        replicated: Tensor = tensor.full_tensor()
        return replicated.detach().clone()
    # DTensor's own gather is the form that gloo does not bear (see collectives)
    shard = padded(_torch.local_tensor(tensor).detach(), param)
    return collectives.gather_wait(collectives.gather_start([shard], [param], group), [param], group)[0]


def with_room(param: Param, tensor: Tensor, group: Group) -> Tensor | None:
    """Move an uneven shard into storage with room for its padding, so that every rank sends the same size; None if even."""
    if not param.is_padded:
        return None
    assert param.dim is not None
    room = padded(_torch.local_tensor(tensor), param)
    _torch.set_local_tensor(tensor, room.narrow(param.dim, 0, param.rows(group.rank)[1]))
    return room


def padded(local: Tensor, param: Param) -> Tensor:
    """Return this rank's shard with its padding, zeros; itself where nothing is missing."""
    if tuple(local.shape) == param.shard_shape:
        return local
    room = local.new_zeros(param.shard_shape)
    pad_into(room, local)
    return room


def pad_into(room: Tensor, local: Tensor) -> None:
    """Copy a shard to where its padding is behind it."""
    with torch.no_grad():
        view = room.detach()
        for dim, size in enumerate(local.shape):
            view = view.narrow(dim, 0, size)
        view.copy_(local.detach())
