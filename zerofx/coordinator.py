"""Fetch, prefetch and release whole parameters along the recorded order of submodules (stage 3 without a graph)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zerofx import _torch, collectives, memory
from zerofx.agreement import Agreement, Unit
from zerofx.collectives import Refresh
from zerofx.config import Config
from zerofx.eventlog import EventLog
from zerofx.groups import Group
from zerofx.params import Param
from zerofx.stored import Stored
from zerofx.trace import Route, Trace
from zerofx.wholes import Versions


class Whole:
    """One parameter's whole copy, whose storage comes and goes.

    Autograd saves ``tensor``; gathers fill ``target``, a second tensor over the storage with a version counter of its own:
    filling again what was saved is no change that autograd must know of.
    """

    def __init__(self, param: Param, device: torch.device) -> None:
        self.tensor = collectives.new_whole(param, device)
        storage = self.tensor.untyped_storage()
        self.target = torch.empty(0, dtype=self.tensor.dtype, device=device).set_(storage, 0, self.tensor.shape, self.tensor.stride())
        self.version = -1
        self._size_bytes = storage.nbytes()
        self.free()

    def allocate(self) -> None:
        self.tensor.untyped_storage().resize_(self._size_bytes)

    def free(self) -> None:
        self.tensor.untyped_storage().resize_(0)


@dataclass(frozen=True, slots=True)
class Flight:
    """A gather on its way."""

    what: str
    indices: tuple[int, ...]
    refresh: Refresh


class Coordinator:
    """Holds the whole parameters of one model at stage 3: whichever submodule runs finds its own, and the next ones are under way.

    Source: ZeRO-Infinity (Rajbhandari et al., 2021), section 6.2; the limits are those of DeepSpeed (``Config.hooks``).
    """

    def __init__(
        self,
        config: Config,
        group: Group,
        params: tuple[Param, ...],
        tensors: list[nn.Parameter],
        versions: Versions,
        local_shard: Callable[[int], Tensor],
        log: EventLog,
        agreement: Agreement,
        stored: Stored | None,
    ) -> None:
        self._stored = stored
        self._limits, self._group, self._params, self._agreement = config.hooks, group, params, agreement
        self._versions, self._local_shard, self._log = versions, local_shard, log
        sharded = [param for param in params if param.dim is not None and not param.stays]
        self._wholes = {param.index: Whole(param, _torch.local_tensor(tensors[param.index]).device) for param in sharded}
        self._numel = [math.prod(param.padded_shape) for param in params]
        threshold = self._limits.persistence_threshold_elements
        self._persistent = {param.index for param in sharded if self._numel[param.index] <= threshold}
        self._needs: dict[nn.Module, list[int]] = {}
        self._users = [0] * len(params)
        self._present: set[int] = set()  # whole, or on the way
        self._flights: dict[int, Flight] = {}
        self._live_elements = 0
        self._launched = 0
        self._forwards = {True: Trace(), False: Trace()}  # those that a backward follows, and those without
        self._backward = Trace()
        self._trace = self._forwards[True]
        self._route: Route | None = None
        self._cursor = 0  # the first step of the route that prefetching has not reached
        self._told = False

    def whole(self, index: int) -> Tensor | None:
        """Return a parameter's whole copy, None for one that is not sharded."""
        whole = self._wholes.get(index)
        return None if whole is None else whole.tensor

    def is_held(self, index: int) -> bool:
        """Whether somebody fetched the parameter and has not released it; one that is not sharded always is."""
        return index not in self._wholes or self._users[index] > 0

    # ---------------------------------------------------------------- passes over the model

    def begin_forward(self, *, with_backward: bool) -> None:
        """Start a forward: drop what is stale or was left over, and launch the small parameters that stay."""
        self._users = [0] * len(self._params)  # a forward or backward that raised released nothing
        self._drop(index for index in sorted(self._present) if self._wholes[index].version != self._versions.of(index))
        if not self._flights:
            self._launched = 0  # numbers name what is in flight
        self._launch(sorted(self._persistent))
        self._begin(self._forwards[with_backward], [self._backward] if with_backward else [])

    def end_forward(self, *, with_backward: bool) -> None:
        """End a forward; without a backward to come, nothing but small parameters stays."""
        self._end()
        if not with_backward:
            self._drop_all()

    def begin_backward(self) -> None:
        """Start a backward."""
        self._begin(self._backward, [])

    def end_backward(self) -> None:
        """End a backward: nothing but small parameters stays."""
        self._end()
        self._drop_all()

    def abandon(self) -> None:
        """Give up a forward that raised; its order says nothing."""
        self._drop_all()

    def _begin(self, trace: Trace, then: Sequence[Trace]) -> None:
        self._trace, self._cursor, trace.step, self._route = trace, 0, 0, None
        if trace.is_complete:
            order = [*trace.order, *(module for later in then if later.is_complete for module in later.order)]
            self._route = Route([tuple(self.needs(module)) for module in order], self._numel)

    def _end(self) -> None:
        if not self._trace.end():
            self._tell("fewer submodules ran than before")

    def _tell(self, what: str) -> None:
        self._route = None
        if not self._told and self._wholes:
            self._told = True
            text = f"zerofx hooks: {what}; the order of submodules is recorded again, without prefetch until then (said once)"
            warnings.warn(text, stacklevel=2)

    # ---------------------------------------------------------------- submodules

    def needs(self, module: Any) -> list[int]:
        """Return the sharded parameters that a submodule reads: its own, and those of others that it was seen to read."""
        if module not in self._needs:
            self._needs[module] = [index for index in dict.fromkeys(module._zerofx.indices.values()) if index in self._wholes]
        return self._needs[module]

    def fetch_sub_module(self, module: nn.Module) -> tuple[int, ...]:
        """Make a submodule's parameters whole, and launch the next ones along the route; return what it now holds."""
        needed = self.needs(module)
        if not self._trace.advance(module):
            self._tell(f"{type(module).__name__} runs where another submodule did before")
        self._launch(needed)
        self._prefetch()
        return self._hold(needed)

    def fetch_external(self, module: nn.Module, index: int) -> tuple[int, ...]:
        """Make a parameter whole that a submodule reads from another; from the next pass on it is fetched with its own."""
        if index not in self.needs(module):
            self._needs[module].append(index)
        self._launch([index])
        return self._hold([index])

    def keep(self, held: Sequence[int], what: str, remedy: str) -> None:
        """Keep parameters whole from now on: somebody could use them unseen, and must find them."""
        fresh = [index for index in held if index not in self._persistent]
        if fresh:
            self._persistent.update(fresh)
            names = ", ".join(self._params[index].name for index in fresh)
            warnings.warn(f"zerofx hooks: {what}; {names} stay whole until updated. To release them, {remedy}", stacklevel=2)

    def release_sub_module(self, held: Sequence[int]) -> None:
        """Free what a submodule held, except what others hold, what persists, and what is used again soon."""
        for index in held:
            self._users[index] -= 1
        self._drop(index for index in held if not self._users[index] and not self._stays(index))

    def _stays(self, index: int) -> bool:
        if index in self._persistent:
            return True
        again = None if self._route is None else self._route.distance(index, self._trace.step)
        # what is used again within the prefetch size would be fetched again at once
        keep_elements = max(self._limits.max_reuse_distance_elements, self._limits.prefetch_elements)
        return again is not None and again <= keep_elements and self._live_elements <= self._limits.max_live_elements

    def _hold(self, indices: Sequence[int]) -> tuple[int, ...]:
        for index in indices:
            self._users[index] += 1
            self._wait(index)
        return tuple(indices)

    def _prefetch(self) -> None:
        """Launch what the next steps need, in their order."""
        route, step = self._route, self._trace.step
        if route is None:
            return
        self._cursor = max(self._cursor, step)
        while self._cursor < len(route.needs) and route.elements[self._cursor + 1] - route.elements[step] <= self._limits.prefetch_elements:
            needed = [index for index in route.needs[self._cursor] if index not in self._present]
            if self._live_elements + sum(self._numel[index] for index in needed) > self._limits.max_live_elements:
                break
            self._launch(needed)
            self._cursor += 1

    # ---------------------------------------------------------------- storage

    def _launch(self, indices: Sequence[int]) -> None:
        """Launch one gather of those that are neither whole nor on the way."""
        missing = tuple(index for index in indices if index not in self._present)
        if not missing:
            return
        params, wholes = [self._params[index] for index in missing], [self._wholes[index] for index in missing]
        for index, whole in zip(missing, wholes, strict=True):
            whole.allocate()
            version = self._versions.of(index)
            if whole.version not in (-1, version):
                torch.autograd.graph.increment_version([whole.tensor])  # a graph that saved the old value must not use this one
            whole.version = version
        with torch.no_grad():
            shards, targets = [self._local_shard(index) for index in missing], [whole.target for whole in wholes]
            if self._stored is not None:
                self._stored.load(missing)
            unit = Unit((("gather", missing),))
            refresh = self._agreement.turn(unit, lambda: collectives.refresh_start(targets, shards, params, self._group))
        flight = Flight(f"gather {self._launched}", missing, refresh)
        self._launched += 1
        self._flights |= dict.fromkeys(missing, flight)
        self._present.update(missing)
        self._live_elements += sum(self._numel[index] for index in missing)
        self._log.launch(flight.what, missing, whole_bytes=sum(param.whole_bytes for param in params))

    def _wait(self, index: int) -> None:
        flight = self._flights.get(index)
        if flight is None:
            return
        with torch.no_grad():
            self._agreement.guard(flight.refresh.wait)
        if self._stored is not None:
            self._stored.evict(flight.indices)
        for other in flight.indices:
            del self._flights[other]
        params = [self._params[other] for other in flight.indices]
        self._log.wait(flight.what, flight.indices, packed_bytes=memory.packed_bytes(params, self._group))

    def _drop(self, indices: Iterable[int]) -> None:
        dropped = []
        for index in indices:
            self._wait(index)
            self._wholes[index].free()
            self._present.discard(index)
            self._live_elements -= self._numel[index]
            dropped.append(index)
        self._log.release(dropped, sum(self._params[index].whole_bytes for index in dropped))

    def _drop_all(self) -> None:
        self._users = [0] * len(self._params)
        self._drop(index for index in sorted(self._present) if index not in self._persistent)
