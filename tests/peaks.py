"""The most that a step allocates, as measured in this process and as planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zerofx
from benchmarks.measure import allocated_bytes
from tests.programs import fake_ranks
from zerofx import memory
from zerofx.config import Config
from zerofx.plans import plan
from zerofx.presets import PRESETS
from zerofx.stored import Stored
from zerofx.traffic import TrafficCounter

# The plan counts what tensors ask for; allocators round up, kernels have a little scratch memory, and scalars are not counted.
PEAK_TOLERANCE = 0.05
# The schedule of the ranks that the tests run: gloo, and planned without figures of a machine.
_LINK = replace(PRESETS["h100"].intra_node, cpu_s_per_byte=1e-12)
GLOO = replace(PRESETS["h100"], intra_node=_LINK, inter_node=_LINK, disk_bytes_per_s=1e9)


class Sending(TorchDispatchMode):
    """Holds what is sent until its wait, as gloo does; the fake group lets go of it at once."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, Any] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SENDING:
            self._held[result.untyped_storage()._cdata] = args[0]
        elif func is torch.ops._c10d_functional.wait_tensor.default:
            self._held.pop(result.untyped_storage()._cdata, None)
        return result


_SENDING = (torch.ops._c10d_functional.all_gather_into_tensor_out.default, torch.ops._c10d_functional.all_to_all_single.default)


class Transferred(Sending):
    """Knows the most bytes at once of what collectives send and bring, beside what is there between steps: whole copies, shards."""

    def __init__(self) -> None:
        super().__init__()
        self._counter = TrafficCounter(1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _SENDING:
            self._counter.watch(args[0])
            self._counter.watch(result)
        return result

    def peak_bytes(self, step: Callable[[], object]) -> int:
        """Return the most bytes in a step, the third: the first compiles, the second shows what stays."""
        with self:
            for _ in range(3):
                standing = self._counter.whole_bytes
                self._counter.whole_peak_bytes = standing
                step()
        return self._counter.whole_peak_bytes - standing


@contextmanager
def _allocating_what_is_loaded() -> Iterator[None]:
    """Allocate beside each shard that is loaded as much again: shards on disk are mapped, which nobody counts."""
    load, evict, held = Stored.load, Stored.evict, dict[tuple[int, ...], Tensor]()

    def loading(stored: Stored, members: Iterable[int]) -> None:
        load(stored, members)
        held[tuple(members)] = torch.empty(memory.shards_bytes([stored._params[index] for index in members]), dtype=torch.uint8)

    def evicting(stored: Stored, members: Iterable[int]) -> None:
        evict(stored, members)
        held.pop(tuple(members), None)

    with mock.patch.object(Stored, "load", loading), mock.patch.object(Stored, "evict", evicting):
        yield


def _measured_bytes(build: Callable[[], nn.Module], batch: Tensor, world_size: int, config: Config) -> int:
    """Return the most bytes that a step allocates above those at its start."""
    with fake_ranks(world_size) if world_size > 1 else nullcontext():
        torch._dynamo.reset()
        model = zerofx.compile(build(), config=config)

        def step() -> None:
            with Sending():
                model(batch).backward()

        model(batch).backward()  # compiles
        found = []
        with _allocating_what_is_loaded():
            for _ in range(3):
                model.zero_grad()
                found.append(allocated_bytes(step))
    return min(found)


def step_peaks_bytes(build: Callable[[], nn.Module], batch: Tensor, world_size: int, config: Config) -> tuple[int, int]:
    """Return the measured and the planned peak of what a step allocates, and loads, above what is there between steps."""
    measured = _measured_bytes(build, batch, world_size, config)
    planned = plan(build(), (batch,), world_size=world_size, hardware=GLOO, optimize=False, config=config)
    return measured, planned.step_peak_bytes
