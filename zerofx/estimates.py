"""What one rank holds and sends at each stage, by ZeRO's closed forms: before there is a model, and with symbols left open."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from zerofx import formulas
from zerofx.arguments import OFFLOADED_FROM, Setup, plain, stages_of
from zerofx.deepspeed import estimate_arguments

# A float, or a sympy expression where a symbol is free; sympy has no types.
Size = Any

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_DEFAULTS = {"stage": None, "precision": "bf16", "optimizer": "adam", "offload": (), "micro_batches": 1}


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """One stage, in bytes of one rank: what its device and its host hold, and what it sends per optimizer step.

    ``traffic_bytes`` goes by kind of collective and ``sent_bytes`` is their sum; ``traffic_ratio`` is that as a multiple of what data
    parallelism sends. At stage 3 these are upper bounds: what stays whole from forward to backward is gathered once.
    """

    stage: int
    parameters_bytes: Size
    gradients_bytes: Size
    optimizer_bytes: Size
    total_bytes: Size
    host_bytes: Size
    traffic_bytes: Mapping[str, Size]
    sent_bytes: Size
    traffic_ratio: Size

    @staticmethod
    def of(stage: int, setup: Setup) -> StageEstimate:
        """Put the closed forms of one stage together."""
        params, ranks, precision = setup.params, setup.world_size, formulas.PRECISIONS[setup.precision]
        held = {
            "parameters": formulas.parameters_bytes(stage, precision.parameter_bytes * params, ranks),
            "gradients": formulas.gradients_bytes(stage, precision.gradient_bytes * params, ranks),
            "optimizer": formulas.optimizer_bytes(stage, setup.multiplier * params, ranks),
        }
        on_host = {kind for kind in setup.offload if stage >= OFFLOADED_FROM[kind]}
        on_device = {kind: 0 if kind in on_host else size for kind, size in held.items()}
        sent = formulas.sent_bytes(stage, precision.parameter_bytes * params, ranks, setup.micro_batches)
        return StageEstimate(
            stage,
            parameters_bytes=_rounded(on_device["parameters"]),
            gradients_bytes=_rounded(on_device["gradients"]),
            optimizer_bytes=_rounded(on_device["optimizer"]),
            total_bytes=_rounded(sum(on_device.values())),
            host_bytes=_rounded(sum(held[kind] for kind in on_host)),
            traffic_bytes={kind: _rounded(size) for kind, size in sent.items()},
            sent_bytes=_rounded(sum(sent.values())),
            traffic_ratio=_rounded(formulas.traffic_ratio(stage, setup.micro_batches)),
        )

    def cells(self) -> dict[str, str]:
        """Return a row of the printed table, by its headers."""
        ratio = f"{self.traffic_ratio:g}" if isinstance(self.traffic_ratio, float) else f"({self.traffic_ratio})"
        return {
            "stage": str(self.stage),
            "parameters": _shown(self.parameters_bytes),
            "gradients": _shown(self.gradients_bytes),
            "optimizer": _shown(self.optimizer_bytes),
            "total": _shown(self.total_bytes),
            "host": _shown(self.host_bytes),
            "sent": _shown(self.sent_bytes),
            "traffic": f"{ratio}x",
        }


@dataclass(frozen=True, slots=True)
class Estimate:
    """Model states and traffic of one rank by stage; ``str`` is the printed form."""

    setup: Setup
    stages: tuple[StageEstimate, ...]

    @property
    def by_stage(self) -> dict[int, StageEstimate]:
        """The estimates by ZeRO stage."""
        return {found.stage: found for found in self.stages}

    def __str__(self) -> str:
        rows = [found.cells() for found in self.stages]
        headers = [name for name in rows[0] if name != "host" or self.setup.offload]
        table = tabulate(
            [[row[name] for name in headers] for row in rows],
            headers,
            disable_numparse=True,
            colalign=("left", *["right"] * (len(headers) - 1)),
        )
        host = f"host: {', '.join(self.setup.offload)}, each from the stage on that shards it\n" if self.setup.offload else ""
        legend = "sent: by one rank per optimizer step, at stage 3 at most; traffic: that, relative to data parallelism; GB: 1e9 bytes"
        return f"model states of one rank: {self.setup}\n\n{table}\n\n{host}{legend}"

    def to_json(self) -> str:
        """Return all fields as JSON text, expressions as text."""
        return json.dumps(asdict(self), indent=1, default=plain)


def estimate(
    params: Any,
    world_size: Any,
    *,
    stage: int | None = None,
    precision: Any = None,
    optimizer: Any = None,
    offload: str | Collection[str] | None = None,
    micro_batches: Any = None,
    deepspeed: Mapping[str, Any] | str | Path | None = None,
) -> Estimate:
    """Return what one rank holds and sends at each ZeRO stage, or at one, by the closed forms of the paper.

    ``params`` is a count, not bytes. ``precision`` is ``"bf16"`` (the default), ``"fp16"`` (both with fp32 masters), ``"fp32"``, or
    torch's dtype. ``optimizer`` is a name (``"adam"`` by default) or the paper's K: bytes of optimizer state for each parameter, with
    its master. ``offload`` names the model states that live in host memory, each from the stage on that shards it: ``"optimizer"``,
    ``"gradients"``, ``"parameters"``. ``micro_batches`` counts the backwards for each optimizer step. What is left out comes from
    ``deepspeed``: settings as DeepSpeed takes them, or a JSON file of them. Any number may be a sympy expression, and then so is what
    depends on it; plain numbers are exact until they are rounded, once, to floats. Activations, buffers, and what stage 3 makes whole
    for use come on top.

    Raises ConfigError on a number that counts nothing, and on an unknown name, with those that are known.
    Source: Rajbhandari et al., "ZeRO", 2020, sections 3, 5 and 7.
    """
    given = {"stage": stage, "precision": precision, "optimizer": optimizer, "offload": offload, "micro_batches": micro_batches}
    choices = dict(_DEFAULTS) if deepspeed is None else _DEFAULTS | estimate_arguments(deepspeed)
    choices |= {name: value for name, value in given.items() if value is not None}
    setup = Setup.of(params, world_size, choices)
    return Estimate(setup, tuple(StageEstimate.of(number, setup) for number in stages_of(choices["stage"])))


def _rounded(size: Any) -> Size:
    return size if getattr(size, "free_symbols", None) else float(size)


def _shown(size: Size) -> str:
    """Print bytes with one decimal below 100 of a unit and none above, and an expression as it is."""
    if not isinstance(size, float):
        return f"{size} B"
    unit = 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.{1 if unit and size < 99.95 else 0}f} {_UNITS[unit]}"
