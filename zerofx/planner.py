"""Trace and schedule a step for any number of ranks on fake tensors: no process group, no weights, no compiler, nothing computed."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from zerofx import _torch, oplog, sharding
from zerofx.backend import Backend, CompiledRuntime, Tracing
from zerofx.compilation import Compilation
from zerofx.config import Config
from zerofx.errors import ConfigError
from zerofx.groups import Group
from zerofx.keepfp32 import kept_modules
from zerofx.module import binding_of
from zerofx.params import Param
from zerofx.passes import STAGES
from zerofx.periods import Irregular, Line, gives, lengthened
from zerofx.program import Phase, Program, results_of
from zerofx.render import Schedule
from zerofx.runtime import Forward
from zerofx.stacks import Stack, stacks_of
from zerofx.unroll import Unrolled, unrolled
from zerofx.wholes import refresh_buckets


@dataclass(frozen=True, slots=True)
class Traced:
    """The programs of one training step in the order in which they run, scheduled and lowered, and the facts of its model."""

    scheduled: tuple[Program, ...]
    lowered: tuple[Program, ...]
    params: tuple[Param, ...]
    refresh_buckets: tuple[tuple[int, ...], ...]
    schedule: Schedule

    @property
    def forwards(self) -> tuple[Program, ...]:
        """The lowered forwards."""
        return tuple(program for program in self.lowered if program.phase is Phase.FORWARD)

    @property
    def backwards(self) -> tuple[Program, ...]:
        """The lowered backwards."""
        return tuple(program for program in self.lowered if program.phase is Phase.BACKWARD)


def trace(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None, settings: Config, world_size: int, transport: str
) -> Traced:
    """Return what ``world_size`` ranks would compile for one training step.

    The model and its inputs may be on any device, meta included, and stay as they are.
    Raises ConfigError where the forward needs values, as a branch on data does.
    """
    for stack in (_repeated(model, args, kwargs, settings), None):
        try:
            return _traced(model, args, kwargs, settings, world_size, transport, stack)
        except Irregular:
            continue  # what repeats in eager mode does not as it is traced: trace all of it
    raise AssertionError


def _repeated(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None, settings: Config) -> Stack | None:
    """Return the stack of layers of which a few tell all, by what the whole model runs in eager mode; None where there is none."""
    fakes = _Fakes(settings.param_dtype)
    inputs = fakes.inputs((tuple(args), dict(kwargs or {})))

    def run(stack: Stack, *, whole: bool) -> Line:
        made = fakes.model(model)
        if not whole:
            stack.cut(made)
        with fakes.mode:
            return oplog.log(made, stack if whole else stack.least, lambda: made(*inputs[0], **inputs[1]))

    for stack in stacks_of(model):
        try:
            few = run(stack, whole=False)
            lengthened(few, stack.extra)  # before the whole model runs
            if gives(few, stack.extra, run(stack, whole=True)):
                return stack
        except Irregular:
            continue
        except Exception:  # whatever a model raises: it will again when it is traced, and be told from there
            return None
    return None


def _traced(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    settings: Config,
    world_size: int,
    transport: str,
    stack: Stack | None,
) -> Traced:
    """Trace a model, or a few layers of its stack and write down the others. Raises Irregular where the traced graph does not repeat."""
    settings = replace(settings, timeout_s=None)  # there are no ranks to agree with
    fakes = _Fakes()
    made, args, kwargs = fakes.model(model), fakes.inputs(tuple(args)), fakes.inputs(dict(kwargs or {}))
    # a mesh of all ranks, that no process group joins
    mesh = DeviceMesh("cpu", torch.arange(world_size), _init_backend=False, _rank=0)
    group = Group("planned", world_size, 0, transport)
    params = sharding.params_of(sharding.names_of(made), settings, group, kept_modules(made, settings))
    if stack is not None:
        stack.cut(made)
    names, kept = sharding.names_of(made), kept_modules(made, settings)
    with fakes.mode:
        traced = sharding.params_of(names, settings, group, kept)
        sharding.install(made, _PlannedRuntime, settings, mesh, group, traced, names, kept)
    binding = binding_of(made)
    assert binding is not None
    runtime = binding.runtime
    assert isinstance(runtime, _PlannedRuntime)
    runtime.fakes, runtime.stack, runtime.all_params = fakes, stack, params
    try:
        with _torch.without_recompile_limit():  # each plan compiles the forward of a model of its own
            made(*args, **kwargs)
        graphs = runtime.last_step
    except _torch.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, Irregular):
            raise error.inner_exception from None
        if not isinstance(error.inner_exception, _Scheduled):
            raise
        graphs = [error.inner_exception.compilation]
    except _torch.DataDependentOutputException as error:
        raise ConfigError(
            f"the forward of {type(model).__name__} depends on the values of its data ({error.func})",
            where=_user_line(error),
            why="a plan has shapes only: which way such a branch goes is known when it runs",
            remedy="plan the model without that branch, or run it and print zerofx.schedule(model)",
        ) from error
    scheduled = [*(found.forward for found in graphs), *(found.backward for found in reversed(graphs))]
    programs, buckets = tuple(program for program in scheduled if program is not None), refresh_buckets(settings, params)
    lower = STAGES[settings.stage].including(settings.passes)
    lowered = tuple(lower.run(program, []) for program in programs)
    return Traced(programs, lowered, params, buckets, Schedule.of(programs, params, group, settings, buckets))


def _user_line(error: Exception) -> str:
    """Return the innermost line that is neither torch's nor ours."""
    ours = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sharding))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((*ours, "<"))]
    return f"{frames[-1].filename}:{frames[-1].lineno}, {frames[-1].line}" if frames else "the forward"


class _Fakes:
    """Fake tensors of one plan: shapes, dtypes and devices without memory; floating ones in another dtype, if one is given."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
        self._dtype = dtype

    def model(self, model: nn.Module) -> nn.Module:
        """Copy a model, with a fake for each parameter and buffer; tied ones stay tied."""
        memo: dict[int, Any] = {}
        for param in model.parameters():
            memo[id(param)] = nn.Parameter(self._like(param), requires_grad=param.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = self._like(buffer)
        return copy.deepcopy(model, memo)

    def inputs(self, value: Any) -> Any:
        """Replace the tensors of nested inputs."""
        return _torch.apply_to_tensors(self._like, value)

    def _like(self, tensor: Tensor) -> Tensor:
        made = self.blank(tensor.detach(), torch.device("cpu") if tensor.is_meta else tensor.device)
        if self._dtype is None or not made.is_floating_point():
            return made
        with self.mode:
            return made.to(self._dtype)

    def blank(self, like: Tensor, device: torch.device) -> Tensor:
        """Make a new fake tensor."""
        with self.mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


class _PlannedRuntime(CompiledRuntime):
    """Runs a forward on fakes: graphs are scheduled and lowered, and give results without values."""

    fakes: _Fakes
    stack: Stack | None  # what was cut to the least depth
    all_params: tuple[Param, ...]

    def run(self, plain: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # their sizes are static, whatever was planned before; here, because what precision casts is a tensor anew
        _torch.mark_static(leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        return super().run(plain, module, args, kwargs)

    def new_tracing(self, backend: Backend, *, is_whole: bool) -> Tracing:
        if self.stack is None:
            return super().new_tracing(backend, is_whole=is_whole)
        return _FewLayers(backend, self.stack, self.all_params, is_whole=is_whole)

    def new_compiler(self) -> Any:
        return _Outlines(self)

    def new_disk(self) -> None:
        """What has no values goes nowhere."""

    def gather(self, param: Param, shard: Tensor) -> Tensor:
        return shard.new_empty(param.shape, dtype=param.compute_dtype)


class _FewLayers(Tracing):
    """Schedules all layers of a model of which a few are traced, and ends the tracing: what comes behind would go on with the few."""

    def __init__(self, backend: Backend, stack: Stack, params: tuple[Param, ...], *, is_whole: bool) -> None:
        if not is_whole:
            raise Irregular("the forward breaks into several graphs")
        super().__init__(backend, Compilation(), is_whole)
        self._stack, self._params = stack, params

    def partition(self, joint: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> NoReturn:
        static = kwargs.pop("static_lifetime_input_indices", None) or ()
        whole = self._unrolled(joint, kwargs["num_fwd_outputs"], static)
        self.splitting.split(whole.program, joint_inputs, static_lifetime_input_indices=whole.static_inputs, **kwargs)
        raise _Scheduled(self.compilation)

    def inference(self, gm: GraphModule, inputs: Sequence[Any]) -> NoReturn:
        self.schedule_inference(self._unrolled(gm, len(results_of(gm.graph)), ()).program)
        raise _Scheduled(self.compilation)

    def _unrolled(self, joint: GraphModule, output_count: int, static_inputs: Sequence[int]) -> Unrolled:
        buckets = refresh_buckets(self.backend.runtime.config, self._params)
        return unrolled(self.joint(joint), self._stack, self._params, buckets, output_count, static_inputs)


class _Scheduled(Exception):
    """All layers are scheduled."""

    def __init__(self, compilation: Compilation) -> None:
        self.compilation = compilation


class _Outlines:
    """In the place of a compiler: a program becomes a function that gives results without values."""

    region_count = 0
    distinct_count = 0

    def __init__(self, runtime: _PlannedRuntime) -> None:
        self._runtime = runtime

    def tape(self, program: Program) -> Callable[[list[Any]], list[Any]]:
        """Return a function that takes a list of inputs, empties it, and returns new fakes."""
        values = [None if node is None else node.meta["val"] for node in results_of(program.graph)]

        def run(inputs: list[Any]) -> list[Any]:
            inputs.clear()
            fakes = self._runtime.fakes
            return [fakes.blank(value, value.device) if isinstance(value, Tensor) else value for value in values]

        return run
