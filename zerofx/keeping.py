"""Which parameters are worth keeping whole from forward to backward, by the exposed time that each byte saves. Pure."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from zerofx import memory, ops, placement, wire
from zerofx.cost import compute_s
from zerofx.errors import MemoryLimitError
from zerofx.machine import Hardware
from zerofx.origins import is_backward
from zerofx.params import block_of
from zerofx.placement import Gather, Problem, Reduction
from zerofx.program import Program, aliases
from zerofx.simulate import Kind
from zerofx.wire import Transfer


@dataclass(frozen=True, slots=True)
class _Block:
    """Parameters that a backward gathers and reduces together: slots of first use, of the end of use, and of their gradients."""

    params: tuple[int, ...]
    size_bytes: int
    use: int
    release: int
    ready: int | None
    gather: Transfer
    reduction: Transfer


def worth_keeping(program: Program, kept: Sequence[int], hardware: Hardware, limit_bytes: int) -> tuple[int, ...]:
    """Return the parameters to keep: those given, and as many more blocks of a joint graph as save exposed time within the limit.

    Each choice is the block whose gather makes the backward wait longest for each byte; after each, the backward is placed anew.
    """
    blocks, seconds = _backward(program, hardware)
    staying = set(kept)
    most = max((block.size_bytes for block in blocks), default=0)
    standing = memory.kept_bytes(program.params)
    open_blocks = [block for block in blocks if not staying.issuperset(block.params)]
    waits = _exposed_s(program, blocks, seconds, staying, limit_bytes)
    while open_blocks:
        # the forward ends with all that stays, beside a block in use and one ahead of use
        room = limit_bytes - standing - sum(program.params[index].whole_bytes for index in staying) - 2 * most
        found = [block for block in open_blocks if waits.get(block.use, 0.0) > 0 and block.size_bytes <= room]
        if not found:
            break
        best = max(found, key=lambda block: (waits[block.use] / block.size_bytes, block.use))
        tried = staying.union(best.params)
        open_blocks.remove(best)
        left = _exposed_s(program, blocks, seconds, tried, limit_bytes)
        if sum(left.values()) < sum(waits.values()):
            staying, waits = tried, left
    return tuple(sorted(staying))


def _exposed_s(program: Program, blocks: Sequence[_Block], seconds: Sequence[float], kept: set[int], limit_bytes: int) -> dict[int, float]:
    """Return the seconds that the backward waits at each slot where it uses a gather; infinite where what is kept leaves no room."""
    ahead, slots = program.config.prefetch_buckets, len(seconds)
    change = [0] * (slots + 1)
    change[0] = memory.kept_bytes(program.params)
    gathers, reductions = list[Gather](), list[Reduction]()
    for block in blocks:
        missing = sum(program.params[index].whole_bytes for index in block.params if index not in kept)
        change[0] += block.size_bytes - missing
        change[block.release] -= block.size_bytes - missing
        if missing:
            first = gathers[-ahead].use if 0 < ahead <= len(gathers) else 0 if ahead else block.use
            share = missing / block.size_bytes
            gathers.append(Gather(share * block.gather.seconds, missing, block.use, block.release, first, share * block.gather.driving_s))
    for block in sorted((block for block in blocks if block.ready is not None), key=lambda block: block.ready or 0):
        size = memory.reduce_bytes([program.params[index] for index in block.params], program.group, program.config)
        assert block.ready is not None
        reductions.append(Reduction(block.reduction.seconds, size, block.ready, steals_s=block.reduction.driving_s))
    standing = tuple(itertools.accumulate(change[:slots]))
    try:
        placed = placement.earliest(Problem(tuple(seconds), standing, tuple(gathers), tuple(reductions), limit_bytes))
    except MemoryLimitError:
        return {block.use: float("inf") for block in blocks}
    waits = [
        event.seconds for event in placed.timeline.events if event.task.kind is Kind.WAIT and event.task.collective.startswith("gather")
    ]
    return {gather.use: wait for gather, wait in zip(gathers, waits, strict=True)}


def _backward(program: Program, hardware: Hardware) -> tuple[list[_Block], list[float]]:
    """Return the blocks that a joint graph's backward uses, in order, and the seconds of computing behind each slot."""
    places = program.positions()
    uses: dict[str, list[int]] = {}
    ready: dict[str, int] = {}
    members: dict[str, list[int]] = {}
    for node, mark in program.marked("gather"):
        after = [places[user] for alias in aliases(node) for user in alias.users if is_backward(user)]
        if after:
            name = block_of(program.params[mark.params[0]].name)
            members.setdefault(name, []).append(mark.params[0])
            uses.setdefault(name, []).extend(after)
    for node, index in program.markers(ops.REDUCE_GRAD):
        name = block_of(program.params[index].name)
        ready[name] = max(ready.get(name, 0), places[node])
    events = sorted({min(found) for found in uses.values()} | {place for name, place in ready.items() if name in uses})
    ordered = list(places)
    starts = events or [len(ordered)]
    first = next((place for place, node in enumerate(ordered) if is_backward(node)), starts[0])
    cuts = sorted({min(first, starts[0]), *starts})
    seconds = [compute_s(ordered[begin:end], hardware) for begin, end in itertools.pairwise([*cuts, len(ordered)])]
    slot_of = {place: slot for slot, place in enumerate(cuts)}
    blocks = []
    for name, found in sorted(uses.items(), key=lambda item: min(item[1])):
        params = [program.params[index] for index in members[name]]
        reduced = slot_of.get(ready.get(name, -1))
        blocks.append(
            _Block(
                tuple(members[name]),
                sum(param.whole_bytes for param in params),
                slot_of[min(found)],
                bisect.bisect_right(cuts, max(found)),
                reduced,
                wire.gather(params, program.group, hardware),
                wire.reduction(params, program.group, hardware, program.config.reduce_dtype),
            )
        )
    return blocks, seconds
