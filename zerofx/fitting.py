"""What a step gives up so that all that it holds stays within a limit: the bytes that cost the least time first. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerofx import memory
from zerofx.activations import Kept, Ladder, cheapest, choice_of, ladders_of
from zerofx.errors import ConfigError, MemoryLimitError
from zerofx.liveness import Kind
from zerofx.machine import Hardware
from zerofx.origins import Call
from zerofx.pipeline import Pipeline
from zerofx.predictions import predict
from zerofx.program import Level, Program
from zerofx.recomputing import Choice, Extent
from zerofx.work import traced_size

# How many limits of whole parameters and buffers are tried below what they take by themselves, the smallest that works included.
_LIMITS = 2
# What could save less than this share of a step is not looked for: each attempt partitions and schedules a graph.
_WORTH = 0.01


@dataclass(frozen=True, slots=True)
class Attempt:
    """A step as it would run, and what made it: what it takes, and holds at most.

    ``moving_bytes`` are the most that whole parameters and communication buffers take, the ``standing_bytes`` of them at all times.
    """

    seconds: float
    total_bytes: int
    moving_bytes: int
    standing_bytes: int
    by_kind: Mapping[str, int]
    made: Any


def attempted(forward: Program, backward: Program, pipeline: Pipeline, machine: Hardware, made: Any) -> Attempt:
    """Return what a scheduled step takes and holds: all that it allocates, and what stays whole between steps."""
    lowered = [pipeline.run(program, [], Level.LOWERED) for program in (forward, backward)]
    step, standing = predict(lowered[:1], lowered[1:], forward.refresh_buckets, machine), memory.kept_bytes(forward.params)
    by_kind = {kind.value: size for kind, size in step.peak.by_kind.items()}
    by_kind[Kind.WHOLE] = by_kind.get(Kind.WHOLE, 0) + standing
    total_bytes = max(sum(by_kind.values()), memory.standing_bytes(forward))
    moving_bytes = max(map(memory.peak_bytes, (forward, backward)))
    return Attempt(step.timeline.seconds, total_bytes, moving_bytes, standing, by_kind, made)


# Schedules a step for a choice of what is computed again, and a limit of whole parameters and buffers; MemoryLimitError if that is too low.
Try = Callable[[Choice, int], Attempt]


def fit(attempt: Try, keep: Callable[[Choice], Kept], choices: Mapping[Extent, Choice], limit_bytes: int) -> tuple[Attempt, float]:
    """Return a step that holds at most so many bytes, in little time, and the share of its batch that may give up nothing.

    One that fits as it is gives up nothing. Otherwise activations, overlap and parameters kept whole are given up in the order of the
    seconds that each byte of them saves. Raises MemoryLimitError where giving up all is not enough.
    """
    attempt = functools.cache(attempt)
    try:
        whole = attempt(choices[Extent.NOTHING], limit_bytes)
    except MemoryLimitError:
        return _least(attempt, choices, limit_bytes), 0.0
    if whole.total_bytes <= limit_bytes:
        return whole, 1.0
    share = limit_bytes / whole.total_bytes  # or less of it, by what does not grow with the batch
    options = {extent: keep(choice) for extent, choice in choices.items()}
    ladders: dict[Call | None, Ladder] = dict(ladders_of(options).items())
    found, rungs = _reached(attempt, options, ladders, [limit_bytes], whole.total_bytes, limit_bytes)
    if found.total_bytes <= limit_bytes and _worth_of_overlap(whole, found) < _WORTH * whole.seconds:
        return found, share
    # what limits save is measured where it matters: beside about as much as has to be computed again
    choice = choice_of(options, rungs)
    limits = _limits(attempt, choice, found, limit_bytes)
    steps = [found, *(attempt(choice, limit) for limit in limits[1:])]
    ladders[None] = [(step.total_bytes, step.seconds) for step in steps]
    held_bytes = found.total_bytes + sum(ladder[0][0] - ladder[rungs[key]][0] for key, ladder in ladders.items() if key is not None)
    mixed, _ = _reached(attempt, options, ladders, limits, held_bytes, limit_bytes)
    fitting = [step for step in (*steps, mixed) if step.total_bytes <= limit_bytes]
    return (min(fitting, key=lambda step: step.seconds) if fitting else _least(attempt, choices, limit_bytes)), share


def _reached(
    attempt: Try,
    options: Mapping[Extent, Kept],
    ladders: Mapping[Call | None, Ladder],
    limits: Sequence[int],
    held_bytes: int,
    most_bytes: int,
) -> tuple[Attempt, dict[Call | None, int]]:
    """Return a step that holds at most so many bytes where it would hold ``held_bytes`` on the first rungs, and its rungs.

    Where none does, the one on the last rungs.
    """
    aim_bytes = sum(ladder[0][0] for ladder in ladders.values()) - (held_bytes - most_bytes)
    rungs = cheapest(ladders, aim_bytes)
    while True:
        found = _attempt_above(attempt, choice_of(options, rungs), limits[rungs.get(None, 0)])
        if found.total_bytes <= most_bytes:
            return found, rungs
        # not all that is given up lies at the peak, and what is computed again takes memory too: aim lower, and at other rungs
        held = sum(ladder[rungs[key]][0] for key, ladder in ladders.items())
        aim_bytes = min(aim_bytes - (found.total_bytes - most_bytes), held - 1)
        if (lower := cheapest(ladders, aim_bytes)) == rungs:
            return found, rungs
        rungs = lower


def _worth_of_overlap(whole: Attempt, found: Attempt) -> float:
    """Return the seconds of computing again that all bytes of overlap could save at most, at the price that was paid."""
    price = (found.seconds - whole.seconds) / max(whole.total_bytes - found.total_bytes, 1)
    return price * (found.moving_bytes - found.standing_bytes)


def _limits(attempt: Try, choice: Choice, found: Attempt, limit_bytes: int) -> list[int]:
    """Return limits of whole parameters and buffers: the one that was given, and some down to the smallest that works."""
    least_bytes = _attempt_above(attempt, choice, 1).moving_bytes
    spare = found.moving_bytes - least_bytes
    return [limit_bytes, *(found.moving_bytes - spare * part // _LIMITS for part in range(1, _LIMITS + 1) if spare > 0)]


def _attempt_above(attempt: Try, choice: Choice, limit_bytes: int) -> Attempt:
    """Attempt a step with a limit, or with the smallest that works for it."""
    try:
        return attempt(choice, limit_bytes)
    except MemoryLimitError as error:
        return attempt(choice, error.smallest_bytes)


def _least(attempt: Try, choices: Mapping[Extent, Choice], limit_bytes: int) -> Attempt:
    """Return the step that holds least with nothing ahead of use. Raises MemoryLimitError where that does not fit."""
    # what is computed again takes memory too: a step that gives up all activations may hold more than one that gives up fewer
    least = min((_attempt_above(attempt, choice, 1) for choice in choices.values()), key=lambda step: step.total_bytes)
    if least.total_bytes <= limit_bytes:
        return least
    raise too_small(limit_bytes, least)


def bound_sizes(program: Program, share: float) -> None:
    """Have other batches compiled anew: larger ones, which may have to give up more, and those so small that they need give up nothing.

    What fits a batch fits a smaller one. Dynamo guards what is checked here.
    """
    sizes = [size for node in program.graph.find_nodes(op="placeholder") if isinstance(size := node.meta["val"], torch.SymInt)]
    for size in sizes:
        torch._check(size <= traced_size(size))
    if sizes and share < 1:
        torch._check(math.prod(sizes) > int(share * math.prod(map(traced_size, sizes))))


def too_small(limit_bytes: int, least: Attempt) -> MemoryLimitError:
    """Build the error for a limit that the step which holds least does not meet."""
    kinds: Sequence[tuple[str, int]] = sorted(least.by_kind.items(), key=lambda item: item[1], reverse=True)
    error = MemoryLimitError(
        f"memory_limit={limit_bytes} bytes cannot be met: the smallest that works for this batch is {least.total_bytes} bytes",
        where='zerofx.compile(memory_limit=..., recompute="auto"), a step of this shape',
        why="with nothing ahead of use, and as much computed again as saves memory, there are at once "
        + ", ".join(f"{size:,} bytes of {kind}" for kind, size in kinds if size),
        remedy=f"pass memory_limit={least.total_bytes} or more, make the batch smaller, or shard more (a higher stage)",
    )
    error.smallest_bytes = least.total_bytes
    return error


def in_several_graphs(setting: str) -> ConfigError:
    """Build the error for a forward that breaks: each of its graphs would have to know what the others hold."""
    return ConfigError(
        f"{setting} cannot be had for a forward that breaks into several graphs",
        where=f"zerofx.compile({setting}), the first training step",
        why="what one graph gives up depends on what all of them hold, and they are compiled one after another",
        remedy='take out the graph breaks (TORCH_LOGS=graph_breaks names them), or pass recompute="blocks" or an amount instead',
    )
