"""Say what a training step costs before it runs: seconds, bytes and traffic on any number of ranks of any hardware."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from zerofx import _torch, formulas, liveness, pictures, planner, shapes, timeline
from zerofx.config import Config, parse_bytes
from zerofx.errors import ConfigError
from zerofx.hardware import hardware as named_hardware
from zerofx.liveness import Peak, Piece
from zerofx.machine import Hardware
from zerofx.params import Param
from zerofx.program import Program
from zerofx.render import Schedule
from zerofx.simulate import Kind, Task, Timeline, simulate
from zerofx.steps import Step, steps_of
from zerofx.timeline import Moment


@dataclass(frozen=True, slots=True)
class Plan:
    """One optimizer step of each rank, as planned. Bytes are of one rank, ``traffic_bytes`` what it sends, by kind of collective.

    ``states_bytes`` are there between steps, ``peak_bytes`` at once at most, by kind; ``exposed_s`` is what waiting for communication
    costs, ``stolen_s`` what driving it takes from computing; ``mfu`` the share of the peak flops, causal attention counted in full.
    """

    hardware: str
    stage: int
    world_size: int
    micro_batches: int
    seconds: float
    compute_s: float
    exposed_s: float
    stolen_s: float
    communication_s: float
    tokens_per_s: float
    mfu: float
    states_bytes: dict[str, int]
    peak_bytes: dict[str, int]
    peak_by_module: dict[str, int]
    traffic_bytes: dict[str, int]
    schedule: Schedule = field(repr=False)
    timeline: Timeline = field(repr=False)
    alive_bytes: tuple[int, ...] = field(repr=False)

    @property
    def total_peak_bytes(self) -> int:
        """The most bytes at any time."""
        return sum(self.peak_bytes.values())

    @property
    def step_peak_bytes(self) -> int:
        """The most bytes that a step holds above those that stay between steps."""
        return self.total_peak_bytes - sum(self.states_bytes.values())

    def __str__(self) -> str:
        rows = [
            ("seconds per optimizer step", f"{self.seconds:.4g}"),
            ("  computing", f"{self.compute_s:.4g}"),
            ("  waiting for communication", f"{self.exposed_s:.4g} of {self.communication_s:.4g}"),
            ("  driving communication", f"{max(self.stolen_s, 0.0):.4g}"),
            ("tokens per second, all ranks", f"{self.tokens_per_s:,.0f}"),
            ("model flops utilization", f"{self.mfu:.1%}"),
            ("peak of a rank, GB", f"{self.total_peak_bytes / 1e9:.2f}"),
            *((f"  {kind}", f"{size / 1e9:.2f}") for kind, size in self.peak_bytes.items() if size),
            *((f"{kind}, GB sent by a rank", f"{size / 1e9:.2f}") for kind, size in self.traffic_bytes.items() if size),
        ]
        batches = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        head = f"stage {self.stage}, {self.world_size} ranks of {self.hardware}{batches}"
        return f"{head}\n\n{tabulate(rows, tablefmt='plain', disable_numparse=True, colalign=('left', 'right'))}"

    def to_json(self) -> str:
        """Return the figures as JSON text; the schedule and the timeline have their own."""
        left_out = ("schedule", "timeline", "alive_bytes")
        return json.dumps({name: getattr(self, name) for name in self.__slots__ if name not in left_out}, indent=1)

    def to_perfetto(self, path: str | Path) -> None:
        """Write a trace that Perfetto and Chrome open: rows for computing and for each group of ranks, and a counter of bytes."""
        Path(path).write_text(pictures.perfetto(self.timeline, self.alive_bytes))

    def to_svg(self, path: str | Path) -> None:
        """Write the timeline as a picture, with the bytes alive under it."""
        Path(path).write_text(pictures.svg(self.timeline, self.alive_bytes, str(self).partition("\n")[0]))


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    world_size: int,
    hardware: str | Hardware = "h100",
    optimizer: str = "adamw",
    micro_batches: int = 1,
    config: Config | None = None,
    **settings: Any,
) -> Plan:
    """Plan one optimizer step without ranks, weights or an accelerator.

    ``args`` and ``kwargs`` are one rank's micro-batch; model and inputs may be on any device, meta included. ``settings`` are those of
    ``Config``. Raises ConfigError for settings, hardware and optimizers that are not known, and where the forward needs values;
    MemoryLimitError as ``zerofx.compile`` would.
    """
    settled = config or Config(**settings)
    machine = named_hardware(hardware)
    transport = "gloo" if machine.intra_node.cpu_s_per_byte else "nccl"
    traced = planner.trace(model, args, kwargs, settled, world_size, transport)
    standing = liveness.storages(node for program in traced.forwards for node in program.graph.nodes if node.op == "placeholder")
    forwards = [_Lowered.of(program, standing) for program in traced.forwards]
    backwards = [_Lowered.of(program, standing) for program in traced.backwards]
    params, numbers = traced.params, _optimizer_states(optimizer)
    states = _states(params, settled, numbers, micro_batches)
    moments = _moments(forwards, backwards, traced.refresh_buckets, machine, micro_batches, _update_bytes(params, numbers))
    result = simulate(moment.task for moment in moments)
    peak = max((part.peak for part in (*forwards, *backwards)), key=lambda found: found.total_bytes)
    flops = micro_batches * sum(step.kernel.flops for part in (*forwards, *backwards) for step in part.steps if step.kernel)
    tokens = micro_batches * world_size * _tokens(args, kwargs)
    return Plan(
        hardware=machine.name,
        stage=settled.stage,
        world_size=world_size,
        micro_batches=micro_batches,
        seconds=result.seconds,
        compute_s=result.compute_s,
        exposed_s=result.exposed_s,
        stolen_s=result.stolen_s,
        communication_s=result.communication_s,
        tokens_per_s=tokens / result.seconds if result.seconds else 0.0,
        mfu=flops / result.seconds / machine.peak_flops_per_s(_compute_dtype(params)) if result.seconds else 0.0,
        states_bytes=states,
        peak_bytes={**states, **{kind.value: size for kind, size in peak.by_kind.items()}},
        peak_by_module=peak.by_module,
        traffic_bytes=traced.schedule.traffic_bytes,
        schedule=traced.schedule,
        timeline=result,
        alive_bytes=tuple(sum(states.values()) + moment.alive_bytes for moment in moments),
    )


def plan_language_model(
    given: float | Path, shape: tuple[int, int], *, precision: str, stage: int, memory_limit: str | None, **options: Any
) -> Plan:
    """Plan a GPT of so many parameters, or the model of a Hugging Face config, on a micro-batch of tokens (rows, positions)."""
    tokens = torch.zeros(shape, dtype=torch.long, device="meta")
    model = shapes.hugging_face(given) if isinstance(given, Path) else shapes.gpt(given, shape[1])
    args: tuple[Any, ...] = () if isinstance(given, Path) else (tokens,)
    kwargs = {"input_ids": tokens, "labels": tokens} if isinstance(given, Path) else None
    dtype = torch.bfloat16 if precision == "bf16" else None
    config = Config(stage=stage, param_dtype=dtype, memory_limit_bytes=parse_bytes(memory_limit, "memory_limit"))
    return plan(model, args, kwargs, config=config, **options)


@dataclass(frozen=True, slots=True)
class _Lowered:
    """A lowered program and what its tape runs."""

    program: Program
    steps: list[Step]
    pieces: list[Piece]

    @staticmethod
    def of(program: Program, standing: frozenset[int]) -> _Lowered:
        steps = steps_of(program)
        return _Lowered(program, steps, liveness.pieces(program, steps, standing))

    def moments(self, machine: Hardware) -> list[Moment]:
        alive = liveness.alive_bytes(self.pieces, len(self.steps))
        return list(timeline.moments(self.program, self.steps, alive, machine))

    @property
    def peak(self) -> Peak:
        return liveness.peak(self.pieces, len(self.steps))


def _moments(
    forwards: Sequence[_Lowered],
    backwards: Sequence[_Lowered],
    buckets: Sequence[Sequence[int]],
    machine: Hardware,
    micro_batches: int,
    update_bytes: int,
) -> list[Moment]:
    """Put an optimizer step together: refreshes with the first forward only, reductions of stages 0 and 1 with the last backward."""
    program = forwards[0].program
    forward = [moment for part in forwards for moment in part.moments(machine)]
    backward = [moment for part in backwards for moment in part.moments(machine)]
    launches = list(timeline.refreshes(program.params, buckets, program.group, machine))
    waited = {moment.task.collective for moment in forward}
    late = [Task(f"forward: wait for {task.name}", Kind.WAIT, collective=task.name) for task in launches if task.name not in waited]
    fresh = [moment for moment in forward if not moment.task.collective.startswith("refresh")]
    keeping = [moment for moment in backward if moment.task.kind is Kind.COMPUTE] if program.config.stage < 2 else backward
    found: list[Moment] = []
    for number in range(micro_batches):
        found += [*map(Moment, launches), *forward, *map(Moment, late)] if number == 0 else fresh
        found += backward if number == micro_batches - 1 else keeping
    return [*found, Moment(Task("optimizer", Kind.COMPUTE, update_bytes / machine.memory_bytes_per_s))]


def _states(params: Sequence[Param], config: Config, optimizer_states: int, micro_batches: int) -> dict[str, int]:
    """Return the bytes that stay between steps, by kind; gradients stay between micro-batches."""
    shards = sum(param.shard_numel * param.dtype.itemsize for param in params)
    wholes = sum(param.whole_bytes for param in params if param.dim is not None) if config.stage in (1, 2) else 0
    gradients = sum(param.whole_bytes for param in params) if config.stage == 1 else shards
    return {
        "shards": shards,
        "whole copies": wholes,
        "optimizer states": optimizer_states * formulas.FP32_BYTES * sum(param.shard_numel for param in params),
        "gathered gradients": gradients if micro_batches > 1 else 0,
    }


def _optimizer_states(optimizer: str) -> int:
    if optimizer not in formulas.OPTIMIZER_STATES:
        raise ConfigError(
            f"optimizer={optimizer!r} is not known",
            where="zerofx.plan(optimizer=...)",
            why=f"the known ones are {', '.join(formulas.OPTIMIZER_STATES)}",
            remedy="pass the one that keeps as many numbers for each parameter as yours",
        )
    return formulas.OPTIMIZER_STATES[optimizer]


def _update_bytes(params: Sequence[Param], optimizer_states: int) -> int:
    """Return what an optimizer moves: parameter and states in and out, gradient in."""
    return (3 + 2 * optimizer_states) * formulas.FP32_BYTES * sum(param.shard_numel for param in params)


def _compute_dtype(params: Sequence[Param]) -> torch.dtype:
    """Return the dtype that most parameters compute in."""
    counts: Counter[torch.dtype] = Counter()
    for param in params:
        counts[param.compute_dtype] += math.prod(param.shape)
    return counts.most_common(1)[0][0]


def _tokens(args: Sequence[Any], kwargs: dict[str, Any] | None) -> int:
    """Return the tokens of one micro-batch: the elements of its first integer tensor, else the rows of its first tensor."""
    tensors = [value for value in _torch.tree_leaves((tuple(args), kwargs or {})) if isinstance(value, Tensor)]
    whole = next((value for value in tensors if not value.is_floating_point()), None)
    if whole is not None:
        return whole.numel()
    return tensors[0].shape[0] if tensors and tensors[0].dim() else 1
