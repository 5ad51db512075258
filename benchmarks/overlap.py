"""Exposed communication: what a step takes beyond the compute floor, by contestant and link rate, beside its time on the wire.

``python -m benchmarks.overlap --from FILE`` reads what ``step_time`` wrote; without a file it measures. ``--trace FILE`` writes
a Chrome trace of one step of the first contestant at the first rate, and prints what took its time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks import report, step_time
from benchmarks.contestants import CONTESTANTS, Setting
from benchmarks.link import Link, parse_rate, slow_link
from benchmarks.options import DTYPES, Options, parse, parser
from benchmarks.ranks import on_link
from benchmarks.workloads import WORKLOADS

_WARM_UP = 3
_ROWS = 25


def traced(link: Link, options: Options, path: Path) -> str:
    """Profile one step on every rank; write rank 0's trace and return its operators by their own time."""
    setting = Setting(WORKLOADS[options.workload], DTYPES[options.dtypes[0]])
    trainer, batch = CONTESTANTS[options.contestants[0]].build(setting), step_time.batch_of_rank(setting)
    if dist.get_rank() == 0:
        link.set_rate(parse_rate(options.rates[0]))
    for _ in range(_WARM_UP):
        trainer.step(batch)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        trainer.step(batch)
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(str(path))
    return str(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=_ROWS))


def main(arguments: Sequence[str] | None = None) -> None:
    """Trace one contestant, or report the exposed communication of all."""
    made = parser(__doc__ or "")
    made.add_argument("--from", type=Path, dest="source", metavar="FILE", help="a result of step_time")
    made.add_argument("--trace", type=Path, metavar="FILE", help="trace one step instead")
    options, found = parse(made, arguments)
    if found.trace is not None:
        with slow_link(options.ranks) as link:
            fitting = options if link.is_limited else options.on_loopback()
            print(on_link(traced, link, options.ranks, fitting, found.trace.absolute())[0])
    elif found.source is not None:
        print(report.overlap(json.loads(found.source.read_text())))
    else:
        print(report.overlap(step_time.run(options)))


if __name__ == "__main__":
    main(sys.argv[1:])
