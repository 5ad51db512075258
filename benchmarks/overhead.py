"""Python overhead of a step: a model of 200 small parameters, where computing costs next to nothing, against FSDP2.

``python -m benchmarks.overhead [world_size]``: gloo ranks on this machine, steps interleaved, medians.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zerofx
from benchmarks.measure import median, on_ranks, show

_BLOCKS, _LAYERS, _WIDTH, _STEPS, _WARM_UP = 25, 4, 16, 60, 10


class Narrow(nn.Module):
    """25 blocks of four linear layers: 200 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]) for _ in range(_BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = torch.tanh(block(x))
        return x.sum()


def _fsdp2() -> Any:
    model = Narrow()
    for block in model.h:
        fully_shard(block)
    return fully_shard(model)


def _contestants() -> dict[str, nn.Module]:
    return {
        "fsdp2": _fsdp2(),
        "zerofx 3 inductor": zerofx.compile(Narrow(), stage=3),
        "zerofx 3 aot_eager": zerofx.compile(Narrow(), stage=3, backend="aot_eager"),
        "zerofx 2 inductor": zerofx.compile(Narrow(), stage=2),
    }


def steps() -> dict[str, list[float]]:
    """Run all contestants in turn; return milliseconds of forward and backward, and of the optimizer, by contestant."""
    torch.manual_seed(0)
    models = _contestants()
    optimizers = {name: torch.optim.SGD(model.parameters(), 1e-3) for name, model in models.items()}
    batch = torch.randn(4, _WIDTH)
    times: dict[str, list[float]] = {name: [] for name in models}
    for step in range(_STEPS + _WARM_UP):
        for name, model in models.items():
            start = time.perf_counter()
            model(batch).backward()
            if step >= _WARM_UP:
                times[name].append(1e3 * (time.perf_counter() - start))
            optimizers[name].step()
            optimizers[name].zero_grad()
    return times


def main(world_size: int) -> None:
    """Measure and print medians and their ratio to FSDP2's."""
    times: dict[str, Any] = on_ranks(steps, world_size)
    base = times["fsdp2"]
    rows = [
        {
            "contestant": name,
            "median_ms": median(values),
            "min_ms": min(values),
            "max_ms": max(values),
            "ratio_to_fsdp2": median([value / other for value, other in zip(values, base, strict=True)]),
        }
        for name, values in times.items()
    ]
    show(rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
