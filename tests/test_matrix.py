"""Stages, recompute, offload, precision and ranks, together: the training of the plain run, in the memory that was planned.

Pairs of settings run here; ``python -m tests.test_matrix`` runs all combinations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from benchmarks.workloads import GPT as LargerGPT
from tests.matrix import Row, pairwise, whole
from tests.models import GPT
from tests.peaks import GLOO, PEAK_TOLERANCE, step_peaks_bytes
from tests.ranks import Pool
from tests.reference import ROWS, Trace, adamw, drift, train
from zerofx.config import Config
from zerofx.errors import MemoryLimitError
from zerofx.plans import plan
from zerofx.precision import precision_fields


def config_of(row: Row, directory: Path | None, *, is_plain: bool = False, limit_bytes: int | None = None) -> Config:
    """Return the settings of a row; plain, those without recompute and offload."""
    target = "disk" if directory is None else f"disk:{directory}"
    offload = {**dict.fromkeys(row.offload, target), "min_bytes": 1, "window_bytes": 5000} if row.offload and not is_plain else None
    recompute, precision = None if is_plain else row.recompute, dict[str, Any](precision_fields(row.precision, "tests"))
    return Config(stage=row.stage, backend="aot_eager", recompute=recompute, offload=offload, memory_limit_bytes=limit_bytes, **precision)


def limit_bytes(row: Row, build: Callable[[], nn.Module], *batch: Tensor) -> int | None:
    """Return the smallest limit that a row trains in, where that decides what goes to disk."""
    if "activations" not in row.offload:
        return None
    with pytest.raises(MemoryLimitError) as caught:
        plan(build(), batch, world_size=row.world, hardware=GLOO, optimize=False, config=config_of(row, None, limit_bytes=1))
    return caught.value.smallest_bytes


def trained(rank: int, world: int, rows: Sequence[tuple[Row, int | None]], directory: Path) -> list[tuple[Trace, Trace]]:
    """Return the trace of each row within its limit, and of the plain run of its stage and precision."""
    found, plain = [], dict[tuple[int, str | None], Trace]()
    for row, limit in rows:
        key = row.stage, row.precision
        for is_plain in (True, False) if key not in plain else (False,):
            torch._dynamo.reset()
            config = config_of(row, directory, is_plain=is_plain, limit_bytes=None if is_plain else limit)
            trace = train(zerofx.compile(GPT.model(), config=config), GPT, rank, world, make_optimizer=adamw)
            plain.setdefault(key, trace)
        found.append((plain[key], trace))
    return found


def differing(pool: Pool, rows: Sequence[Row], directory: Path) -> list[str]:
    """Return those of some rows of as many ranks that do not train as the plain run."""
    inputs = GPT.batch(0, ROWS).part(0, rows[0].world).inputs
    limited = [(row, limit_bytes(row, GPT.model, *inputs)) for row in rows]
    by_rank = pool.run(trained, rows[0].world, limited, directory, timeout_s=900.0)
    pairs = [(row, pair) for traces in by_rank for row, pair in zip(rows, traces, strict=True)]
    return [str(row) for row, pair in pairs if drift(pair) or pair[0].losses != pair[1].losses]


def peaks(row: Row) -> tuple[int, int]:
    """Return the measured and the planned peak of a step's own allocations."""
    build, batch = partial(LargerGPT, 2, 128, 4, 1024, 64), torch.arange(4 * 64).view(4, 64) % 1024
    return step_peaks_bytes(build, batch, row.world, config_of(row, None, limit_bytes=limit_bytes(row, build, batch)))


@pytest.mark.parametrize("world", [1, 2])
def test_every_pair_of_settings_trains_as_the_plain_run(ranks: Pool, tmp_path: Path, world: int) -> None:
    assert differing(ranks, [row for row in pairwise() if row.world == world], tmp_path) == []


@pytest.mark.parametrize("row", pairwise()[::4], ids=str)
def test_peaks_are_those_that_were_planned(row: Row) -> None:
    measured, planned = peaks(row)
    assert planned == pytest.approx(measured, rel=PEAK_TOLERANCE)


def main() -> None:
    """Run all combinations, and say what they gave."""
    start, pool, wrong, worst = time.perf_counter(), Pool(), list[str](), list[tuple[float, str]]()
    for world in (1, 2):
        rows = [row for row in whole() if row.world == world]
        for first in range(0, len(rows), 16):
            wrong += differing(pool, rows[first : first + 16], Path("/tmp"))
            print(f"{world} ranks, {first + 16} of {len(rows)}: {len(wrong)} wrong, {time.perf_counter() - start:.0f} s", flush=True)
    pool.close()
    for row in whole():
        measured, planned = peaks(row)
        worst.append((planned / measured, str(row)))
    worst.sort()
    print(f"{len(whole())} combinations: {len(wrong)} are not the plain run {wrong[:5]}")
    print(f"planned over measured peak: {worst[0]} to {worst[-1]}, {sum(abs(ratio - 1) > PEAK_TOLERANCE for ratio, _ in worst)} off")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
