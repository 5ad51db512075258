"""Seconds of collectives on given hardware, and of buckets as ``collectives`` sends them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from zerofx.collectives import arrives_whole, chunks, pieces
from zerofx.groups import Group
from zerofx.machine import Hardware, Link
from zerofx.params import Param


def collective_s(kind: str, total_bytes: float, world_size: int, hardware: Hardware) -> float:
    """Return the seconds of one collective: ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all``.

    ``total_bytes`` are those of the whole tensor: what a gather gives, what the others take. Ranks fill one node after the other. A ring
    passes 1/N of it in each step, and waits in each for the slowest link on its way; what leaves a node shares all its adapters.
    Source: Thakur, Rabenseifner and Gropp, 2005 (ring); NVIDIA/nccl, src/graph/tuning.cc (steps by link).
    """
    if world_size == 1:
        return 0.0
    if kind == "all_to_all":
        seconds = _exchange_s(total_bytes, world_size, hardware)
    elif kind == "all_reduce":
        seconds = min(2 * _ring_s(total_bytes, world_size, hardware), _tree_s(total_bytes, world_size, hardware))
    elif kind in ("all_gather", "reduce_scatter"):
        seconds = _ring_s(total_bytes, world_size, hardware)
    else:
        raise ValueError(f"{kind!r} is no collective of zerofx")
    return seconds + hardware.launch_s


def _nodes(world_size: int, hardware: Hardware) -> tuple[int, int]:
    """Return (nodes, ranks on each)."""
    return math.ceil(world_size / hardware.ranks_per_node), min(world_size, hardware.ranks_per_node)


def _links(world_size: int, hardware: Hardware) -> list[Link]:
    nodes, ranks = _nodes(world_size, hardware)
    return [hardware.intra_node] * (ranks > 1) + [hardware.inter_node] * (nodes > 1)


def _ring_s(total_bytes: float, world_size: int, hardware: Hardware) -> float:
    nodes, _ = _nodes(world_size, hardware)
    between = nodes - 1
    latency_s = between * hardware.inter_node.latency_s + (world_size - 1 - between) * hardware.intra_node.latency_s
    slowest_s = max(link.transfer_s(total_bytes / world_size) for link in _links(world_size, hardware))
    return latency_s + (world_size - 1) * slowest_s


def _tree_s(total_bytes: float, world_size: int, hardware: Hardware) -> float:
    """A chain in each node and a binary tree of nodes, up and down."""
    nodes, ranks = _nodes(world_size, hardware)
    latency_s = math.ceil(math.log2(nodes)) * hardware.inter_node.latency_s + (ranks - 1) * hardware.intra_node.latency_s
    return 2 * (latency_s + max(link.transfer_s(total_bytes) for link in _links(world_size, hardware)))


def _exchange_s(total_bytes: float, world_size: int, hardware: Hardware) -> float:
    """Each rank sends 1/N to each other one; what goes to other nodes leaves by the adapters of all ranks of a node together."""
    nodes, ranks = _nodes(world_size, hardware)
    message_bytes, away = total_bytes / world_size, world_size - ranks
    within_s = (ranks - 1) * hardware.intra_node.transfer_s(message_bytes, exchange=True)
    between_s = away * hardware.inter_node.transfer_s(ranks * message_bytes, exchange=True) if nodes > 1 else 0.0
    return (ranks - 1) * hardware.intra_node.latency_s + away * hardware.inter_node.latency_s + max(within_s, between_s)


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a bucket costs: seconds from its start, on idle links, until all has arrived, bytes that travel, and seconds of the processor.

    ``driving_s`` are those that sending takes meanwhile; ``copying_s`` those of casting, packing and unpacking around it, and for a
    reduction of adding up what arrives, and averaging.
    """

    seconds: float = 0.0
    total_bytes: float = 0.0
    driving_s: float = 0.0
    copying_s: float = 0.0


def gather(params: Sequence[Param], group: Group, hardware: Hardware) -> Transfer:
    """Return what a bucket's gather costs."""
    copied = kernels = 0
    for chunk in chunks(params, group):
        members = [params[position] for position in chunk]
        shards = sum(param.shard_numel * param.whole_dtype.itemsize for param in members)
        copied += sum(param.shard_numel * param.dtype.itemsize for param in members if param.dtype is not param.whole_dtype)
        copied += shards * any(param.dtype is not param.whole_dtype for param in members)
        copied += 2 * shards * (len(chunk) > 1)
        kernels += len(chunk) > 1
        if members[0].dim is not None and not arrives_whole(chunk, params, group):
            copied += 2 * sum(param.whole_bytes for param in members)
            kernels += 1
    return _transfer(list(messages(params, group, "all_gather", None)), copied, kernels, group, hardware)


def reduction(params: Sequence[Param], group: Group, hardware: Hardware, dtype: torch.dtype | None = None) -> Transfer:
    """Return what a bucket's reduction costs; ``dtype`` is what travels (None: the compute dtype)."""
    copied = kernels = 0
    for chunk in chunks(params, group):
        whole = sum(params[position].bytes_in(dtype) for position in chunk)
        if len(chunk) > 1 or (params[chunk[0]].dim is not None and not arrives_whole(chunk, params, group)):
            copied += 2 * whole
            kernels += 1
        kernels += 1
        arriving = whole if group.transport.reduce == "all_to_all" or params[chunk[0]].dim is None else whole // group.size
        copied += arriving + sum(params[position].shard_numel * params[position].dtype.itemsize for position in chunk)
    return _transfer(list(messages(params, group, group.transport.reduce, dtype)), copied, kernels, group, hardware)


def _transfer(messages: list[tuple[str, float]], copied_bytes: int, kernels: int, group: Group, hardware: Hardware) -> Transfer:
    copying_s = copied_bytes / hardware.memory_bytes_per_s + kernels * hardware.launch_s
    total = sum(size for _, size in messages)
    return Transfer(_bucket_s(messages, group, hardware), total, driving_s(messages, group, hardware), copying_s)


def messages(params: Sequence[Param], group: Group, kind: str, dtype: torch.dtype | None) -> Iterator[tuple[str, float]]:
    """Yield the collectives that carry a bucket: (kind, bytes of the whole). What is replicated is not gathered.

    ``dtype`` is that of reductions (None: the compute dtype).
    """
    for chunk in chunks(params, group):
        members = [params[position] for position in chunk]
        size = sum(param.whole_bytes if kind == "all_gather" else param.bytes_in(dtype) for param in members)
        if params[chunk[0]].dim is not None:
            count = pieces(chunk, params, group)
            yield from ((kind, size / count) for _ in range(count))
        elif kind != "all_gather":
            yield "all_reduce", size


def _bucket_s(messages: Iterable[tuple[str, float]], group: Group, hardware: Hardware) -> float:
    """Return the seconds of a bucket's collectives, by kind and bytes, on idle links: together on gloo, in turn on NCCL."""
    if not group.transport.is_concurrent:
        return sum(collective_s(kind, size, group.size, hardware) for kind, size in messages)
    together: dict[str, float] = {}
    for kind, size in messages:
        together[kind] = together.get(kind, 0.0) + size
    return sum(collective_s(kind, size, group.size, hardware) for kind, size in together.items())


def driving_s(messages: Iterable[tuple[str, float]], group: Group, hardware: Hardware) -> float:
    """Return the processor seconds that a rank's own sending takes."""
    return sending_s(messages, group.size, hardware)


def sending_s(messages: Iterable[tuple[str, float]], ranks: int, hardware: Hardware) -> float:
    """Return the processor seconds that sending to so many ranks takes one of them."""
    sent = sum(size * (2 if kind == "all_reduce" else 1) for kind, size in messages) * (ranks - 1) / ranks
    return sent * max(link.cpu_s_per_byte for link in (hardware.intra_node, hardware.inter_node))
