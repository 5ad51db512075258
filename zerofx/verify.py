"""What must hold of a program at each level: one table, checked after every pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Node

from zerofx import memory, ops
from zerofx.errors import VerifyError
from zerofx.program import Level, Phase, Program, aliases, arguments, output_of

Check = Callable[[Program], Iterator[str]]


def one_unshard_each(program: Program) -> Iterator[str]:
    """A parameter is read through at most one marker op, which carries its mark."""
    counts = Counter(index for _, index in program.markers(ops.UNSHARD))
    yield from (f"{program.params[index].name} is unsharded {count} times" for index, count in counts.items() if count > 1)
    for node, index in program.markers(ops.UNSHARD):
        if node.meta.get("zerofx") is None:
            yield f"the unshard of {program.params[index].name} carries no mark"


def gathers_tagged(program: Program) -> Iterator[str]:
    """Every gather of a joint graph says whether the backward keeps it or gathers again."""
    if program.phase is Phase.JOINT:
        for node, mark in program.marked("gather"):
            if "recompute" not in node.meta:
                yield f"the gather of {program.params[mark.params[0]].name} has no recompute tag"


def released_once(program: Program) -> Iterator[str]:
    """Each whole parameter has exactly one release, unless the graph returns it for the backward; nothing uses it after."""
    places, output = program.positions(), output_of(program.graph)
    for whole, index in _wholes(program):
        name = program.params[index].name
        views = aliases(whole)
        readers = [user for view in views for user in view.users]
        releases = [user for user in whole.users if user.target is ops.release]
        if len(releases) != (0 if output in readers else 1):
            yield f"{name} is released {len(releases)} times"
        for release in releases:
            late = [user for user in readers if places[user] > places[release]]
            yield from (f"{name} is used by {user.name} after its release" for user in late)


def reduced_once(program: Program) -> Iterator[str]:
    """Each parameter's gradient is reduced at most once, and no marker op is left over."""
    counts = Counter(index for _, mark in program.marked("reduce", "reduce_start") for index in mark.params)
    yield from (f"the gradient of {program.params[index].name} is reduced {count} times" for index, count in counts.items() if count > 1)
    for node, index in program.markers(ops.REDUCE_GRAD):
        if node.meta.get("zerofx") is None:
            yield f"the gradient of {program.params[index].name} has a reduction that no bucket owns: {node.name}"


def no_markers(program: Program) -> Iterator[str]:
    """Marker ops have become starts and waits."""
    for target in (ops.UNSHARD, ops.REDUCE_GRAD):
        yield from (f"a marker op is left: {node.name}" for node, _ in program.markers(target))


def waited_once(program: Program) -> Iterator[str]:
    """Each start has exactly one wait, behind it."""
    for start, mark in program.marked("gather_start", "reduce_start", "restore_start"):
        waits = list(start.users)
        if len(waits) != 1 or waits[0].meta.get("zerofx") is None:
            yield f"bucket {mark.bucket} ({mark.kind}) is waited for {len(waits)} times"


def order_kept(program: Program) -> Iterator[str]:
    """Gathers, and reductions, start in bucket order: the same on all ranks."""
    for kind in ("gather_start", "gather_wait", "reduce_start", "reduce_wait"):
        order = [mark.bucket for _, mark in program.marked(kind)]
        if order != sorted(order):
            yield f"the {kind} order is {order}"


def within_limit(program: Program) -> Iterator[str]:
    """Whole parameters and communication buffers stay within the memory limit at every event."""
    limit = program.config.memory_limit_bytes
    if limit is not None:
        for event in memory.live(program):
            if event.total_bytes > limit:
                yield f"{event.total_bytes} bytes are alive after {event.node.name}, the limit is {limit}"


def no_events(program: Program) -> Iterator[str]:
    """Only ops that can run are left."""
    events: set[Any] = {ops.gather_start, ops.gather_wait, ops.release, ops.reduce_start, ops.reduce_wait}
    events |= {ops.stash, ops.restore_start, ops.restore_wait}
    yield from (f"an event is left: {node.name}" for node in program.graph.nodes if node.target in events)


# level -> (check, level at which it no longer applies because the nodes it reads are gone)
INVARIANTS: dict[Level, tuple[tuple[Check, Level], ...]] = {
    Level.UNSHARDED: ((one_unshard_each, Level.BUCKETED),),
    Level.RECOMPUTED: ((gathers_tagged, Level.RELEASED),),
    Level.RELEASED: ((released_once, Level.LOWERED),),
    Level.REDUCED: ((reduced_once, Level.LOWERED),),
    Level.BUCKETED: ((no_markers, Level.LOWERED), (waited_once, Level.LOWERED), (order_kept, Level.LOWERED)),
    Level.SCHEDULED: ((within_limit, Level.LOWERED),),
    Level.LOWERED: ((no_events, Level.LOWERED), (no_markers, Level.LOWERED)),
}


def verify(program: Program, *, after: str) -> None:
    """Check every invariant that holds at the program's level. Raises VerifyError with all that is broken."""
    broken = [
        message
        for level, checks in INVARIANTS.items()
        for check, until in checks
        if level <= program.level and (program.level < until or level is Level.LOWERED)
        for message in check(program)
    ]
    if broken:
        raise VerifyError(
            f"{after} broke the program: {broken[0]}" + (f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""),
            where=f"{program.phase.value} graph, level {program.level.name}",
            why="; ".join(broken[:5]),
            remedy="this is a fault in the pass, not in the model: report it, or take the pass out",
        )


def _wholes(program: Program) -> Iterator[tuple[Node, int]]:
    """Yield each whole parameter's node with its index: gathers before bucketing, items of gather waits after."""
    for node, mark in program.marked("gather"):
        yield node, mark.params[0]
    for wait, mark in program.marked("gather_wait"):
        for item in wait.users:
            yield item, mark.params[arguments(item)[1]]
