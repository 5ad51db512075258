"""The whole state of a sharded model, as a plain model would have it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from zerofx import _torch, groups
from zerofx.errors import CheckpointError
from zerofx.module import runtime_of
from zerofx.runtime import Runtime


def full_state_dict(model: nn.Module, *, rank0_only: bool = False, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return the state dict of a compiled model with whole tensors, and the plain model's keys in its order.

    Buffers are this rank's; tied parameters are one tensor under all their keys. ``dtype`` is that of floating tensors (None: their own,
    in which they are trained). With ``rank0_only``, the other ranks get an empty dict, and hold no parameter whole at any time. All
    ranks call it together, also in ``torch.inference_mode``. The tensors are copies: nothing that changes later shows in them.

    Raises ShardingError for a model that was not compiled, CheckpointError for a ``dtype`` that is not floating point.
    """
    runtime: Runtime = runtime_of(model)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise CheckpointError(
            f"dtype={dtype!r} is no floating-point dtype",
            where="zerofx.full_state_dict(dtype=...)",
            why="weights would lose their fractions",
            remedy="pass torch.bfloat16, torch.float16, torch.float32, or nothing",
        )
    is_empty = rank0_only and runtime.group.rank != 0
    state: OrderedDict[str, Any] = OrderedDict()
    wholes: dict[int, Tensor | None] = {}
    # tensors made in inference mode could not be trained or saved for a backward later
    with torch.inference_mode(False), torch.no_grad():
        tensors = model.state_dict(keep_vars=True)
        for name, value in tensors.items():
            if isinstance(value, DTensor):
                if id(value) not in wholes:
                    wholes[id(value)] = _whole(value, dtype, runtime, rank0_only)
                value = wholes[id(value)]
            elif isinstance(value, Tensor) and not is_empty:
                value = value.detach().to(_dtype_of(value, dtype), copy=True)
            if not is_empty:
                state[name] = value
    return state


def _dtype_of(value: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and value.is_floating_point() else value.dtype


def _whole(value: DTensor, dtype: torch.dtype | None, runtime: Runtime, rank0_only: bool) -> Tensor | None:
    """Gather one parameter, cast by the ranks that hold it; None on the ranks that do not get it."""
    group, (placement,) = runtime.group, value.placements
    local = _torch.local_tensor(value).detach()
    local = local.to(_dtype_of(value, dtype), copy=True)
    if not isinstance(placement, Shard):
        return None if rank0_only and group.rank else local
    dim = placement.dim
    rows = -(-value.shape[dim] // group.size)
    padding = [0, 0] * (value.ndim - 1 - dim) + [0, rows - local.shape[dim]]
    parts = groups.gather(torch.nn.functional.pad(local, padding), runtime.mesh, group, first_only=rank0_only)
    return None if parts is None else torch.cat(parts, dim).narrow(dim, 0, value.shape[dim]).contiguous()
