"""The front door: shard and compile a model, read its schedule, and the contexts around a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from zerofx import checks, groups, runtime, sharding
from zerofx.backend import CompiledRuntime
from zerofx.config import Config
from zerofx.errors import ShardingError, ZerofxError
from zerofx.hardware import THIS_MACHINE, Hardware
from zerofx.hardware import hardware as named_hardware
from zerofx.hooks import HookedRuntime
from zerofx.keepfp32 import kept_modules
from zerofx.module import runtime_of
from zerofx.offload import Offload
from zerofx.params import Param
from zerofx.passes import STAGES
from zerofx.precision import precision_fields
from zerofx.predictions import predict
from zerofx.render import Schedule
from zerofx.runtime import Runtime
from zerofx.units import parse_bytes

ModelT = TypeVar("ModelT", bound=nn.Module)


def compile(
    model: ModelT,
    *,
    stage: int = 3,
    mesh: DeviceMesh | None = None,
    precision: MixedPrecisionPolicy | str | None = None,
    keep_fp32: str | Sequence[str] = (),
    reduce: str = "mean",
    methods: Sequence[str] = (),
    memory_limit: int | str | None = None,
    recompute: str | float | Sequence[str] | Callable[..., Any] | None = None,
    offload: Offload | str | Mapping[str, Any] | None = None,
    backend: str = "inductor",
    hardware: Hardware | str | None = None,
    passes: Sequence[Any] = (),
    config: Config | None = None,
) -> ModelT:
    """Shard a model's states over the ranks and compile its steps, in place; return the same model.

    Every parameter becomes a DTensor of the same logical shape under its old name. Rank 0's parameters and buffers
    are the ones that all ranks start from; shards that ``zerofx.init`` left are kept. A model on the meta device stays there until
    ``load_state_dict`` with whole values, or an initialisation inside ``zerofx.init(model)``; what has no values, a forward refuses.

    ``precision`` sets the dtypes of compute and of reductions: ``"bf16"`` and ``"fp16"`` (both average gradients in fp32), ``"fp32"``,
    or torch's policy; parameters and gradients keep their own. Modules that ``keep_fp32`` names (by class, or by a pattern of
    qualified names) compute in fp32 all the same, as batch norms with running statistics always do. A gradient is the mean of those
    of all ranks; with ``reduce="sum"`` it is their sum, for a loss that each rank divides by a count over all ranks (tokens).
    ``methods`` names those that are called from outside, as ``forward`` is. ``memory_limit`` (bytes, or ``"2GiB"``) bounds whole
    parameters and communication buffers in flight. ``recompute`` says which activations the backward computes again instead of
    keeping them: ``"blocks"`` (all within the repeated blocks), ``"selective"`` (all but products and attention), patterns of
    qualified names, a policy as torch's ``create_selective_checkpoint_contexts`` takes, how many to keep at most (a fraction such
    as 0.5, or bytes), or ``"auto"``: no more than makes a step fit. Then ``memory_limit`` bounds all that a step holds beside shards
    and optimizer states, and what costs the least time for each byte is given up first: activations, overlap, or parameters that are
    kept whole; batches of other sizes are fitted anew. ``offload`` (``{"optimizer": "disk:DIRECTORY", "parameters": ...}``, or ``"disk"``
    for all of it in the temporary directory) keeps what it names of the training state in files, and in memory only what is being worked
    on; ``{"activations": ...}`` so many of what a forward saves as it takes for all that a step allocates to fit ``memory_limit``.
    ``hardware`` (``"this_machine"``, ``"h100"``, or your figures) is what the schedule is optimized for; without it, communication
    starts as early as it may. ``passes`` join the pipeline by their levels. ``config`` replaces all other settings.

    Raises ConfigError, ShardingError or CompilerError, on every rank alike and before the model changes;
    RankMismatchError where ranks pass different models or settings. A forward raises MemoryLimitError where a limit cannot be met.
    Source: ZeRO (Rajbhandari et al., 2020), sections 5 and 7.
    """
    local: ZerofxError | None = None
    settings, device = Config(), torch.device("cpu")
    kept: tuple[nn.Module, ...] = ()
    try:
        checks.check_config(config, "zerofx.compile(config=...)")
        settings = config or Config(
            stage=stage,
            backend=backend,
            reduce=reduce,
            methods=tuple(methods),
            memory_limit_bytes=parse_bytes(memory_limit, "memory_limit", "zerofx.compile(memory_limit=...)"),
            recompute=tuple(recompute) if isinstance(recompute, list) else recompute,  # type: ignore[arg-type]
            offload=offload,
            hardware=hardware,
            passes=tuple(passes),
            keep_fp32=(keep_fp32,) if isinstance(keep_fp32, str) else tuple(keep_fp32),
            **precision_fields(precision, "zerofx.compile(precision=...)"),
        )
        STAGES[settings.stage].including(settings.passes)
        if settings.hardware not in (None, THIS_MACHINE):
            settings = replace(settings, hardware=named_hardware(settings.hardware))
        device = checks.check_model(model)
        checks.check_methods(model, settings.methods)
        checks.check_recompute(model, settings)
        if isinstance(settings.offload, Offload):
            settings.offload.check(device.type)
        kept = kept_modules(model, settings)
        checks.check_compiler(settings, device)
        mesh = checks.mesh_of(model, mesh, "zerofx.compile")
    except ZerofxError as error:
        local = error
    try:
        mesh, group = groups.resolve_mesh(mesh, groups.device_type() if device.type == "meta" else device.type)
    except ZerofxError:
        if local is not None:
            raise local from None
        raise
    names = sharding.names_of(model) if local is None else {}
    params = sharding.params_of(names, settings, group, kept)
    groups.agree(
        local,
        _described(settings, params, names, [] if local else model.named_buffers()),
        mesh,
        group,
        doing="compile",
        where="zerofx.compile, before the first collective of the model",
        remedy="build the same model with the same settings on every rank",
    )
    if settings.hardware == THIS_MACHINE:
        settings = replace(settings, hardware=named_hardware(THIS_MACHINE, mesh, group))
    with torch.no_grad():
        groups.broadcast([tensor for tensor in (*names, *model.buffers()) if not _origin(tensor)], mesh, group)
    kind = HookedRuntime if settings.backend == "hooks" else CompiledRuntime
    sharding.install(model, kind, settings, mesh, group, params, names, kept)
    return model


def schedule(model: nn.Module) -> Schedule:
    """Return the schedule of the last compiled training step (or forward, where none was trained).

    Where the model was compiled for some hardware, with the predicted timeline of that step.
    Raises ShardingError for a model that was not compiled, or has not run yet.
    """
    state: Runtime = runtime_of(model)
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
    with runtime.no_sync(runtime_of(model)):
        yield


def _described(
    settings: Config, params: tuple[Param, ...], tensors: Iterable[nn.Parameter], buffers: Iterable[tuple[str, Tensor]]
) -> list[str]:
    """Describe what must be equal on all ranks, one line each, for a message that names the first difference."""
    lines = [f"{field.name}={_named(getattr(settings, field.name))}" for field in fields(settings) if field.name != "passes"]
    lines += [f"pass {item!r}" for item in settings.passes]
    for param, tensor in zip(params, tensors, strict=True):
        trained = "trained" if tensor.requires_grad else "frozen"
        lines.append(f"parameter {' = '.join(param.names)} {param.shape} {param.dtype} {trained}{_origin(tensor)}")
    return [*lines, *(f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}{_origin(buffer)}" for name, buffer in buffers)]


def _named(value: Any) -> str:
    """Describe a setting; a function by its name, as its address differs between ranks, and a mesh by its shape."""
    if isinstance(value, DeviceMesh):
        return f"{value.mesh_dim_names} {tuple(value.shape)}"
    return getattr(value, "__qualname__", type(value).__qualname__) if callable(value) else repr(value)


def _origin(tensor: Tensor) -> str:
    """Say how the ranks come to the same values of a tensor, where not by a broadcast."""
    sharded = f", sharded as {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return sharded + (", on the meta device" if tensor.is_meta else "")
