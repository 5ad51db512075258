"""Put shards in the place of a model's parameters, and sharded classes in that of its modules'."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zerofx import _torch, layout
from zerofx.config import Config
from zerofx.errors import ShardingError
from zerofx.groups import Group
from zerofx.keepfp32 import compute_in_fp32
from zerofx.module import Binding, bind
from zerofx.params import Param, block_of, choose_dim
from zerofx.runtime import Runtime


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return each parameter, once, with all its qualified names, in registration order."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        found.setdefault(tensor, []).append(name)
    return found


def params_of(names: dict[nn.Parameter, list[str]], settings: Config, group: Group, kept: Sequence[nn.Module] = ()) -> tuple[Param, ...]:
    """Return the parameter table: how each is cut over the ranks, and what it computes in; fp32 in modules that are ``kept`` so."""
    in_fp32 = {tensor for module in kept for tensor in module.parameters()}
    cut = [
        _param(index, tensor, tuple(found), settings, group, torch.float32 if tensor in in_fp32 else settings.param_dtype)
        for index, (tensor, found) in enumerate(names.items())
    ]
    if settings.stage < 3:
        return tuple(replace(param, stays=True) for param in cut)
    staying = _staying(cut, settings.keep_whole_bytes)
    return tuple(replace(param, stays=param.index in staying) for param in cut)


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


def _param(index: int, tensor: nn.Parameter, names: tuple[str, ...], settings: Config, group: Group, dtype: torch.dtype | None) -> Param:
    shape = tuple(tensor.shape)
    compute = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
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
    kept: Sequence[nn.Module] = (),
) -> None:
    """Replace parameters by their shards and modules by their sharded classes, in place; ``kind`` is the mechanism that runs them."""
    index_of = {tensor: index for index, tensor in enumerate(names)}
    tensors = [_shard(tensor, param, mesh, group) for tensor, param in zip(names, params, strict=True)]
    modules = list(model.modules())
    own = {module: {name: index_of[tensor] for name, tensor in module._parameters.items() if tensor is not None} for module in modules}
    rebind(modules, dict(zip(names, tensors, strict=True)))
    state = kind(settings, mesh, group, params, tensors, tuple(model.named_modules()))
    inner = "submodule" if settings.backend == "hooks" else None
    for module, indices in own.items():
        if indices or module is model or inner is not None or any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            bind(module, Binding(state, indices), "forward" if module is model else inner, frozenset(settings.methods))
    for module in kept:
        assert settings.param_dtype is not None
        compute_in_fp32(module, settings.param_dtype)
    state.membership.watch()
    _refuse_steps(names, state)


def rebind(modules: Iterable[nn.Module], shards: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters wherever modules keep them, plain containers included, so that none computes with a stale one."""
    for module in modules:
        own = module._parameters  # an OrderedDict in modules that an older torch pickled
        own.update({name: shards[tensor] for name, tensor in own.items() if tensor is not None and tensor in shards})
        for name, value in vars(module).items():
            vars(module)[name] = _rebound(value, shards)


def _rebound(value: Any, shards: Mapping[nn.Parameter, nn.Parameter]) -> Any:
    if isinstance(value, nn.Parameter):
        return shards.get(value, value)
    if type(value) is list:
        value[:] = [_rebound(item, shards) for item in value]
    elif type(value) is dict:
        value.update({key: _rebound(item, shards) for key, item in value.items()})
    elif type(value) is tuple:
        return tuple(_rebound(item, shards) for item in value)
    return value


def _refuse_steps(names: dict[nn.Parameter, list[str]], state: Runtime) -> None:
    """Let an optimizer that holds one of the parameters as they were fail at its first step: it would train what no forward reads."""
    replaced: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
    for tensor, (name, *_) in names.items():
        key = id(tensor)
        replaced[key] = weakref.ref(tensor, lambda _, key=key: replaced.pop(key, None)), name  # type: ignore[misc]

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = (tensor for group in optimizer.param_groups for tensor in group["params"]) if replaced else ()
        for tensor in held:
            found, name = replaced.get(id(tensor), (None, ""))
            if found is not None and found() is tensor:
                raise ShardingError(
                    f"{type(optimizer).__name__} holds {name} as it was before zerofx.compile",
                    where=f"the step of {type(optimizer).__name__}",
                    why="the model trains the shards that took its parameters' places, and this optimizer would not change them",
                    remedy="build the optimizer from model.parameters() after zerofx.compile",
                )

    weakref.finalize(state, register_optimizer_step_pre_hook(check).remove)


def _shard(tensor: nn.Parameter, param: Param, mesh: DeviceMesh, group: Group) -> nn.Parameter:
    """Return this rank's shard of a parameter as a DTensor parameter, in storage of its own; a DTensor keeps its shard."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            keeps = list(tensor.placements) == [layout.placement_of(param)]
            local = _torch.local_tensor(tensor) if keeps else layout.cut(layout.whole(tensor, group), param, group)
    else:
        local = layout.cut(tensor.detach(), param, group)
        local = local if param.dim is None else local.clone(memory_format=torch.contiguous_format)
    return shard_of(tensor, layout.dtensor(local, param, mesh))


def shard_of(tensor: nn.Parameter, sharded: DTensor) -> nn.Parameter:
    """Make a parameter of a shard, with the attributes that users gave to the whole one, as to group parameters, and its hooks."""
    parameter = nn.Parameter(sharded, requires_grad=tensor.requires_grad)
    if type(tensor) in (nn.Parameter, DTensor):  # a fake tensor has others, of its own
        vars(parameter).update(vars(tensor))
    _torch.share_hooks(tensor, parameter)
    return parameter
