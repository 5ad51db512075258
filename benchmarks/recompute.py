"""Activations against time: what a step keeps, and takes, by how much its backward computes again; planned and measured.

``python -m benchmarks.recompute [backend [layers]]``. One rank of two at stage 3, over the fake process group, so that no
communication hides or adds anything; settings are compiled one after another, and their steps run in turns.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerofx
from benchmarks.measure import allocated_bytes, median, show
from benchmarks.workloads import GPT, tokens
from zerofx.config import Config
from zerofx.plans import plan

SETTINGS: tuple[Any, ...] = (None, 0.75, "selective", 0.5, 0.25, "blocks")
_ROUNDS = 7


def main(backend: str, layers: int) -> None:
    """Plan, compile and run each setting."""
    torch.set_num_threads(1)
    batch = tokens(8, 128)
    models: list[Any] = []
    rows: list[dict[str, Any]] = []
    for recompute in SETTINGS:
        torch._dynamo.reset()
        config = Config(stage=3, backend=backend, recompute=recompute)
        planned = plan(_model(layers), (batch,), world_size=2, hardware="h100", config=config)
        rows.append({"recompute": str(recompute), "planned_peak_mb": planned.step_peak_bytes / 1e6})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for recompute, row in zip(SETTINGS, rows, strict=True):
        model: Any = zerofx.compile(_model(layers), config=Config(stage=3, backend=backend, recompute=recompute))
        _step(model, batch)
        row["measured_peak_mb"] = min(allocated_bytes(functools.partial(_step, model, batch)) for _ in range(3)) / 1e6
        row["planned_over_measured"] = row["planned_peak_mb"] / row["measured_peak_mb"]
        models.append(model)
    seconds: list[list[float]] = [[] for _ in models]
    for _ in range(_ROUNDS):
        for model, found in zip(models, seconds, strict=True):
            start = time.perf_counter()
            _step(model, batch)
            found.append(time.perf_counter() - start)
    for row, found in zip(rows, seconds, strict=True):
        row["step_ms"] = 1e3 * median(found)
        row["over_none"] = median([mine / other for mine, other in zip(found, seconds[0], strict=True)])
    show(rows)
    dist.destroy_process_group()


def _model(layers: int) -> GPT:
    torch.manual_seed(0)
    return GPT(layers, 128, 4, 512, 128)


def _step(model: Any, batch: torch.Tensor) -> None:
    model(batch).backward()
    model.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "inductor", int(sys.argv[2]) if len(sys.argv) > 2 else 24)
