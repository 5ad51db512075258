"""Peak memory of a rank and its model states beside ZeRO's formula, for each contestant in fresh processes.

``python -m benchmarks.memory``. AdamW, because plain SGD has no states to shard.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks import report, step_time
from benchmarks.contestants import CONTESTANTS, Setting, Trainer, adamw
from benchmarks.link import Link, slow_link
from benchmarks.measure import allocated_bytes, complaint, write
from benchmarks.options import DTYPES, Options, parse, parser
from benchmarks.ranks import on_link, say
from benchmarks.workloads import WORKLOADS
from zerofx import formulas

_WARM_UP, _STEPS = 3, 3


def status_bytes(field: str) -> int:
    """Read a size of this process from the kernel, such as ``VmRSS`` (resident now) or ``VmHWM`` (resident at most)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def tensor_bytes() -> int:
    """Return the bytes of all tensors that Python can reach; each storage once, fake and wrapped tensors not at all."""
    sizes = {}
    for item in gc.get_objects():
        if type(item) in (Tensor, nn.Parameter) and item.device.type != "meta":
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def formula_bytes(stage: int, parameter_count: int, dtype: torch.dtype, world_size: int) -> float:
    """Return ZeRO's model states of one rank under AdamW, with fp32 masters and gradients.

    Masters count with the optimizer where they are kept apart from what computes; at stage 3 nothing else is kept.
    """
    compute, master = parameter_count * dtype.itemsize, parameter_count * torch.float32.itemsize
    apart = stage == 3 or stage > 0 or dtype is not torch.float32
    optimizer = formulas.optimizer_bytes(stage, (3 if apart else 2) * master, world_size)
    parameters = 0.0 if stage == 3 else formulas.parameters_bytes(stage, compute, world_size)
    # a step without accumulation leaves reduced gradients, of which stage 1 too needs only its shard
    gradients = formulas.gradients_bytes(max(stage, 2) if stage else 0, master if stage else compute, world_size)
    return parameters + gradients + optimizer


def measure(link: Link, options: Options, name: str, dtype: str) -> dict[str, Any]:
    """Train a few steps in this fresh process; return its memory figures."""
    setting = Setting(WORKLOADS[options.workload], DTYPES[dtype], adamw)
    row: dict[str, Any] = {"contestant": name, "dtype": dtype}
    try:
        trainer = CONTESTANTS[name].build(setting)
        batch = step_time.batch_of_rank(setting)
        for _ in range(_WARM_UP):
            trainer.step(batch)
    except Exception as error:  # a contestant that cannot run here says why in its column
        return {**row, "error": complaint(error)}
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is not the contestant's
    Path("/proc/self/clear_refs").write_text("5")
    rest = status_bytes("VmRSS")
    for _ in range(_STEPS):
        trainer.step(batch)
    peak = status_bytes("VmHWM")
    count = sum(param.numel() for param in setting.model().parameters())
    gc.collect()
    return {
        **row,
        "peak_bytes": peak,
        "above_rest_bytes": peak - rest,
        "allocated_bytes": min(allocated_bytes(lambda: trainer.step(batch)) for _ in range(_STEPS)),
        "states_bytes": _states(trainer, batch),
        "formula_bytes": formula_bytes(CONTESTANTS[name].stage, count, setting.dtype, dist.get_world_size()),
    }


def _states(trainer: Trainer, batch: Tensor) -> int:
    """Return the bytes of parameters, gradients and optimizer states between backward and update."""
    trainer.compute(batch)
    gc.collect()
    # a gradient is an object that Python can reach only while something holds it
    grads = [param.grad for param in trainer.model.parameters()]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    found = tensor_bytes()
    del grads, local
    trainer.update()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each contestant in ranks of its own."""
    options, _ = parse(parser(__doc__ or ""), arguments)
    rows = []
    with slow_link(options.ranks) as link:
        for dtype in options.dtypes:
            for name in options.contestants:
                rows.append(on_link(measure, link, options.ranks, options, name, dtype)[0])
                say(str(rows[-1]))
    facts = {"workload": options.workload, "ranks": options.ranks}
    write(options.json, "memory", rows, **facts)
    print(report.memory({"rows": rows, **facts}))


if __name__ == "__main__":
    main(sys.argv[1:])
