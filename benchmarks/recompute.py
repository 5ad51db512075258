"""Activations against time: what a step keeps, and takes, by how much its backward computes again; planned and measured.

``python -m benchmarks.recompute [backend [layers [picture.svg]]]``. Two gloo ranks at stage 3, beside FSDP2 with and without
``torch.utils.checkpoint`` for each block (compiled where zerofx is), in one run: all are built one after another, and step in turns.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerofx
from benchmarks import picture
from benchmarks.measure import allocated_bytes, median, on_ranks, show, stamp
from benchmarks.peer_fsdp2 import Variant, shard
from benchmarks.prediction import calibrated
from benchmarks.workloads import GPT, tokens
from zerofx.config import Config
from zerofx.hardware import Hardware
from zerofx.plans import plan

SETTINGS: tuple[Any, ...] = (None, 0.75, "selective", 0.5, 0.25, "blocks")
CHECKPOINTED = "fsdp2, checkpointed blocks"
PEERS = {
    "fsdp2": Variant(asynchronous=True),
    CHECKPOINTED: Variant(asynchronous=True, checkpointed=True),
}
_ROUNDS, _WARM_UP = 7, 2


def measure(backend: str, layers: int) -> list[dict[str, Any]]:
    """Plan, build and run each setting and each peer; return a row each. Runs on every rank."""
    batch = tokens(8, 128)
    machine = calibrated(None)
    rows = [_planned(layers, batch, backend, recompute, machine) for recompute in SETTINGS]
    rows += [{"setting": name} for name in PEERS]
    steps: list[Callable[[], None]] = []
    for recompute in SETTINGS:
        model: Any = zerofx.compile(_model(layers), config=Config(stage=3, backend=backend, recompute=recompute))
        steps.append(functools.partial(_step, model, batch))
    for variant in PEERS.values():
        made = _model(layers)
        shard(made, made.h, None, Variant(variant.asynchronous, backend == "inductor", variant.checkpointed))
        steps.append(functools.partial(_step, made, batch))
    for row, step in zip(rows, steps, strict=True):
        for _ in range(_WARM_UP):
            step()
        gc.collect()
        row["measured_peak_mb"] = min(allocated_bytes(step) for _ in range(5)) / 1e6
    seconds = [[_seconds(step) for step in steps] for _ in range(_ROUNDS)]
    peer = next(place for place, row in enumerate(rows) if row["setting"] == CHECKPOINTED)
    for place, row in enumerate(rows):
        over = [found[place] / found[peer] for found in seconds]
        if "planned_peak_mb" in row:
            row["planned_over_measured"] = row["planned_peak_mb"] / row["measured_peak_mb"]
        row["step_s"] = median([found[place] for found in seconds])
        row["over_checkpointed"], row["least"], row["most"] = median(over), min(over), max(over)
    return rows


def _planned(layers: int, batch: torch.Tensor, backend: str, recompute: Any, machine: Hardware) -> dict[str, Any]:
    torch._dynamo.reset()
    config = Config(stage=3, backend=backend, recompute=recompute)
    found = plan(_model(layers), (batch,), world_size=2, hardware=machine, optimizer="sgd", optimize=False, config=config)
    return {"setting": f"recompute={recompute}", "planned_peak_mb": found.step_peak_bytes / 1e6, "planned_s": found.seconds}


def _model(layers: int) -> GPT:
    torch.manual_seed(0)
    return GPT(layers, 128, 4, 512, 128)


def _step(model: Any, batch: torch.Tensor) -> None:
    model(batch).backward()
    model.zero_grad()


def _seconds(step: Callable[[], None]) -> float:
    """Time a step from when all ranks begin to when all have ended."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def at_equal_memory(rows: list[dict[str, Any]]) -> str:
    """Say which setting is the fastest of those whose peak is no higher than that of checkpointed blocks."""
    peer = next(row for row in rows if row["setting"] == CHECKPOINTED)
    fitting = [row for row in rows if "planned_s" in row and row["measured_peak_mb"] <= peer["measured_peak_mb"]]
    if not fitting:
        return f"no setting has a peak as low as {CHECKPOINTED}"
    best = min(fitting, key=lambda row: float(row["over_checkpointed"]))
    figures = "{over_checkpointed:.3f} ({least:.3f} to {most:.3f}) of its time, {measured_peak_mb:.1f} MB".format(**best)
    return f"at no more memory than {CHECKPOINTED} ({peer['measured_peak_mb']:.1f} MB): {best['setting']}, {figures}"


def draw(rows: list[dict[str, Any]], backend: str, layers: int) -> str:
    """Return the picture of a run."""
    ours = [row for row in rows if "planned_s" in row]
    series = {
        "measured": {row["setting"]: (row["step_s"], 1e6 * row["measured_peak_mb"]) for row in ours},
        "planned": {row["setting"]: (row["planned_s"], 1e6 * row["planned_peak_mb"]) for row in ours},
    }
    series |= {row["setting"]: {row["setting"]: (row["step_s"], 1e6 * row["measured_peak_mb"])} for row in rows if row not in ours}
    return picture.curves(
        series,
        f"Peak MB of a step by its seconds, GPT of {layers} layers, {backend}",
        ", ".join(f"{key}: {value}" for key, value in stamp().items()),
    )


def main(backend: str = "inductor", layers: str = "24", path: str = "") -> None:
    """Measure on two ranks; print a table, and draw it where a file is named."""
    rows = on_ranks(measure, 2, backend, int(layers))
    show(rows)
    print(at_equal_memory(rows))
    if path:
        Path(path).write_text(draw(rows, backend, int(layers)))


if __name__ == "__main__":
    main(*sys.argv[1:])
