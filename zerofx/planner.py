"""Trace and schedule a step for any number of ranks on fake tensors: no process group, no weights, no compiler, nothing computed."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerofx import _torch, sharding
from zerofx.backend import CompiledRuntime
from zerofx.config import Config
from zerofx.errors import ConfigError
from zerofx.groups import Group
from zerofx.module import binding_of
from zerofx.params import Param
from zerofx.passes import STAGES
from zerofx.program import Phase, Program, results_of
from zerofx.render import Schedule


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
    fakes = _Fakes()
    made, args, kwargs = fakes.model(model), fakes.inputs(tuple(args)), fakes.inputs(dict(kwargs or {}))
    # a mesh of all ranks, that no process group joins
    mesh = DeviceMesh("cpu", torch.arange(world_size), _init_backend=False, _rank=0)
    group = Group("planned", world_size, 0, transport)
    names = sharding.names_of(made)
    with fakes.mode:
        sharding.install(made, _PlannedRuntime, settings, mesh, group, sharding.params_of(names, settings, group), names)
    binding = binding_of(made)
    assert binding is not None
    runtime = binding.runtime
    assert isinstance(runtime, _PlannedRuntime)
    runtime.fakes = fakes
    try:
        made(*args, **kwargs)
    except _torch.DataDependentOutputException as error:
        raise ConfigError(
            f"the forward of {type(model).__name__} depends on the values of its data ({error.func})",
            where=_user_line(error),
            why="a plan has shapes only: which way such a branch goes is known when it runs",
            remedy="plan the model without that branch, or run it and print zerofx.schedule(model)",
        ) from error
    schedule = runtime.schedule()
    assert schedule is not None
    lower = STAGES[settings.stage].including(settings.passes)
    graphs = runtime.last_step
    scheduled = [*(found.forward for found in graphs), *(found.backward for found in reversed(graphs))]
    programs = tuple(program for program in scheduled if program is not None)
    return Traced(programs, tuple(lower.run(program, []) for program in programs), runtime.params, runtime.wholes.buckets, schedule)


def _user_line(error: Exception) -> str:
    """Return the innermost line that is neither torch's nor ours."""
    ours = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sharding))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((*ours, "<"))]
    return f"{frames[-1].filename}:{frames[-1].lineno}, {frames[-1].line}" if frames else "the forward"


class _Fakes:
    """Fake tensors of one plan: shapes, dtypes and devices without memory."""

    def __init__(self) -> None:
        self.mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)

    def model(self, model: nn.Module) -> nn.Module:
        """Copy a model, with a fake for each parameter and buffer; tied ones stay tied."""
        memo: dict[int, Any] = {}
        for param in model.parameters():
            memo[id(param)] = nn.Parameter(self._like(param), requires_grad=param.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = self._like(buffer)
        return copy.deepcopy(model, memo)

    def inputs(self, value: Any) -> Any:
        """Replace the tensors of nested inputs; their sizes are static, whatever was planned before."""
        return _torch.apply_to_tensors(self._static, value)

    def _static(self, tensor: Tensor) -> Tensor:
        fake = self._like(tensor)
        _torch.mark_static([fake])
        return fake

    def _like(self, tensor: Tensor) -> Tensor:
        return self.blank(tensor.detach(), torch.device("cpu") if tensor.is_meta else tensor.device)

    def blank(self, like: Tensor, device: torch.device) -> Tensor:
        """Make a new fake tensor."""
        with self.mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


class _PlannedRuntime(CompiledRuntime):
    """Runs a forward on fakes: graphs are scheduled and lowered, and give results without values."""

    fakes: _Fakes

    def new_compiler(self) -> Any:
        return _Outlines(self)

    def gather(self, param: Param, shard: Tensor) -> Tensor:
        return shard.new_empty(param.shape, dtype=param.compute_dtype)


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
