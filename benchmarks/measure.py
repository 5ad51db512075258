"""Run ranks and fresh processes, and print what came out."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate


def stamp() -> dict[str, Any]:
    """Describe where figures come from."""
    return {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}


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


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as a table, with where they were measured."""
    print(tabulate(rows, headers="keys", floatfmt=".3g"))
    print(json.dumps({**stamp(), "rows": list(rows)}))
