"""Planned against measured seconds of a step, by link rate: ``python -m benchmarks.prediction``.

The ranks calibrate the processor once, and the link at each rate, plan each contestant from that, and time it. A contestant that is
compiled for the calibrated figures stands beside the others at each rate.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zerofx
from benchmarks.contestants import CONTESTANTS, Setting, zerofx_contestant
from benchmarks.link import Link, parse_rate, slow_link
from benchmarks.measure import show, write
from benchmarks.options import DTYPES, Options, parse, parser
from benchmarks.ranks import on_link, say
from benchmarks.results import Timings
from benchmarks.step_time import batch_of_rank, sweep
from benchmarks.workloads import WORKLOADS
from zerofx import measure as measuring
from zerofx.calibrate import measured
from zerofx.groups import group_of
from zerofx.hardware import Hardware

DEFAULT = ("zerofx 3", "zerofx 2", "zerofx 1", "zerofx 3, not scheduled")
OPTIMIZED = "zerofx 3, for this hardware"
# Settings that differ by more than this share of a step must be ranked right.
_APART = 0.10


def calibrated(known: Hardware | None) -> Hardware:
    """Measure the link as it is now, and the processor where it is not known yet; the same on all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if known is None:
        return measured(mesh, group_of(mesh))
    link = measuring.link(group_of(mesh), mesh.get_group())
    return dataclasses.replace(known, intra_node=link, inter_node=link)


def planned_s(setting: Setting, machine: Hardware, config: dict[str, Any], *, optimize: bool) -> float:
    """Return the seconds of a step as planned for these ranks."""
    plan = zerofx.plan(
        setting.model(),
        (batch_of_rank(setting),),
        world_size=dist.get_world_size(),
        hardware=machine,
        optimizer="sgd",
        optimize=optimize,
        param_dtype=setting.precision,
        reduce_dtype=setting.precision,
        **config,
    )
    return plan.seconds


def measure(link: Link, options: Options) -> list[dict[str, Any]]:
    """Plan and time all contestants at each rate; return a row each. Runs on every rank."""
    setting = Setting(WORKLOADS[options.workload], DTYPES[options.dtypes[0]])
    trainers = {name: CONTESTANTS[name].build(setting) for name in options.contestants}
    rows: list[dict[str, Any]] = []
    machine: Hardware | None = None
    for rate in options.rates:
        if dist.get_rank() == 0:
            link.set_rate(parse_rate(rate))
        dist.barrier()
        machine = calibrated(machine)
        configs = {name: dict(CONTESTANTS[name].config or {}) for name in trainers}
        planned = {name: planned_s(setting, machine, config, optimize=False) for name, config in configs.items()}
        planned[OPTIMIZED] = planned_s(setting, machine, {"stage": 3}, optimize=True)
        optimized = zerofx_contestant(stage=3, hardware=machine)(setting)
        ((_, taken),) = sweep(link, dataclasses.replace(options, rates=(rate,)), {**trainers, OPTIMIZED: optimized}, setting)
        found = Timings(options.dtypes[0], (rate,), {name: {rate: steps} for name, steps in taken.items()}, {})
        for name in found.contestants:
            seconds = found.median_s(name, rate)
            ratio = planned[name] / seconds
            rows.append({"rate": rate, "contestant": name, "planned_s": planned[name], "measured_s": seconds, "ratio": ratio})
            say(f"{rate} {name}: planned {planned[name]:.3f} s, measured {seconds:.3f} s, {ratio:.2f}")
        if dist.get_rank() == 0:
            write(options.json, "prediction", rows, workload=options.workload, ranks=options.ranks)
    return rows


def misranked(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the pairs of settings whose measured seconds are apart and whose planned seconds say the opposite."""
    for one, other in itertools.combinations(rows, 2):
        fast, slow = sorted((one, other), key=lambda row: float(row["measured_s"]))
        if slow["measured_s"] > (1 + _APART) * fast["measured_s"] and slow["planned_s"] <= fast["planned_s"]:
            yield f"{fast['contestant']} at {fast['rate']} is planned as slower than {slow['contestant']} at {slow['rate']}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    made = parser(__doc__ or "")
    made.set_defaults(contestants=DEFAULT)
    options, _ = parse(made, arguments)
    with slow_link(options.ranks) as link:
        fitting = options if link.is_limited else options.on_loopback()
        rows = on_link(measure, link, options.ranks, fitting)[0]
    show(rows)
    pairs = list(misranked(rows))
    print("\n".join(pairs) if pairs else f"every pair of settings that differ by more than {_APART:.0%} is ranked right")


if __name__ == "__main__":
    main(sys.argv[1:])
