"""Bytes and collectives per step by contestant, at two and four ranks, beside the formula of its ZeRO stage.

``python -m benchmarks.traffic``. Counted as collectives are issued, and by the interface: gloo's reduce-scatter sends twice its share.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from benchmarks import report, step_time
from benchmarks.contestants import CONTESTANTS, Setting
from benchmarks.link import Link, slow_link
from benchmarks.measure import write
from benchmarks.options import DTYPES, Options, parse, parser
from benchmarks.ranks import on_link, say
from benchmarks.workloads import WORKLOADS
from zerofx import formulas
from zerofx.traffic import TrafficCounter

_WORLD_SIZES = (2, 4)


def measure(link: Link, options: Options, dtype: str) -> list[dict[str, Any]]:
    """Count one step of each contestant, after its losses were compared. Runs on every rank."""
    world_size = dist.get_world_size()
    setting = Setting(WORKLOADS[options.workload], DTYPES[dtype])
    clock = step_time.clock_on(link)
    expected, batch, rows = step_time.reference_losses(setting), step_time.batch_of_rank(setting), list[dict[str, Any]]()
    total = sum(param.numel() for param in setting.model().parameters()) * setting.dtype.itemsize
    for name in options.contestants:
        row: dict[str, Any] = {"contestant": name, "dtype": dtype, "ranks": world_size}
        found = step_time.prepare(name, setting, expected, step_time.TOLERANCE[dtype])
        if isinstance(found, str):
            rows.append({**row, "all_gather": found})
            continue
        taken = clock.time(lambda: found.step(batch))  # noqa: B023, called at once
        with TrafficCounter(world_size) as counter:
            found.step(batch)
        stage = CONTESTANTS[name].stage
        counts = {
            kind: f"{sent / 1e6:.1f} MB in {counter.launches.get(kind, 0)}" if sent else "" for kind, sent in counter.sent_bytes.items()
        }
        formula = sum(formulas.sent_bytes(stage, total, world_size).values())
        rows.append({**row, **counts, "formula_bytes": formula, "interface_bytes": taken.sent_bytes})
        say(str(rows[-1]))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Count at each world size; ``--ranks`` picks one."""
    made = parser(__doc__ or "")
    made.set_defaults(ranks=None)
    options, found = parse(made, arguments)
    rows = []
    for world_size in _WORLD_SIZES if found.ranks is None else (found.ranks,):
        with slow_link(world_size) as link:
            for dtype in options.dtypes:
                rows += on_link(measure, link, world_size, options, dtype)[0]
    write(options.json, "traffic", rows, workload=options.workload)
    print(report.traffic({"rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
