"""Bytes of whole parameters and of communication in flight, at each event of a program. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from zerofx.collectives import Group, chunks
from zerofx.params import Param
from zerofx.program import Program


@dataclass(frozen=True, slots=True)
class Live:
    """Bytes right after an event: whole parameters, and communication buffers beside them."""

    node: Node
    whole_bytes: int
    buffer_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.whole_bytes + self.buffer_bytes


def packed_bytes(params: Sequence[Param], group: Group) -> int:
    """Bytes that a bucket's gather copies out of shared buffers; both copies live while it does."""
    shared = [chunk for chunk in chunks(params, group) if len(chunk) > 1 or params[chunk[0]].dim != 0]
    return sum(params[position].whole_bytes for chunk in shared for position in chunk)


def reduce_bytes(params: Sequence[Param], group: Group, itemsize: int | None = None) -> int:
    """Bytes in flight while a bucket's gradients reduce: what is sent, and what arrives."""
    sent = sum(param.whole_bytes // param.compute_dtype.itemsize * (itemsize or param.compute_dtype.itemsize) for param in params)
    if all(param.dim is None for param in params):
        return sent
    return sent + (sent // group.size if group.transport.reduce == "reduce_scatter" else sent)


def gradient_itemsize(program: Program) -> int | None:
    """Bytes of one gradient element on the wire; None for the parameter's own."""
    dtype = program.config.reduce_dtype
    return None if dtype is None else dtype.itemsize


def live(program: Program) -> list[Live]:
    """Walk a bucketed program and return the bytes alive after each of its events, in order."""
    itemsize = gradient_itemsize(program)
    whole, buffers, found = 0, 0, []
    kinds = ("gather", "gather_start", "gather_wait", "release", "reduce_start", "reduce_wait")
    for node, mark in program.marked(*kinds):
        params = [program.params[index] for index in mark.params]
        size = sum(param.whole_bytes for param in params)
        if mark.kind == "gather_start" or (mark.kind == "gather" and node.op == "placeholder"):
            whole += size
        elif mark.kind == "gather_wait":
            found.append(Live(node, whole, buffers + packed_bytes(params, program.group)))
            continue
        elif mark.kind == "release":
            whole -= size
        elif mark.kind == "reduce_start":
            buffers += reduce_bytes(params, program.group, itemsize)
        elif mark.kind == "reduce_wait":
            buffers -= reduce_bytes(params, program.group, itemsize)
        else:
            continue
        found.append(Live(node, whole, buffers))
    return found


def peak_bytes(program: Program) -> int:
    """The most bytes of whole parameters and communication buffers at any event."""
    return max((event.total_bytes for event in live(program)), default=0)
