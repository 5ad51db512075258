"""Whole copies of parameters that outlive a step, and the gathers that refresh them."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from zerofx import _torch, collectives, memory
from zerofx.collectives import Refresh
from zerofx.config import Config
from zerofx.groups import Group
from zerofx.params import Param, block_of


class InFlight(Protocol):
    """What was launched."""

    def wait(self) -> None:
        """Finish it."""
        ...


class Arrivals:
    """Refreshes of whole copies, by bucket: launched in order, as many ahead of use as have room for their buffers.

    A lowered graph waits for each where it first reads it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._held_bytes = most_bytes, 0
        self._queue: deque[tuple[int, int, Callable[[], InFlight]]] = deque()
        self._flying: dict[int, tuple[InFlight, int]] = {}

    def add(self, bucket: int, size_bytes: int, launch: Callable[[], InFlight]) -> None:
        """Launch a refresh as soon as those before it leave room for its buffers."""
        self._queue.append((bucket, size_bytes, launch))
        self._fill()

    def wait(self, bucket: int) -> None:
        """Finish a refresh, if it is one of those added."""
        while any(queued == bucket for queued, _, _ in self._queue):
            self._land(next(iter(self._flying)))  # the oldest makes room
        if bucket in self._flying:
            self._land(bucket)

    def launch_all(self) -> None:
        """Launch what is left, whatever room there is."""
        while self._queue:
            self._launch()

    def finish(self) -> None:
        """Wait for whatever the forward did not read."""
        while self._flying:
            self._land(next(iter(self._flying)))

    def _fill(self) -> None:
        while self._queue and (not self._flying or self._held_bytes + self._queue[0][1] <= self._most_bytes):
            self._launch()

    def _launch(self) -> None:
        bucket, size, launch = self._queue.popleft()
        self._flying[bucket] = launch(), size
        self._held_bytes += size

    def _land(self, bucket: int) -> None:
        refresh, size = self._flying.pop(bucket)
        self._held_bytes -= size
        refresh.wait()
        self._fill()


class Versions:
    """Counts the changes of each parameter's shard.

    An operator on one DTensor counts in its own version, a loader's in its local tensor's. The list operators of optimizers
    (``foreach``, ``fused``) count nowhere on a DTensor, so each optimizer's step counts as a change of what it holds. Module.to gives
    a DTensor another local tensor, whose version starts anew: so what is counted is that versions differ, and not by how much.
    """

    def __init__(self, tensors: list[nn.Parameter]) -> None:
        self._tensors = tensors
        self._places = {id(tensor): place for place, tensor in enumerate(tensors)}
        self._steps = [0] * len(tensors)
        self._changes = [0] * len(tensors)
        self._seen: list[tuple[int, int] | None] = [None] * len(tensors)
        self._locals = [weakref.ref(_torch.local_tensor(tensor)) for tensor in tensors]
        this = weakref.ref(self)

        def saw(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (found := this()) is not None:
                found._count(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(saw).remove)

    def of(self, index: int) -> int:
        """Return a number that differs after each change."""
        tensor = self._tensors[index]
        local = _torch.local_tensor(tensor)
        seen = tensor._version, local._version
        if self._seen[index] != seen or self._locals[index]() is not local:
            self._changes[index] += 1
            self._seen[index], self._locals[index] = seen, weakref.ref(local)
        return self._changes[index] + self._steps[index]

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if (place := self._places.get(id(tensor))) is not None:
                    self._steps[place] += 1


class WholeCopies:
    """The whole copy of each sharded parameter, None where the stage keeps none; gathered anew only when its shard changed."""

    def __init__(self, config: Config, group: Group, params: tuple[Param, ...], tensors: list[nn.Parameter], versions: Versions) -> None:
        self._config, self._group, self._params, self._tensors, self._changes = config, group, params, tensors, versions
        self.copies: list[Tensor | None] = self._new_copies()
        self.buckets = refresh_buckets(config, params)
        self.arrivals = Arrivals(memory.refreshing_bytes(self.buckets, params, group, config))
        self._versions = [-1] * len(params)

    def _new_copies(self) -> list[Tensor | None]:
        return [
            collectives.new_whole(param, _torch.local_tensor(tensor).device) if param.has_copy else None
            for param, tensor in zip(self._params, self._tensors, strict=True)
        ]

    def stale(self) -> list[int]:
        """Return the buckets whose shards changed since their last gather, in layer order."""
        return [bucket for bucket, members in enumerate(self.buckets) if any(self._changed(index) for index in members)]

    def _changed(self, index: int) -> bool:
        return self._changes.of(index) != self._versions[index]

    def refresh(self, buckets: Sequence[int], shards: Sequence[Tensor]) -> None:
        """Launch the gathers of buckets, the first ones at once."""
        for bucket in buckets:
            self.arrivals.wait(bucket)
            members = self.buckets[bucket]
            params = [self._params[index] for index in members]
            wholes = [whole for index in members if (whole := self.copies[index]) is not None]
            sent = [shards[index].detach() for index in members]
            launch = functools.partial(_launch, wholes, sent, params, self._group)
            self.arrivals.add(bucket, memory.packed_bytes(params, self._group), launch)
            for index in members:
                self._versions[index] = self._changes.of(index)

    def arrive(self, index: int) -> None:
        """Wait for the whole copy of one parameter, outside a compiled graph."""
        for bucket, members in enumerate(self.buckets):
            if index in members:
                self.arrivals.wait(bucket)


def _launch(wholes: Sequence[Tensor], shards: Sequence[Tensor], params: Sequence[Param], group: Group) -> Refresh:
    with torch.no_grad():
        return collectives.refresh_start(wholes, shards, params, group)


def refresh_buckets(config: Config, params: Sequence[Param]) -> tuple[tuple[int, ...], ...]:
    """Bucket the parameters that have whole copies by block, in registration order: the same for every graph of the model."""
    buckets: list[list[Param]] = []
    for param in params:
        if not param.has_copy:
            continue
        size = sum(other.whole_bytes for other in buckets[-1]) if buckets else 0
        joins = buckets and (size < config.bucket_min_bytes or block_of(buckets[-1][0].name) == block_of(param.name))
        if not joins or size + param.whole_bytes > config.bucket_max_bytes:
            buckets.append([])
        buckets[-1].append(param)
    return tuple(tuple(param.index for param in bucket) for bucket in buckets)
