"""Seconds per training step of all contestants, interleaved in the same ranks, by link rate.

``python -m benchmarks.step_time``. No time counts before the contestant's losses were compared with plain data-parallel training.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import report
from benchmarks.contestants import CONTESTANTS, Setting, Trainer
from benchmarks.link import Link, parse_rate, slow_link
from benchmarks.measure import Clock, Step, complaint, slow_dtype_note, write
from benchmarks.options import DTYPES, Options, parse, parser
from benchmarks.ranks import on_link, say
from benchmarks.workloads import WORKLOADS

_CHECKED_STEPS = 5
# Rounds go on until each contestant has its undisturbed steps, but not for ever.
_MOST_ROUNDS = 3
# fp32: only the order of sums differs. bf16: the loss itself has 8 significant bits, one part in 128 between neighbours, and
# compiled code rounds activations less often than eager code.
TOLERANCE = {"fp32": 1e-4, "bf16": 2 / 128}


def clock_on(link: Link) -> Clock:
    """Return a clock that reads what one rank sends; on loopback all ranks share an interface."""
    ranks = 1 if link.is_limited else dist.get_world_size()
    return Clock(lambda: link.sent_bytes() // ranks)


def batch_of_rank(setting: Setting) -> Tensor:
    """Return a rank's batch. It is the same at each step, so that the loss falls fast and shows a wrong gradient."""
    return setting.workload.batch(dist.get_rank())


def reference_losses(setting: Setting) -> list[float]:
    """Train in fp32 by hand, eagerly, with one all-reduce a gradient; return the losses of this rank."""
    model = Setting(setting.workload, torch.float32).model()
    params, losses, batch = list(model.parameters()), [], batch_of_rank(setting)
    optimizer = setting.make_optimizer(params)
    for _ in range(_CHECKED_STEPS):
        loss = model(batch)
        loss.backward()
        for param in params:
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def prepare(name: str, setting: Setting, expected: Sequence[float], tolerance: float) -> Trainer | str:
    """Build a contestant and compare its first losses with the reference; return what is wrong where something is, on any rank."""
    made: Trainer | None = None
    try:
        made = CONTESTANTS[name].build(setting)
        batch = batch_of_rank(setting)
        losses = [float(made.step(batch)) for _ in range(_CHECKED_STEPS)]
        wrong = _differs(losses[: made.comparable_steps], expected, tolerance)
    except Exception as error:  # a contestant that cannot run here says why in its column
        wrong = complaint(error)
    complaints: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(complaints, wrong)
    found: str | None = next((text for text in complaints if text), None)
    if found is not None:
        return found
    assert made is not None
    return made


def _differs(losses: Sequence[float], expected: Sequence[float], tolerance: float) -> str | None:
    for step, (loss, right) in enumerate(zip(losses, expected, strict=False)):
        if not math.isclose(loss, right, rel_tol=tolerance):
            return f"wrong: loss {loss:.6g} instead of {right:.6g} at step {step}"
    return None


def measure(link: Link, options: Options, dtype: str, facts: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Build all contestants and time them by turns at each rate; return earlier rows and one more each. Runs on every rank.

    What was found so far is written after each rate.
    """
    setting = Setting(WORKLOADS[options.workload], DTYPES[dtype])
    expected = reference_losses(setting)
    say(f"{dtype}: losses of the reference {' '.join(f'{loss:.4f}' for loss in expected)}")
    trainers: dict[str, Trainer] = {}
    for name in options.contestants:
        found = prepare(name, setting, expected, TOLERANCE[dtype])
        say(f"{dtype} {name}: {found if isinstance(found, str) else 'right'}")
        if isinstance(found, str):
            rows.append({"contestant": name, "dtype": dtype, "error": found})
        else:
            trainers[name] = found
    for rate, steps in sweep(link, options, trainers, setting):
        rows += [
            {"contestant": name, "dtype": dtype, "rate": rate, "steps": [asdict(step) for step in taken]} for name, taken in steps.items()
        ]
        if dist.get_rank() == 0:
            write(options.json, "step_time", rows, **facts)
    return rows


def sweep(link: Link, options: Options, trainers: dict[str, Trainer], setting: Setting) -> Iterator[tuple[str, dict[str, list[Step]]]]:
    """Time all contestants by turns at each rate; yield the steps by rate. The first round at a rate does not count."""
    clock, batch = clock_on(link), batch_of_rank(setting)
    gc.collect()
    gc.freeze()  # so that collecting garbage costs a step the same, however many contestants are alive
    for rate in options.rates:
        if dist.get_rank() == 0:
            link.set_rate(parse_rate(rate))
        for trainer in trainers.values():
            clock.time(functools.partial(trainer.step, batch))
        steps: dict[str, list[Step]] = {name: [] for name in trainers}
        for _ in range(_MOST_ROUNDS * options.steps):
            for name, trainer in trainers.items():
                steps[name].append(clock.time(functools.partial(trainer.step, batch)))
            if all(sum(not step.is_disturbed for step in taken) >= options.steps for taken in steps.values()):
                break
        say(f"{rate}: " + ", ".join(f"{name} {min(step.seconds for step in taken):.3f} s" for name, taken in steps.items()))
        yield rate, steps


def run(options: Options) -> dict[str, Any]:
    """Measure on a slow link, or on loopback where there is none; write and return rows and the facts about the run."""
    rows: list[dict[str, Any]] = []
    with slow_link(options.ranks) as link:
        if not link.is_limited:
            options = options.on_loopback()
        notes = [link.note, *(slow_dtype_note(DTYPES[dtype]) for dtype in options.dtypes)]
        facts: dict[str, Any] = {"workload": options.workload, "ranks": options.ranks, "notes": [note for note in notes if note]}
        for note in facts["notes"]:
            say(note)
        for dtype in options.dtypes:
            rows = on_link(measure, link, options.ranks, options, dtype, facts, rows)[0]
    return {"rows": rows, **facts}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options, _ = parse(parser(__doc__ or ""), arguments)
    print(report.step_time(run(options)))


if __name__ == "__main__":
    main(sys.argv[1:])
