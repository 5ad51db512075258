"""Say what a training step costs before it runs: seconds, bytes and traffic on any number of ranks of any hardware."""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from zerofx import _torch, checks, formulas, inputs, pictures, planner, shapes, sweeps
from zerofx.config import Config
from zerofx.errors import ConfigError
from zerofx.hardware import hardware as named_hardware
from zerofx.machine import Hardware
from zerofx.names import check_names
from zerofx.params import Param
from zerofx.precision import precision_fields
from zerofx.predictions import disk_bytes, predict, states_bytes, streamed_bytes, update_bytes
from zerofx.render import DISK, RESTORE, Schedule
from zerofx.simulate import Timeline
from zerofx.sweeps import Fastest, Sweep
from zerofx.units import parse_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """One optimizer step of each rank, as planned. Bytes are of one rank, ``traffic_bytes`` what it sends, by kind of collective.

    ``states_bytes`` are there between steps, ``disk_bytes`` offloaded, ``peak_bytes`` at once at most, by kind; ``exposed_s`` is what
    waiting for communication and disk costs, ``stolen_s`` what driving it takes from computing; ``mfu`` the share of the peak flops,
    causal attention counted in full.
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
    disk_bytes: dict[str, int]
    peak_bytes: dict[str, int]
    peak_by_module: dict[str, int]
    traffic_bytes: dict[str, int]
    schedule: Schedule = field(repr=False)
    timeline: Timeline = field(repr=False)
    alive_bytes: tuple[int, ...] = field(repr=False)
    request: Request = field(repr=False, compare=False)

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
            *((f"{kind} on disk, GB", f"{size / 1e9:.2f}") for kind, size in self.disk_bytes.items() if size),
            *(
                (f"{kind}, GB {'written and read' if kind == DISK else 'sent'} by a rank", f"{size / 1e9:.2f}")
                for kind, size in self.traffic_bytes.items()
                if size
            ),
        ]
        batches = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        head = f"stage {self.stage}, {self.world_size} ranks of {self.hardware}{batches}"
        return f"{head}\n\n{tabulate(rows, tablefmt='plain', disable_numparse=True, colalign=('left', 'right'))}"

    def to_json(self) -> str:
        """Return the figures as JSON text; the schedule and the timeline have their own."""
        left_out = ("schedule", "timeline", "alive_bytes", "request")
        return json.dumps({name: getattr(self, name) for name in self.__slots__ if name not in left_out}, indent=1)

    def to_perfetto(self, path: str | Path) -> None:
        """Write a trace that Perfetto and Chrome open: rows for computing and for each group of ranks, and a counter of bytes."""
        Path(path).write_text(pictures.perfetto(self.timeline, self.alive_bytes))

    def to_svg(self, path: str | Path) -> None:
        """Write the timeline as a picture, with the bytes alive under it."""
        Path(path).write_text(pictures.svg(self.timeline, self.alive_bytes, str(self).partition("\n")[0]))

    def sweep(self, **settings: Any) -> Sweep:
        """Plan the same step under all combinations of settings, each a value or a list: ``stage=[2, 3], world_size=[8, 64]``.

        Settings are those of ``zerofx.plan``. Raises ConfigError as it does; where a memory limit cannot be met, the table says so.
        """
        return self.request.sweep(**settings)

    def fastest(self, memory: int | str, recompute: Sequence[Any] = ()) -> Fastest:
        """Find the fastest setting of the same batch that keeps its peak within a memory (bytes, or text such as ``"40GB"``).

        Over stages, memory limits, recompute (or only those values of it that are given) and micro-batches; says what was tried and
        why. An amount that ``recompute`` is found to be counts the bytes of activations to keep. Raises ConfigError where nothing fits.
        """
        return self.request.fastest(memory, recompute)


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    world_size: int,
    hardware: str | Hardware = "h100",
    optimizer: str = "adamw",
    micro_batches: int = 1,
    precision: MixedPrecisionPolicy | str | None = None,
    memory_limit: int | str | None = None,
    optimize: bool = True,
    mesh: tuple[int, ...] | None = None,
    config: Config | None = None,
    **settings: Any,
) -> Plan:
    """Plan one optimizer step without ranks, weights or an accelerator.

    ``args`` and ``kwargs`` are one rank's micro-batch; model and inputs may be on any device, meta included. ``settings`` are those of
    ``Config``, and go before ``precision`` (as in ``zerofx.compile``), which goes before ``config``. The schedule is the one that
    ``zerofx.compile`` makes for the same ``hardware``, or, if it is not to ``optimize``, without. ``mesh`` are the dimensions of a
    device mesh, which must hold ``world_size`` ranks in one. Raises ConfigError for settings, hardware and optimizers that are not
    known, numbers that cannot be, and where the forward needs values; MemoryLimitError as ``zerofx.compile`` would.
    """
    inputs.check_call(model, args, kwargs)
    inputs.check_count("world_size", world_size, inputs.MOST_RANKS)
    inputs.check_count("micro_batches", micro_batches, inputs.MOST_MICRO_BATCHES)
    inputs.check_mesh(world_size, mesh)
    machine, numbers = named_hardware(hardware), _optimizer_states(optimizer)
    if memory_limit is not None:
        settings["memory_limit_bytes"] = parse_bytes(memory_limit, "memory_limit", "zerofx.plan(memory_limit=...)")
    check_names(settings, [field.name for field in fields(Config)], where="zerofx.plan(...)")
    settings = precision_fields(precision, "zerofx.plan(precision=...)") | settings
    checks.check_config(config, "zerofx.plan(config=...)")
    settled = replace(config or Config(), **settings, hardware=machine if optimize else None)
    if settled.backend == "hooks":
        raise ConfigError(
            'backend="hooks" has no graph to plan',
            where="zerofx.plan(backend=...)",
            why="a plan is made from traced graphs",
            remedy='plan with backend="inductor" or "aot_eager"',
        )
    given = {"world_size": world_size, "hardware": machine, "optimizer": optimizer, "micro_batches": micro_batches}
    request = Request(model, tuple(args), dict(kwargs or {}), {**given, "optimize": optimize, "config": settled})
    transport = "gloo" if machine.intra_node.cpu_s_per_byte else "nccl"
    traced = planner.trace(model, args, kwargs, settled, world_size, transport)
    params = traced.params
    states = states_bytes(params, settled, numbers, micro_batches)
    on_disk = disk_bytes(params, settled, numbers)
    if any(on_disk.values()) and not machine.disk_bytes_per_s:
        raise ConfigError(
            f"nobody knows how fast the disks of {machine.name} are",
            where="zerofx.plan(offload=...)",
            why="what is offloaded takes as long as they do",
            remedy="plan for dataclasses.replace(hardware(name), disk_bytes_per_s=...), with what one rank gets when all read",
        )
    found = predict(
        traced.forwards,
        traced.backwards,
        traced.refresh_buckets,
        machine,
        micro_batches=micro_batches,
        optimizer_bytes=update_bytes(params, numbers),
        streamed_bytes=streamed_bytes(on_disk),
        standing_bytes=sum(states.values()),
    )
    result = found.timeline
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
        mfu=found.flops / result.seconds / machine.peak_flops_per_s(_compute_dtype(params)) if result.seconds else 0.0,
        states_bytes=states,
        disk_bytes=on_disk,
        peak_bytes={**states, **{kind.value: size for kind, size in found.peak.by_kind.items()}},
        peak_by_module=found.peak.by_module,
        traffic_bytes=_traffic_bytes(traced.schedule, micro_batches),
        schedule=traced.schedule,
        timeline=result,
        alive_bytes=found.alive_bytes,
        request=request,
    )


@dataclass(frozen=True, slots=True)
class Request:
    """A model, a step of it, and the settings to plan it with; what is asked for replaces some of them."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    options: Mapping[str, Any]

    def plan(self, **changes: Any) -> Plan:
        """Plan with some settings changed: see ``zerofx.plan``."""
        return plan(self.model, self.args, dict(self.kwargs), **{**self.options, **changes})

    def sweep(self, **settings: Any) -> Sweep:
        """Plan under all combinations: see ``Plan.sweep``."""
        keywords = [item.name for item in inspect.signature(plan).parameters.values() if item.kind is inspect.Parameter.KEYWORD_ONLY]
        check_names(settings, [*keywords, *(field.name for field in fields(Config))], where="zerofx.plan(...)")
        return sweeps.sweep(self.plan, settings)

    def fastest(self, memory: int | str, recompute: Sequence[Any] = ()) -> Fastest:
        """Search for the fastest setting: see ``Plan.fastest``."""
        return sweeps.fastest(self._plan_in_parts, memory, self.rows, recompute)

    def _plan_in_parts(self, micro_batches: int, **changes: Any) -> Plan:
        """Plan with the batch cut into so many micro-batches."""
        rows = self.rows

        def part(tensor: Tensor) -> Tensor:
            return tensor[: rows // micro_batches] if tensor.dim() and tensor.shape[0] == rows else tensor

        args, kwargs = _torch.apply_to_tensors(part, (self.args, dict(self.kwargs)))
        given = {**self.options, "micro_batches": micro_batches * self.options.get("micro_batches", 1), **changes}
        return plan(self.model, args, kwargs, **given)

    @property
    def rows(self) -> int:
        """The rows of the batch: of its first tensor."""
        tensors = [value for value in _torch.tree_leaves((self.args, dict(self.kwargs))) if isinstance(value, Tensor) and value.dim()]
        return int(tensors[0].shape[0]) if tensors else 1


def language_model(given: float | Path, shape: tuple[int, int], *, precision: str, **options: Any) -> Request:
    """Return what plans a GPT of so many parameters, or the model of a Hugging Face config, on a micro-batch of (rows, positions).

    Raises ConfigError for sizes that cannot be, and a file that describes no model.
    """
    inputs.check_count("rows x positions", math.prod(shape), inputs.MOST_TOKENS)
    tokens = torch.zeros(shape, dtype=torch.long, device="meta")
    model = shapes.hugging_face(given) if isinstance(given, Path) else shapes.gpt(given, shape[1])
    args: tuple[Any, ...] = () if isinstance(given, Path) else (tokens,)
    kwargs = {"input_ids": tokens, "labels": tokens} if isinstance(given, Path) else {}
    return Request(model, args, kwargs, {"precision": precision, **options})


def _traffic_bytes(schedule: Schedule, micro_batches: int) -> dict[str, int]:
    """Return what a rank sends in an optimizer step: each micro-batch gathers what does not stay, and reduces from stage 2 on."""
    by_optimizer = {kind: size for kind, size in schedule.traffic_bytes.items() if kind not in (RESTORE, DISK)}
    once = by_optimizer if schedule.stage < 2 else {"all_gather": schedule.refresh_bytes}
    return {kind: once.get(kind, 0) + micro_batches * (size - once.get(kind, 0)) for kind, size in schedule.traffic_bytes.items()}


def _optimizer_states(optimizer: str) -> int:
    if not isinstance(optimizer, str) or optimizer not in formulas.OPTIMIZER_STATES:
        raise ConfigError(
            f"optimizer={optimizer!r} is not known",
            where="zerofx.plan(optimizer=...)",
            why=f"the known ones are {', '.join(formulas.OPTIMIZER_STATES)}",
            remedy="pass the one that keeps as many numbers for each parameter as yours",
        )
    return formulas.OPTIMIZER_STATES[optimizer]


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
