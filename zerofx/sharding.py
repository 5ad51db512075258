"""Put shards in the place of a model's parameters, and sharded classes in that of its modules'."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerofx.config import Config
from zerofx.groups import Group
from zerofx.module import Binding, bind
from zerofx.params import Param, block_of, choose_dim
from zerofx.runtime import Runtime, placement_of


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return each parameter, once, with all its qualified names, in registration order."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        found.setdefault(tensor, []).append(name)
    return found


def params_of(names: dict[nn.Parameter, list[str]], settings: Config, group: Group) -> tuple[Param, ...]:
    """Return the parameter table: how each is cut over the ranks."""
    cut = [_param(index, tensor, tuple(found), settings, group) for index, (tensor, found) in enumerate(names.items())]
    if settings.stage < 3:
        return tuple(replace(param, stays=True) for param in cut)
    kept = _staying(cut, settings.keep_whole_bytes)
    return tuple(replace(param, stays=param.index in kept) for param in cut)


def _staying(params: list[Param], most_bytes: int) -> set[int]:
    """Choose whole blocks, from the first: nothing computes before these are gathered, and in the backward they come last."""
    kept, total = set[int](), 0
    for _, block in itertools.groupby((param for param in params if param.dim is not None), key=lambda param: block_of(param.name)):
        members = list(block)
        total += sum(param.whole_bytes for param in members)
        if total > most_bytes:
            break
        kept.update(param.index for param in members)
    return kept


def _param(index: int, tensor: nn.Parameter, names: tuple[str, ...], settings: Config, group: Group) -> Param:
    shape = tuple(tensor.shape)
    compute = settings.param_dtype if settings.param_dtype is not None and tensor.is_floating_point() else tensor.dtype
    dim = None if settings.stage == 0 else choose_dim(shape, group.size)
    return Param(index, names, shape, tensor.dtype, compute, group.size, dim)


def install(
    model: nn.Module,
    kind: type[Runtime],
    settings: Config,
    mesh: DeviceMesh,
    group: Group,
    params: tuple[Param, ...],
    names: dict[nn.Parameter, list[str]],
) -> None:
    """Replace parameters by their shards and modules by their sharded classes, in place; ``kind`` is the mechanism that runs them."""
    index_of = {tensor: index for index, tensor in enumerate(names)}
    tensors = [_shard(tensor, param, mesh, group) for tensor, param in zip(names, params, strict=True)]
    own: dict[nn.Module, dict[str, int]] = {}
    for module in model.modules():
        own[module] = {name: index_of[tensor] for name, tensor in module._parameters.items() if tensor is not None}
        module._parameters.update({name: tensors[index] for name, index in own[module].items()})
        for name, value in vars(module).items():
            vars(module)[name] = _rebound(value, index_of, tensors)
    state = kind(settings, mesh, group, params, tensors, tuple(model.named_modules()))
    inner = "submodule" if settings.backend == "hooks" else None
    for module, indices in own.items():
        if indices or module is model or inner is not None:
            bind(module, Binding(state, indices), "forward" if module is model else inner)
    state.watch()


def _rebound(value: Any, index_of: dict[nn.Parameter, int], tensors: list[nn.Parameter]) -> Any:
    """Replace parameters by their shards in the plain containers that a module keeps them in, so that none computes with a stale one."""
    if isinstance(value, nn.Parameter):
        return tensors[index_of[value]] if value in index_of else value
    if type(value) is list:
        value[:] = [_rebound(item, index_of, tensors) for item in value]
    elif type(value) is dict:
        value.update({key: _rebound(item, index_of, tensors) for key, item in value.items()})
    elif type(value) is tuple:
        return tuple(_rebound(item, index_of, tensors) for item in value)
    return value


def _shard(tensor: nn.Parameter, param: Param, mesh: DeviceMesh, group: Group) -> nn.Parameter:
    """Return this rank's shard of a parameter as a DTensor parameter, in storage of its own."""
    local = tensor.detach()
    if param.dim is not None:
        local = local.narrow(param.dim, *param.rows(group.rank)).clone(memory_format=torch.contiguous_format)
    stride = torch.empty(param.shape, device="meta").stride()
    placements = [placement_of(param)]
    sharded = DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=torch.Size(param.shape), stride=stride)
    return nn.Parameter(sharded, requires_grad=tensor.requires_grad)
