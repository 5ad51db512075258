"""Seconds that the passes take (plan, apply, verify), by depth: linear in nodes, and a small share of compiling.

``python -m benchmarks.pass_time [layers ...]``: traced with ``aot_eager`` for one rank of two, over the fake process group.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerofx
from benchmarks.measure import median, show
from benchmarks.workloads import GPT, tokens

_ROUNDS = 3


def once(layers: int) -> tuple[dict[str, float], int]:
    """Compile a model; return seconds by pass, and the nodes that the traced graphs have."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zerofx.compile(GPT(layers), stage=3, backend="aot_eager")
    model(tokens()).backward()
    runtime: Any = model._zerofx.runtime  # type: ignore[union-attr]
    (found,) = runtime.compilations
    seconds: Counter[str] = Counter()
    for record in found.records:
        seconds[record.name] += record.seconds
    nodes = sum(record.nodes_before for record in found.records if record.name in ("Unshard", "Release"))
    return dict(seconds), nodes


def main(depths: list[int]) -> None:
    """Measure each depth several times, interleaved; print medians."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    runs = {layers: [] for layers in depths}  # type: dict[int, list[tuple[dict[str, float], int]]]
    for _ in range(_ROUNDS):
        for layers in depths:
            runs[layers].append(once(layers))
    rows = []
    for layers, found in runs.items():
        nodes = found[0][1]
        total = median([sum(seconds.values()) for seconds, _ in found])
        parts = {name: median([seconds[name] for seconds, _ in found]) for name in found[0][0]}
        rows.append({"layers": layers, "nodes": nodes, "total_s": total, "us_per_node": 1e6 * total / nodes, **parts})
    dist.destroy_process_group()
    show(rows)


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [12, 48, 96])
