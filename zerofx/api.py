"""The front door: shard and compile a model, read its schedule, and the contexts around a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from zerofx import _torch, groups, runtime, sharding
from zerofx.backend import CompiledRuntime
from zerofx.config import Config, parse_bytes
from zerofx.errors import CompilerError, RankMismatchError, ShardingError, ZerofxError
from zerofx.groups import Group
from zerofx.hardware import THIS_MACHINE, Hardware
from zerofx.hardware import hardware as named_hardware
from zerofx.hooks import HookedRuntime
from zerofx.module import binding_of, bindings
from zerofx.params import Param
from zerofx.passes import STAGES
from zerofx.predictions import predict
from zerofx.render import Schedule
from zerofx.runtime import Runtime

ModelT = TypeVar("ModelT", bound=nn.Module)


def compile(
    model: ModelT,
    *,
    stage: int = 3,
    mesh: DeviceMesh | None = None,
    precision: MixedPrecisionPolicy | None = None,
    memory_limit: int | str | None = None,
    backend: str = "inductor",
    hardware: Hardware | str | None = None,
    passes: Sequence[Any] = (),
    config: Config | None = None,
) -> ModelT:
    """Shard a model's states over the ranks and compile its steps, in place; return the same model.

    Every parameter becomes a DTensor of the same logical shape under its old name. Rank 0's parameters and buffers
    are the ones that all ranks start from. ``precision`` sets the dtypes of compute and of reductions; parameters and gradients
    keep their own. ``memory_limit`` (bytes, or ``"2GiB"``) bounds whole parameters and
    communication buffers in flight. ``hardware`` (``"this_machine"``, ``"h100"``, or your figures) is what the schedule is optimized
    for; without it, communication starts as early as it may. ``passes`` join the pipeline by their levels. ``config`` replaces all
    other settings.

    Raises ConfigError, ShardingError or CompilerError, on every rank alike and before the model changes;
    RankMismatchError where ranks pass different models or settings.
    Source: ZeRO (Rajbhandari et al., 2020), sections 5 and 7.
    """
    local: ZerofxError | None = None
    settings, device = Config(), torch.device("cpu")
    try:
        settings = config or Config(
            stage=stage,
            backend=backend,
            memory_limit_bytes=parse_bytes(memory_limit, "memory_limit"),
            hardware=hardware,
            passes=tuple(passes),
            **({} if precision is None else asdict(precision)),
        )
        STAGES[settings.stage].including(settings.passes)
        if settings.hardware not in (None, THIS_MACHINE):
            settings = replace(settings, hardware=named_hardware(settings.hardware))
        device = _check_model(model)
        _check_compiler(settings, device)
    except ZerofxError as error:
        local = error
    try:
        mesh, group = groups.resolve_mesh(mesh, device.type)
    except ZerofxError:
        if local is not None:
            raise local from None
        raise
    names = sharding.names_of(model) if local is None else {}
    params = sharding.params_of(names, settings, group)
    _agree(local, settings, params, names, [] if local else model.named_buffers(), mesh, group)
    if settings.hardware == THIS_MACHINE:
        settings = replace(settings, hardware=named_hardware(THIS_MACHINE, mesh, group))
    with torch.no_grad():
        groups.broadcast([*names, *model.buffers()], mesh, group)
    kind = HookedRuntime if settings.backend == "hooks" else CompiledRuntime
    sharding.install(model, kind, settings, mesh, group, params, names)
    return model


def schedule(model: nn.Module) -> Schedule:
    """Return the schedule of the last compiled training step (or forward, where none was trained).

    Where the model was compiled for some hardware, with the predicted timeline of that step.
    Raises ShardingError for a model that was not compiled, or has not run yet.
    """
    state = _runtime_of(model)
    found, machine = state.schedule(), state.config.machine
    if found is None:
        raise ShardingError(
            "there is no schedule yet",
            where="zerofx.schedule",
            why="a schedule is what a step runs, and no forward has run yet",
            remedy="run one step first",
        )
    if isinstance(state, CompiledRuntime) and machine is not None:
        step = predict(*state.lowered(), state.wholes.buckets, machine)
        return replace(found, timeline=step.timeline, alive_bytes=step.alive_bytes)
    return found


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Within, backwards do not average gradients at stages 0 and 1; the next backward outside averages the sum.

    Stages 2 and 3 hold no whole gradients: they reduce every backward and add up shards, inside as outside.
    """
    with runtime.no_sync(_runtime_of(model)):
        yield


@contextmanager
def gathered(model: nn.Module, *, writeback: bool = False) -> Iterator[dict[str, Tensor]]:
    """Gather whole parameters: yields a mapping of qualified name to a fresh tensor of the logical shape, on every rank.

    With ``writeback``, rank 0's edits go back to the shards at the end. All ranks must enter together.
    """
    found = _runtime_of(model)
    with torch.no_grad():
        wholes = [found.whole(param.index) for param in found.params]
    yield {name: whole for param, whole in zip(found.params, wholes, strict=True) for name in param.names}
    if writeback:
        with torch.no_grad():
            groups.broadcast(wholes, found.mesh, found.group)
            for param, whole in zip(found.params, wholes, strict=True):
                source = found.shard_like(param.index, whole)
                _torch.local_tensor(found.tensors[param.index]).copy_(_torch.local_tensor(source))


def _runtime_of(model: nn.Module) -> Runtime:
    binding = binding_of(model)
    if binding is None:
        raise ShardingError(
            f"{type(model).__name__} was not compiled by zerofx",
            where="the model argument",
            why="only a compiled model has shards and a schedule",
            remedy="call zerofx.compile(model) first, and pass the model that it returns",
        )
    found = binding.runtime
    assert isinstance(found, Runtime)
    return found


def _check_model(model: nn.Module) -> torch.device:
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
    sharded = next((name for name, tensor in named if isinstance(tensor, DTensor)), None)
    if any(True for _ in bindings(model)) or sharded is not None:
        raise ShardingError(
            "the model is sharded already" + (f" (parameter {sharded})" if sharded else ""),
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
    owners: dict[tuple[int, int], str] = {}
    for name, param in named:
        if param.layout is torch.strided and param.numel() and not param.is_meta and type(param) is nn.Parameter:
            other = owners.setdefault((param.data_ptr(), param.numel()), name)
            if other != name:
                raise ShardingError(
                    f"{other} and {name} are two parameters in the same memory",
                    where=where,
                    why="each would get a shard and an optimizer state of its own, and they would no longer be tied",
                    remedy="tie them as one parameter (b.weight = a.weight) before zerofx.compile",
                )
    tensors = [*named, *model.named_buffers()]
    meta = [name for name, tensor in tensors if tensor.is_meta]
    if meta:
        raise ShardingError(
            f"{meta[0]} is on the meta device" + (f" (and {len(meta) - 1} more)" if len(meta) > 1 else ""),
            where=where,
            why="a meta tensor has no values to shard",
            remedy="build the model on a real device, or give it values first (to_empty and its own initialisation)",
        )
    first_name, first = named[0]
    for name, tensor in tensors:
        if tensor.device != first.device:
            raise ShardingError(
                f"{name} is on {tensor.device}, {first_name} is on {first.device}",
                where=where,
                why="the shards of one model live on one device per rank",
                remedy=f"move the model to one device: model.to({str(first.device)!r})",
            )
    for name, tensor in named:
        if tensor.is_complex():
            raise ShardingError(
                f"{name} is complex ({tensor.dtype})",
                where=where,
                why="collectives carry no complex numbers",
                remedy="store it as a real tensor with a last dimension of 2, and use torch.view_as_complex in forward",
            )
        if tensor.layout is not torch.strided or isinstance(tensor, nn.parameter.UninitializedParameter):
            raise ShardingError(
                f"{name} is no ordinary dense tensor",
                where=where,
                why="a lazy, sparse or quantised tensor has no rows to cut",
                remedy="run a lazy module once, or store a dense tensor, before zerofx.compile",
            )
    return first.device


def _check_compiler(settings: Config, device: torch.device) -> None:
    complaint = _torch.check_cxx_compiler() if settings.backend == "inductor" and device.type == "cpu" else None
    if complaint is not None:
        raise CompilerError(
            "Inductor finds no C++ compiler",
            where='zerofx.compile(backend="inductor")',
            why=complaint.splitlines()[0],
            remedy='install g++ (or set CXX), or pass backend="aot_eager"',
        )


def _agree(
    local: ZerofxError | None,
    settings: Config,
    params: tuple[Param, ...],
    tensors: Iterable[nn.Parameter],
    buffers: Iterable[tuple[str, Tensor]],
    mesh: DeviceMesh,
    group: Group,
) -> None:
    """Let all ranks see whether any has an error, or another model or setting; then raise on all of them."""
    answers = groups.exchange((local, _described(settings, params, tensors, buffers)), mesh, group)
    if local is not None:
        raise local
    for rank, (error, _) in enumerate(answers):
        if error is not None:
            raise RankMismatchError(
                f"rank {rank} cannot compile: {error.what}",
                where=error.where,
                why=error.why or "see the error of that rank",
                remedy=error.remedy,
            ) from error
    for rank, (_, described) in enumerate(answers):
        if described != answers[0][1]:
            pairs = itertools.zip_longest(answers[0][1], described, fillvalue="nothing more")
            here, there = next((here, there) for here, there in pairs if here != there)
            raise RankMismatchError(
                f"rank 0 and rank {rank} compile different things",
                where="zerofx.compile, before the first collective of the model",
                why=f"rank 0 has {here}; rank {rank} has {there}",
                remedy="build the same model with the same settings on every rank",
            )


def _described(
    settings: Config, params: tuple[Param, ...], tensors: Iterable[nn.Parameter], buffers: Iterable[tuple[str, Tensor]]
) -> list[str]:
    """Describe what must be equal on all ranks, one line each, for a message that names the first difference."""
    lines = [f"{field}={value!r}" for field, value in asdict(settings).items() if field != "passes"]
    lines += [f"pass {item!r}" for item in settings.passes]
    for param, tensor in zip(params, tensors, strict=True):
        trained = "trained" if tensor.requires_grad else "frozen"
        lines.append(f"parameter {' = '.join(param.names)} {param.shape} {param.dtype} {trained}")
    return [*lines, *(f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in buffers)]
