"""Resident memory of a rank over many steps, for each contestant in fresh processes: what grows, leaks or is fragmented.

``python -m benchmarks.growth [steps [contestant ...]]``. Two gloo ranks on this machine, AdamW.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks import step_time
from benchmarks.contestants import CONTESTANTS, Setting, adamw
from benchmarks.measure import on_ranks, show
from benchmarks.memory import status_bytes
from benchmarks.workloads import WORKLOADS

_NAMES = ("zerofx 3", "zerofx 1", "zerofx 3, hooks", "fsdp2, tuned", "ddp")


def measure(name: str, marks: list[int]) -> dict[str, Any]:
    """Train; return the megabytes that are resident after some numbers of steps."""
    setting = Setting(WORKLOADS["small"], torch.float32, adamw)
    trainer, batch = CONTESTANTS[name].build(setting), step_time.batch_of_rank(setting)
    row: dict[str, Any] = {"contestant": name}
    for step in range(1, marks[-1] + 1):
        trainer.step(batch)
        if step in marks:
            row[f"step {step}"] = status_bytes("VmRSS") / 1e6
    return row


def main(steps: str = "300", *names: str) -> None:
    """Measure each contestant in ranks of its own; print a table in MB."""
    marks = [*(step for step in (5, 20, 50, *range(100, int(steps), 50)) if step < int(steps)), int(steps)]
    show([on_ranks(measure, 2, name, marks) for name in names or _NAMES])


if __name__ == "__main__":
    main(*sys.argv[1:])
