"""Bucket: which parameters move together."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from zerofx import memory, ops, placement
from zerofx.cost import attribute_s
from zerofx.machine import Hardware
from zerofx.params import Param, block_of
from zerofx.program import Level, Mark, Program
from zerofx.simulate import Timeline
from zerofx.slots import slots_of

# The taper makes the block that it cuts compile apart from its equals: that must save more than a small bucket's time.
_WORTH = 8
# What other buckets must save, as a share of the time, to stand in the place of those that fit any hardware.
_GAIN = 0.03

Buckets = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Parameter indices, bucket by bucket, in launch order."""

    gathers: Buckets
    reduces: Buckets


@dataclass(frozen=True, slots=True)
class Bucket:
    """Merge neighbours of one block into a bucket, and small neighbouring blocks into one.

    The first gathers and the last reductions stay small (a taper), for little compute can hide them; not so the gathers of a
    backward that starts with what was kept. Under a memory limit, buckets shrink until the program fits without prefetch, down to
    one parameter each. With hardware, other bounds and no taper are tried where communication is exposed, and what takes least stays.
    """

    takes: ClassVar[Level] = Level.REDUCED
    gives: ClassVar[Level] = Level.BUCKETED

    def plan(self, program: Program) -> BucketPlan:
        """Group gathers by first use, reductions by when their gradient is ready."""
        places = program.positions()
        gathers = [(mark.params[0], node) for node, mark in program.marked("gather") if node.op != "placeholder"]
        gathers.sort(key=lambda item: min(places[user] for user in item[1].users))
        reduces = [(mark.params[0], node) for node, mark in program.marked("reduce")]
        reduces.sort(key=lambda item: places[item[1]])
        order = [index for index, _ in gathers], [index for index, _ in reduces]
        limit = program.config.memory_limit_bytes
        max_bytes = program.config.bucket_max_bytes
        while True:
            plan = _plan(program, *order, max_bytes)
            if limit is None or max_bytes == 0 or _peak(program, plan) <= limit:
                break
            max_bytes = max_bytes // 2 if max_bytes > program.config.bucket_min_bytes // 8 else 0
        machine = program.config.machine
        return plan if machine is None else _quickest(program, order, max_bytes, plan, machine)

    def apply(self, program: Program, plan: BucketPlan) -> Program:
        """Replace gathers and reductions by a start, a wait and one item each, at the place of first need."""
        return apply_buckets(program, plan)


def apply_buckets(program: Program, plan: BucketPlan) -> Program:
    """Rewrite a program by a bucket plan."""
    places = program.positions()
    gathers = {mark.params[0]: node for node, mark in program.marked("gather") if node.op != "placeholder"}
    reduces = {mark.params[0]: node for node, mark in program.marked("reduce")}
    for number, members in enumerate(plan.gathers):
        nodes = [gathers[index] for index in members]
        first = min((user for node in nodes for user in node.users), key=places.__getitem__)
        _insert(program, "gather", nodes, members, number, first)
    for number, members in enumerate(plan.reduces):
        nodes = [reduces[index] for index in members]
        _insert(program, "reduce", nodes, members, number, max(nodes, key=places.__getitem__))
    return program


def _insert(program: Program, kind: str, nodes: list[Node], members: tuple[int, ...], number: int, before: Node) -> None:
    graph = program.graph
    start_op, wait_op = (ops.gather_start, ops.gather_wait) if kind == "gather" else (ops.reduce_start, ops.reduce_wait)
    with graph.inserting_before(before):
        start = graph.call_function(start_op, ([node.args[0] for node in nodes],))
        wait = graph.call_function(wait_op, (start,))
        items = [graph.call_function(operator.getitem, (wait, position)) for position in range(len(nodes))]
    start.meta["zerofx"] = Mark(f"{kind}_start", members, number)
    wait.meta["zerofx"] = Mark(f"{kind}_wait", members, number)
    for node, item in zip(nodes, items, strict=True):
        item.meta = {key: value for key, value in node.meta.items() if key != "zerofx"}
        node.replace_all_uses_with(item)
        graph.erase_node(node)


def _quickest(program: Program, order: tuple[list[int], list[int]], max_bytes: int, plan: BucketPlan, hardware: Hardware) -> BucketPlan:
    """Return the plan whose program is done first if all is launched early: the given one, unless another is worth the change."""
    limit = program.config.memory_limit_bytes
    seconds = {node.name: taken for node, taken in attribute_s(list(program.graph.nodes), hardware).items()}

    def timeline(other: BucketPlan) -> Timeline | None:
        bucketed = apply_buckets(program.copy(), other)
        if limit is not None and memory.peak_bytes(bucketed) > limit:
            return None
        return placement.earliest(slots_of(bucketed, seconds).problem).timeline

    found = timeline(plan)
    if found is None or found.exposed_s <= _GAIN * found.seconds:
        return plan
    best, best_s = plan, (1 - _GAIN) * found.seconds
    sizes = dict.fromkeys((max_bytes, max_bytes // 2, max_bytes // 4))
    for other in dict.fromkeys(_plan(program, *order, size, tapered=tapered) for size in sizes for tapered in (True, False)):
        taken = None if other == plan else timeline(other)
        if taken is not None and taken.seconds < best_s:
            best, best_s = other, taken.seconds
    return best


def _plan(program: Program, gathers: list[int], reduces: list[int], max_bytes: int, *, tapered: bool = True) -> BucketPlan:
    kept = any(node.op == "placeholder" for node, _ in program.marked("gather"))
    first = _group(program, gathers, max_bytes, tapered=tapered and not kept)
    last = _group(program, reduces[::-1], max_bytes, tapered=tapered)
    return BucketPlan(first, tuple(bucket[::-1] for bucket in last[::-1]))


def _group(program: Program, order: list[int], max_bytes: int, *, tapered: bool) -> Buckets:
    """Cut an order into buckets: by block, small neighbours merged, large ones split, the first that can be cut tapered."""
    buckets: list[list[Param]] = []
    for index in order:
        param = program.params[index]
        if not buckets or _closes(program, buckets[-1], param, max_bytes):
            buckets.append([])
        buckets[-1].append(param)
    if (
        len(buckets) > 1
        and _bytes(buckets[-1]) < program.config.bucket_min_bytes
        and _bytes(buckets[-2]) + _bytes(buckets[-1]) <= max_bytes
    ):
        tail = buckets.pop()
        buckets[-1].extend(tail)
    if tapered:
        buckets = _taper(buckets, _WORTH * program.config.bucket_min_bytes, max_bytes)
    return tuple(tuple(param.index for param in bucket) for bucket in buckets)


def _closes(program: Program, bucket: list[Param], param: Param, max_bytes: int) -> bool:
    size = _bytes(bucket)
    if size + param.whole_bytes > max_bytes:
        return True
    return size >= program.config.bucket_min_bytes and block_of(bucket[-1].name) != block_of(param.name)


def _taper(buckets: list[list[Param]], min_bytes: int, max_bytes: int) -> list[list[Param]]:
    """Halve the first bucket that can be halved, where little lies before it."""
    before = 0
    for place, bucket in enumerate(buckets):
        parts = _halves(bucket, min_bytes)
        if len(parts) > 1 or before > max_bytes:
            return [*buckets[:place], *parts, *buckets[place + 1 :]]
        before += _bytes(bucket)
    return buckets


def _halves(bucket: list[Param], min_bytes: int) -> list[list[Param]]:
    """Split a bucket before half of its bytes, where both parts are worth a collective."""
    most = max(min_bytes, _bytes(bucket) // 2)
    cut = next(cut for cut in range(1, len(bucket) + 1) if cut == len(bucket) or _bytes(bucket[: cut + 1]) > most)
    parts = [bucket[:cut], bucket[cut:]]
    return parts if all(part and _bytes(part) >= min_bytes for part in parts) else [bucket]


def _bytes(bucket: list[Param]) -> int:
    return sum(param.whole_bytes for param in bucket)


def _peak(program: Program, plan: BucketPlan) -> int:
    return memory.peak_bytes(apply_buckets(program.copy(), plan))
