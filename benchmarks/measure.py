"""Run ranks and fresh processes, time steps on a machine that others use too, and print what came out."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate
from torch.profiler import ProfilerActivity, profile


def stamp() -> dict[str, Any]:
    """Describe where figures come from."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": f"{_processor()} ({torch.backends.cpu.get_cpu_capability()})",
        "cores": os.cpu_count(),
        "date": datetime.date.today().isoformat(),
    }


def _processor() -> str:
    if not os.path.exists("/proc/cpuinfo"):
        return platform.processor()
    with open("/proc/cpuinfo") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")


def fresh_process(module: str, *arguments: str, cache: str) -> dict[str, Any]:
    """Run ``python -m module arguments`` with an Inductor cache of its own; return the JSON of its last line."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", module, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def on_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> Any:
    """Run ``function(*arguments)`` on gloo ranks with one thread each; return what rank 0 returns."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result")
        mp.spawn(_rank, (world_size, os.path.join(folder, "store"), path, function, arguments), nprocs=world_size)
        with open(path) as file:
            return json.load(file)


def _rank(rank: int, world_size: int, store: str, path: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    result = function(*arguments)
    if rank == 0:
        with open(path, "w") as file:
            json.dump(result, file)
    dist.destroy_process_group()


# A step of which others used more of the machine than this share is dropped. The kernel counts in ticks of 10 ms,
# so that a quiet step of a second reads as up to 2 %.
DISTURBED_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Step:
    """One step on all ranks: the slowest rank's seconds, the CPU seconds that others used meanwhile, and bytes sent by a rank."""

    seconds: float
    foreign_s: float
    sent_bytes: float

    @property
    def is_disturbed(self) -> bool:
        """Whether others used so much of the machine that the step says little."""
        return self.foreign_s > DISTURBED_SHARE * self.seconds * (os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Clock:
    """Times steps on all ranks together. ``sent_bytes`` reads how much this rank's interface has sent."""

    sent_bytes: Callable[[], int]

    def time(self, step: Callable[[], Any]) -> Step:
        """Run a step on every rank at once; return what it took. The same on all ranks."""
        dist.barrier()
        busy_s, own_s, sent = busy_cpu_s(), time.process_time(), self.sent_bytes()
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        dist.barrier()
        mine = (seconds, busy_cpu_s() - busy_s, time.process_time() - own_s, self.sent_bytes() - sent)
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        slowest, busy, own, total = (tuple(column) for column in zip(*ranks, strict=True))
        return Step(max(slowest), max(0.0, busy[0] - sum(own)), sum(total) / len(ranks))


def busy_cpu_s() -> float:
    """Return the CPU seconds that all programs of this machine, and other machines on its cores, have used so far.

    Interrupts are left out: most are the ranks' own packets.
    """
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, _irq, _softirq, steal, *_ = (int(field) for field in file.readline().split()[1:])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def allocated_bytes(step: Callable[[], Any]) -> int:
    """Run a step under the profiler; return the most bytes allocated at once above those at its start.

    The profiler misses frees on gloo's threads, which only ever adds to the figure: take the least of some runs.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    alive, peak = 0, 0
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def complaint(error: Exception) -> str:
    """Say in one line what went wrong."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


# Processors that multiply bf16 at all do it faster than fp32; the others fall back to scalar code.
_SLOW = 3.0


def slow_dtype_note(dtype: torch.dtype) -> str:
    """Say in one sentence where this processor computes in a dtype so slowly that times show nothing else; else return nothing."""
    slower = _matmul_s(dtype) / _matmul_s(torch.float32)
    if slower < _SLOW:
        return ""
    return f"This processor multiplies {dtype} {slower:.0f} times slower than fp32: such times say nothing about communication."


def _matmul_s(dtype: torch.dtype) -> float:
    matrix, best = torch.ones(256, 256, dtype=dtype), math.inf
    for _ in range(3):
        start = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - start)
    return best


def write(path: Path | None, subject: str, rows: Sequence[dict[str, Any]], **facts: Any) -> None:
    """Write rows as JSON, stamped with where they come from, where a file is asked for."""
    if path is not None:
        path.write_text(json.dumps({"subject": subject, **stamp(), **facts, "rows": list(rows)}, indent=1) + "\n")


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as a table, with where they were measured."""
    print(tabulate(rows, headers="keys", floatfmt=".3g"))
    print(json.dumps({**stamp(), "rows": list(rows)}))
