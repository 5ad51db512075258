"""The most that a step allocates, as measured in this process and as planned."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zerofx
from benchmarks.measure import allocated_bytes
from tests.programs import fake_ranks
from zerofx.config import Config
from zerofx.liveness import Kind
from zerofx.plans import plan
from zerofx.presets import PRESETS

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
        for _ in range(3):
            model.zero_grad()
            found.append(allocated_bytes(step))
    return min(found)


def step_peaks_bytes(build: Callable[[], nn.Module], batch: Tensor, world_size: int, config: Config) -> tuple[int, int]:
    """Return the measured and the planned peak of what a step allocates above what is there between steps."""
    measured = _measured_bytes(build, batch, world_size, config)
    planned = plan(build(), (batch,), world_size=world_size, hardware=GLOO, optimize=False, config=config)
    return measured, planned.step_peak_bytes - planned.peak_bytes.get(Kind.LOADED, 0)  # files are mapped
