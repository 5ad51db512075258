"""Reduce gradients over the ranks in buckets, while the backward goes on (no graph)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from zerofx import collectives, memory
from zerofx.agreement import Agreement, Unit
from zerofx.config import Config
from zerofx.eventlog import EventLog
from zerofx.groups import Group
from zerofx.params import Param
from zerofx.stored import Stored


@dataclass(frozen=True, slots=True)
class Flight:
    """The reduction of one bucket on its way."""

    what: str
    params: tuple[Param, ...]
    buffers: tuple[Tensor, ...]
    buffer_bytes: int


class Reductions:
    """Takes whole gradients as they become complete, and gives this rank's reduced shards at the end of a backward."""

    def __init__(
        self, config: Config, group: Group, params: tuple[Param, ...], log: EventLog, agreement: Agreement, stored: Stored | None
    ) -> None:
        self._stored = stored
        self._config, self._group, self._params, self._log, self._agreement = config, group, params, log, agreement
        self._divisor = config.divisor(group.size)
        self._open: list[tuple[Param, Tensor]] = []
        self._flights: deque[Flight] = deque()
        self._reduced: dict[int, Tensor] = {}
        self._launched = 0

    def add(self, index: int, grad: Tensor) -> None:
        """Take a gradient; launch a bucket where one is full, and wait for the oldest where too many are in flight."""
        if self._group.size == 1:
            self._give(index, grad.to(self._params[index].dtype))
            return
        self._open.append((self._params[index], grad))
        if sum(held.nbytes for _, held in self._open) >= self._config.bucket_min_bytes:
            self._launch()

    def forget(self) -> None:
        """Drop what a backward that raised left behind; what is in flight must end first, as on the other ranks."""
        self._open = []
        while self._flights:
            self._wait()
        self._reduced = {}

    def finish(self) -> dict[int, Tensor]:
        """Launch and wait for the rest; return every padded gradient shard by parameter."""
        if self._open:
            self._launch()
        while self._flights:
            self._wait()
        found, self._reduced, self._launched = self._reduced, {}, 0
        return found

    def _launch(self) -> None:
        params, grads = zip(*self._open, strict=True)
        self._open = []
        dtype = self._config.reduce_dtype
        unit = Unit((("reduce", tuple(param.index for param in params)),))
        with torch.no_grad():
            buffers = self._agreement.turn(unit, lambda: collectives.reduce_start(grads, params, self._group, dtype, self._divisor))
        size_bytes = memory.reduce_bytes(params, self._group, self._config)
        flight = Flight(f"reduce {self._launched}", params, tuple(buffers), size_bytes)
        self._launched += 1
        self._flights.append(flight)
        self._log.launch(flight.what, _indices(flight), buffer_bytes=size_bytes)
        while len(self._flights) > self._config.reduces_in_flight:
            self._wait()

    def _wait(self) -> None:
        flight = self._flights.popleft()
        with torch.no_grad():
            shards = self._agreement.guard(lambda: collectives.reduce_wait(flight.buffers, flight.params, self._group, self._divisor))
        self._log.wait(flight.what, _indices(flight), buffer_bytes=flight.buffer_bytes)
        for param, shard in zip(flight.params, shards, strict=True):
            self._give(param.index, shard)

    def _give(self, index: int, shard: Tensor) -> None:
        """Two forwards in one backward give a parameter two gradients."""
        total = self._reduced.pop(index) + shard if index in self._reduced else shard
        self._reduced[index] = total if self._stored is None else self._stored.store(index, total)


def _indices(flight: Flight) -> tuple[int, ...]:
    return tuple(param.index for param in flight.params)
