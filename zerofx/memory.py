"""Bytes of whole parameters and of communication in flight, at each event of a program. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from zerofx.collectives import arrives_whole, chunks
from zerofx.config import Config
from zerofx.groups import Group
from zerofx.offload import Offload
from zerofx.params import Param
from zerofx.program import Mark, Phase, Program


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
    shared = [chunk for chunk in chunks(params, group) if not arrives_whole(chunk, params, group)]
    return sum(params[position].whole_bytes for chunk in shared for position in chunk)


def moved_bytes(kind: str, params: Sequence[Param], config: Config) -> int:
    """Bytes of the whole tensors that a bucket moves: in the dtype of gathers, or in that of reductions."""
    return sum(param.bytes_in(config.reduce_dtype) if kind.startswith("reduce") else param.whole_bytes for param in params)


def reduce_bytes(params: Sequence[Param], group: Group, config: Config) -> int:
    """Bytes in flight while a bucket's gradients reduce: what is sent, and what arrives."""
    sent = moved_bytes("reduce", params, config)
    if all(param.dim is None for param in params):
        return sent
    return sent + (sent // group.size if group.transport.reduce == "reduce_scatter" else sent)


def bucket_bytes(program: Program, mark: Mark) -> int:
    """Bytes that a marked bucket holds: whole parameters for a gather, what is in flight for a reduction."""
    params = [program.params[index] for index in mark.params]
    if mark.kind.startswith("gather") or mark.kind == "release":
        return sum(param.whole_bytes for param in params)
    return reduce_bytes(params, program.group, program.config)


def kept_bytes(params: Sequence[Param]) -> int:
    """Bytes of the whole parameters that stay between steps, and of those too small to shard."""
    return sum(param.whole_bytes for param in params if param.stays or param.dim is None)


def standing_bytes(program: Program) -> int:
    """Bytes that a program holds at least: what stays whole, and what arrives beside it."""
    return kept_bytes(program.params) + arriving_bytes(program)


def arriving_bytes(program: Program) -> int:
    """Bytes of buffers that a forward's refreshes in flight hold beside the whole copies that they belong to."""
    if program.phase is not Phase.FORWARD:
        return 0
    facts = program.refresh_buckets, program.params, program.group
    return min(sum(_shared_bytes(*facts)), refreshing_bytes(*facts, program.config))


def refreshing_bytes(buckets: Sequence[Sequence[int]], params: Sequence[Param], group: Group, config: Config) -> int:
    """The most bytes of buffers that refreshes in flight may take: one bucket's, or those that fit twice the largest bucket allowed.

    A memory limit that leaves less beside the whole copies bounds them too.
    """
    room, limit = 2 * config.bucket_max_bytes, config.memory_limit_bytes
    if limit is not None and not config.fits:
        room = min(room, limit - kept_bytes(params))
    return max(room, *_shared_bytes(buckets, params, group), 0)


def _shared_bytes(buckets: Sequence[Sequence[int]], params: Sequence[Param], group: Group) -> list[int]:
    return [packed_bytes([params[index] for index in members], group) for members in buckets]


def shards_bytes(params: Sequence[Param]) -> int:
    """Bytes of one rank's shards, padding included."""
    return sum(param.shard_numel * param.dtype.itemsize for param in params)


def stored_shards(params: Sequence[Param], config: Config) -> frozenset[int]:
    """Return the parameters whose shards lie on disk: all but small ones, and those that every one of several ranks reads in place."""
    return _stored(params, config, "parameters")


def stored_gradients(params: Sequence[Param], config: Config) -> frozenset[int]:
    """Return the parameters whose reduced gradient shards lie on disk."""
    return _stored(params, config, "gradients")


def stored_states(params: Sequence[Param], config: Config) -> frozenset[int]:
    """Return the parameters whose optimizer state lies on disk; so do their shards where whole copies are beside these."""
    return _stored(params, config, "optimizer")


def _stored(params: Sequence[Param], config: Config, kind: str) -> frozenset[int]:
    offload = config.offload
    if not isinstance(offload, Offload) or getattr(offload, kind) is None:
        return frozenset()
    cut = [param for param in params if kind == "optimizer" or param.dim is not None or param.world_size == 1]
    return frozenset(param.index for param in cut if param.shard_numel * param.dtype.itemsize >= offload.min_bytes)


def live(program: Program) -> list[Live]:
    """Walk a bucketed program and return the bytes alive after each of its events, in order."""
    whole, buffers, found = kept_bytes(program.params), 0, []
    for node, mark in program.marked("gather", "gather_start", "gather_wait", "release", "reduce_start", "reduce_wait"):
        if mark.kind == "gather_wait":
            params = [program.params[index] for index in mark.params]
            found.append(Live(node, whole, buffers + packed_bytes(params, program.group)))
            continue
        size = bucket_bytes(program, mark)
        if mark.kind == "gather_start" or (mark.kind == "gather" and node.op == "placeholder"):
            whole += size
        elif mark.kind == "release":
            whole -= size
        elif mark.kind.startswith("reduce"):
            buffers += size if mark.kind == "reduce_start" else -size
        else:
            continue
        found.append(Live(node, whole, buffers))
    return found


def peak_bytes(program: Program) -> int:
    """The most bytes of whole parameters and communication buffers at any time."""
    return max(standing_bytes(program), *(event.total_bytes for event in live(program)), 0)
