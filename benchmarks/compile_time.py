"""Cold and warm compile time: plain torch.compile against zerofx, by regions and as one graph.

``python -m benchmarks.compile_time [layers ...]``: each figure is a fresh process with an empty Inductor cache (cold), then
another one with the cache that the first filled (warm). One rank of two, over the fake process group: no communication.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measure import allocated_bytes, fresh_process, median, show
from benchmarks.workloads import GPT, tokens


def one(contestant: str, layers: int) -> dict[str, Any]:
    """Compile and run in this process; return seconds to the end of the first step, its parts, and the step after."""
    import zerofx
    from zerofx.config import Config

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.manual_seed(0)
    model: Any = GPT(layers)
    batch = tokens()
    start = time.perf_counter()
    if contestant == "plain":
        model = torch.compile(model)
    else:
        zerofx.compile(model, config=Config(stage=3, whole_graph=contestant == "zerofx whole graph"))
    model(batch).backward()
    result: dict[str, Any] = {"compile_s": time.perf_counter() - start}
    steps = []
    for _ in range(10):
        start = time.perf_counter()
        model(batch).backward()
        steps.append(time.perf_counter() - start)
    result["step_ms"] = 1e3 * median(steps)
    result["step_peak_mb"] = min(allocated_bytes(lambda: model(batch).backward()) for _ in range(3)) / 1e6
    if contestant != "plain":
        (found,) = model._zerofx.runtime.compilations
        result |= {f"{part}_s": seconds for part, seconds in found.seconds.items()}
        result |= {"regions": found.region_count, "distinct": found.distinct_count}
    dist.destroy_process_group()
    return result


def main(depths: list[int]) -> None:
    """Measure all contestants at each depth, interleaved."""
    rows = []
    for layers in depths:
        for contestant in ("plain", "zerofx", "zerofx whole graph"):
            with tempfile.TemporaryDirectory() as cache:
                cold = fresh_process("benchmarks.compile_time", "--one", contestant, str(layers), cache=cache)
                warm = fresh_process("benchmarks.compile_time", "--one", contestant, str(layers), cache=cache)
            rows.append({"layers": layers, "contestant": contestant, "cold_s": cold.pop("compile_s"), "warm_s": warm["compile_s"], **cold})
            print(rows[-1], file=sys.stderr)
    show(rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(sys.argv[2], int(sys.argv[3]))))
    else:
        main([int(text) for text in sys.argv[1:]] or [12, 48])
