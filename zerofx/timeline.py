"""Lowered programs as tasks for the simulator: what computes and what travels, in seconds on given hardware. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from zerofx import _torch, memory, ops, wire
from zerofx.cost import kernel_s
from zerofx.groups import Group
from zerofx.machine import Hardware
from zerofx.origins import module_of
from zerofx.params import Param, block_of
from zerofx.program import Mark, Program, arguments
from zerofx.simulate import Kind, Task
from zerofx.slots import transfer_of
from zerofx.steps import Step
from zerofx.work import bytes_of

_functional = torch.ops._c10d_functional
_KINDS: dict[Any, str] = {
    _functional.all_gather_into_tensor.default: "all_gather",
    _functional.all_gather_into_tensor_out.default: "all_gather",
    _functional.all_to_all_single.default: "all_to_all",
    _functional.reduce_scatter_tensor.default: "reduce_scatter",
    _functional.all_reduce.default: "all_reduce",
}
_WAIT = _functional.wait_tensor.default
QUEUE = "ranks"  # that of the ranks which share the model; other groups have theirs by their names
_DISK = "disk"
_OWN = ("gather_start", "reduce_start")


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
        size_bytes = bytes_of(node if kind == "all_gather" else arguments(node)[0])
        mark = node.meta.get("zerofx")
        if mark is not None and mark.kind in _OWN:
            return _part(launched[node], kind, size_bytes, program, mark, hardware)
        return _of_another_group(launched[node], kind, size_bytes, node, hardware)
    if node.target is _WAIT and arguments(node)[0] in launched:
        source = launched.pop(arguments(node)[0])
        return Task(f"{phase}: wait for {source}", Kind.WAIT, collective=source)
    if node.target is ops.read_ahead:
        mark = node.meta["zerofx"]
        name = f"{phase} load {mark.bucket}"
        nbytes = memory.shards_bytes([program.params[index] for index in mark.params])
        return Task(name, Kind.LAUNCH, _disk_s(nbytes, hardware), name, _DISK)
    if node.target is ops.load:
        name = f"{phase} load {node.meta['zerofx'].bucket}"
        return Task(f"{phase}: wait for {name}", Kind.WAIT, collective=name)
    if node.target is ops.spill_start:
        launched[node] = f"{phase} {node.name}"
        return Task(launched[node], Kind.LAUNCH, _disk_s(bytes_of(node), hardware), launched[node], _DISK)
    if node.target is ops.spill_wait:
        source = launched.pop(arguments(node)[0])
        return Task(f"{phase}: wait for {source}", Kind.WAIT, collective=source)
    if node.target is ops.spill_write:  # by the processor that computes
        return Task(f"{phase}: {node.name}", Kind.COMPUTE, _disk_s(bytes_of(arguments(node)[1]), hardware))
    if node.target is ops.refresh_wait:
        bucket = f"refresh {arguments(node)[1]}"
        return Task(f"{phase}: wait for {bucket}", Kind.WAIT, collective=bucket)
    return None


def _part(name: str, kind: str, size_bytes: float, program: Program, mark: Mark, hardware: Hardware) -> Task:
    """Return the launch of one of a bucket's collectives, with its share of what they take together."""
    bucket = transfer_of(program, mark, hardware)
    steals_s = wire.driving_s([(kind, size_bytes)], program.group, hardware)
    return Task(name, Kind.LAUNCH, bucket.seconds * size_bytes / bucket.total_bytes, name, QUEUE, steals_s)


def _disk_s(nbytes: int, hardware: Hardware) -> float:
    """Return the seconds that writing or reading so much takes; none where the disk is not known."""
    return nbytes / hardware.disk_bytes_per_s if hardware.disk_bytes_per_s else 0.0


def _of_another_group(name: str, kind: str, size_bytes: int, node: Node, hardware: Hardware) -> Task:
    """Return the launch of a collective that the model itself calls, or of one that restores an activation."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    group = arguments(node)[names.index("group_name")]
    ranks = _torch.group_size(group)
    steals_s = wire.sending_s([(kind, size_bytes)], ranks, hardware)
    return Task(name, Kind.LAUNCH, wire.collective_s(kind, size_bytes, ranks, hardware), name, group, steals_s)


def refreshes(params: Sequence[Param], buckets: Sequence[Sequence[int]], group: Group, hardware: Hardware) -> Iterator[Task]:
    """Yield the launches with which a forward at stages 1 and 2 begins after an optimizer step."""
    for number, members in enumerate(buckets):
        transfer, name = wire.gather([params[index] for index in members], group, hardware), f"refresh {number}"
        yield Task(name, Kind.LAUNCH, transfer.seconds, name, QUEUE, transfer.driving_s)
