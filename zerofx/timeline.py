"""Lowered programs as tasks for the simulator: what computes and what travels, in seconds on given hardware. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from zerofx import memory, ops, wire
from zerofx.cost import kernel_s
from zerofx.groups import Group
from zerofx.machine import Hardware
from zerofx.origins import module_of
from zerofx.params import Param, block_of
from zerofx.program import Mark, Program, arguments
from zerofx.simulate import Kind, Task
from zerofx.slots import transfer_of
from zerofx.steps import Step

_functional = torch.ops._c10d_functional
_KINDS: dict[Any, str] = {
    _functional.all_gather_into_tensor_out.default: "all_gather",
    _functional.all_to_all_single.default: "all_to_all",
    _functional.reduce_scatter_tensor.default: "reduce_scatter",
    _functional.all_reduce.default: "all_reduce",
}
_WAIT = _functional.wait_tensor.default
_QUEUE = "ranks"
_DISK = "disk"


@dataclass(frozen=True, slots=True)
class Moment:
    """A task of a step, and the most bytes that the step's own allocations hold while it runs."""

    task: Task
    alive_bytes: int = 0


def moments(program: Program, steps: Sequence[Step], alive_bytes: Sequence[int], hardware: Hardware) -> Iterator[Moment]:
    """Yield the tasks of one lowered program with the bytes alive. Computing between two events is one task for each block."""
    phase, pending_s, most, block = program.phase.value, 0.0, 0, ""
    launched: dict[Node, str] = {}
    for place, step in enumerate(steps):
        node = step.nodes[0]
        event = _event(node, launched, program, hardware)
        here = block_of(f"{module_of(step.nodes[-1])}.x")
        if pending_s and (event is not None or here != block):
            yield Moment(Task(f"{phase}: {block or '(model)'}", Kind.COMPUTE, pending_s), most)
            pending_s, most = 0.0, 0
        block, most = here, max(most, alive_bytes[place])
        if event is not None:
            yield Moment(event, alive_bytes[place])
        elif step.kernel is not None:
            pending_s += kernel_s(step.kernel, hardware)
    if pending_s:
        yield Moment(Task(f"{phase}: {block or '(model)'}", Kind.COMPUTE, pending_s), most)


def _event(node: Node, launched: dict[Node, str], program: Program, hardware: Hardware) -> Task | None:
    """Return the launch or wait that a node is; remember what is launched."""
    phase = program.phase.value
    if (kind := _KINDS.get(node.target)) is not None:
        launched[node] = f"{phase} {node.name}"
        # what a gather gives, what the others take
        value = node.meta["val"] if kind == "all_gather" else arguments(node)[0].meta["val"]
        return _part(launched[node], kind, math.prod(value.shape) * value.dtype.itemsize, program, node.meta["zerofx"], hardware)
    if node.target is _WAIT:
        source = launched.pop(arguments(node)[0])
        return Task(f"{phase}: wait for {source}", Kind.WAIT, collective=source)
    if node.target is ops.read_ahead:
        mark = node.meta["zerofx"]
        name = f"{phase} load {mark.bucket}"
        nbytes = memory.shards_bytes([program.params[index] for index in mark.params])
        return Task(name, Kind.LAUNCH, nbytes / hardware.disk_bytes_per_s if hardware.disk_bytes_per_s else 0.0, name, _DISK)
    if node.target is ops.load:
        name = f"{phase} load {node.meta['zerofx'].bucket}"
        return Task(f"{phase}: wait for {name}", Kind.WAIT, collective=name)
    if node.target is ops.refresh_wait:
        bucket = f"refresh {arguments(node)[1]}"
        return Task(f"{phase}: wait for {bucket}", Kind.WAIT, collective=bucket)
    return None


def _part(name: str, kind: str, size_bytes: float, program: Program, mark: Mark, hardware: Hardware) -> Task:
    """Return the launch of one of a bucket's collectives, with its share of what they take together."""
    bucket = transfer_of(program, mark, hardware)
    steals_s = wire.driving_s([(kind, size_bytes)], program.group, hardware)
    return Task(name, Kind.LAUNCH, bucket.seconds * size_bytes / bucket.total_bytes, name, _QUEUE, steals_s)


def refreshes(params: Sequence[Param], buckets: Sequence[Sequence[int]], group: Group, hardware: Hardware) -> Iterator[Task]:
    """Yield the launches with which a forward at stages 1 and 2 begins after an optimizer step."""
    for number, members in enumerate(buckets):
        transfer, name = wire.gather([params[index] for index in members], group, hardware), f"refresh {number}"
        yield Task(name, Kind.LAUNCH, transfer.seconds, name, _QUEUE, transfer.driving_s)
