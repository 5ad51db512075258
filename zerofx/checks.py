"""What can be sharded and compiled here: the checks before a model changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zerofx import _torch
from zerofx.config import Config
from zerofx.errors import CompilerError, ConfigError, ShardingError
from zerofx.module import bindings, own_methods
from zerofx.names import nearest
from zerofx.recomputing import is_block, matches, policy_of


def check_model(model: nn.Module) -> torch.device:
    """Check that a model can be sharded; return its device."""
    where = f"zerofx.compile, {type(model).__name__}"
    if not isinstance(model, nn.Module):
        raise ShardingError(
            f"{type(model).__name__} is not a torch.nn.Module",
            where="zerofx.compile",
            why="zerofx shards the parameters of a module, in place",
            remedy="pass a module, not a function or the output of torch.compile on one",
        )
    named = list(model.named_parameters())
    if any(True for _ in bindings(model)) or any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ShardingError(
            "the model is sharded already",
            where=where,
            why="zerofx.compile shards in place, once",
            remedy="build a new model, or keep using this one",
        )
    if not named:
        raise ShardingError("the model has no parameters", where=where, why="there is nothing to shard", remedy="run it as it is")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ShardingError(
                f"{name or 'the model'} is a ScriptModule",
                where=where,
                why="its code is compiled already, and reads parameters that cannot be replaced by shards",
                remedy="pass the module that it was scripted from",
            )
    check_memory(named, where)
    tensors = [*named, *model.named_buffers()]
    meta = [name for name, tensor in tensors if tensor.is_meta]
    if meta and not all(tensor.is_meta for _, tensor in named):
        raise ShardingError(
            f"{meta[0]} is on the meta device" + (f" (and {len(meta) - 1} more)" if len(meta) > 1 else ""),
            where=where,
            why=f"{next(name for name, tensor in named if not tensor.is_meta)} has values, and a meta tensor has none to shard",
            remedy="build the whole model on the meta device, or none of it",
        )
    first_name, first = named[0]
    for name, tensor in tensors:
        if tensor.device != first.device and not first.is_meta:
            raise ShardingError(
                f"{name} is on {tensor.device}, {first_name} is on {first.device}",
                where=where,
                why="the shards of one model live on one device per rank",
                remedy=f"move the model to one device: model.to({str(first.device)!r})",
            )
    for name, tensor in named:
        if tensor.layout is not torch.strided or isinstance(tensor, nn.parameter.UninitializedParameter):
            raise ShardingError(
                f"{name} is no ordinary dense tensor",
                where=where,
                why="a lazy, sparse or quantised tensor has no rows to cut",
                remedy="run a lazy module once, or store a dense tensor, before zerofx.compile",
            )
    return first.device


def check_memory(named: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Check that no two parameters lie in the same memory."""
    owners: dict[tuple[int, int], str] = {}
    for name, param in named:
        if param.layout is torch.strided and param.numel() and not param.is_meta and type(param) is nn.Parameter:
            # a storage without bytes has no address
            other = owners.setdefault((param.data_ptr() or id(param.untyped_storage()), param.numel()), name)
            if other != name:
                raise ShardingError(
                    f"{other} and {name} are two parameters in the same memory",
                    where=where,
                    why="each would get a shard and an optimizer state of its own, and they would no longer be tied",
                    remedy="tie them as one parameter (b.weight = a.weight) before zerofx.compile",
                )


def mesh_of(model: nn.Module, mesh: DeviceMesh | None, where: str) -> DeviceMesh | None:
    """Return the mesh that a model's parameters are sharded over already, else the given one."""
    for name, tensor in model.named_parameters():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh if mesh is None else mesh
            if tensor.device_mesh != mesh:
                raise ShardingError(
                    f"{name} is sharded over {tensor.device_mesh}, the rest over {mesh}",
                    where=f"{where}, {type(model).__name__}",
                    why="the ranks of one mesh share a model",
                    remedy="pass the same mesh to zerofx.init and zerofx.compile, or pass none to zerofx.compile",
                )
    return mesh


def check_config(config: object, where: str) -> None:
    """Check that settings are a Config, if any are given."""
    if not isinstance(config, Config | None):
        raise ConfigError(
            f"config is a {type(config).__name__}",
            where=where,
            why="it is a zerofx.Config",
            remedy="pass Config(...), or the config of what Config.from_deepspeed returned",
        )


def check_methods(model: nn.Module, methods: Sequence[str]) -> None:
    """Check that a model's class has the methods that are named."""
    known = own_methods(type(model))
    for name in methods:
        if name not in known:
            raise ConfigError(
                f"{name!r} is no method of {type(model).__name__}",
                where="zerofx.compile(methods=...)",
                why=f"its own public methods are {', '.join(known) or 'none'}",
                remedy="name methods of the model's class; its forward needs no naming",
            )


def check_recompute(model: nn.Module, settings: Config) -> None:
    """Check that a model has the modules whose activations are to be computed again."""
    known = [name for name, _ in model.named_modules() if name]
    given = settings.recompute
    recurrent = next((name for name, module in model.named_modules() if isinstance(module, nn.RNNBase)), None)
    if settings.backend == "hooks" and policy_of(given) is not None and recurrent is not None:
        raise ConfigError(
            f'recompute={given!r} cannot be had with backend="hooks"',
            where=f"zerofx.compile(recompute=...), {recurrent or type(model).__name__}",
            why="torch's recurrent kernels write into what its selective checkpoint keeps, unseen, and gradients would be wrong",
            remedy='pass recompute="blocks" or patterns of names, or compile',
        )
    patterns = given if isinstance(given, tuple) else ()
    missing = next((pattern for pattern in patterns if not any(matches(name, (pattern,)) for name in known)), None)
    if missing is not None or (given == "blocks" and not any(map(is_block, known))):
        raise ConfigError(
            f"recompute={given!r} " + ("finds no repeated blocks" if missing is None else f"names no module by {missing!r}"),
            where=f"zerofx.compile(recompute=...), {type(model).__name__}",
            why=f"the modules within the model are {', '.join(known[:8])}{' ...' if len(known) > 8 else ''}"
            + ("; a block is an item of a list of modules" if missing is None else ""),
            remedy=(nearest(missing, known) if missing else "") or 'name modules by patterns, or pass "selective"',
        )


def check_compiler(settings: Config, device: torch.device) -> None:
    complaint = _torch.check_cxx_compiler() if settings.backend == "inductor" and device.type == "cpu" else None
    if complaint is not None:
        raise CompilerError(
            "Inductor finds no C++ compiler",
            where='zerofx.compile(backend="inductor")',
            why=complaint.splitlines()[0],
            remedy='install g++ (or set CXX), or pass backend="aot_eager"',
        )
