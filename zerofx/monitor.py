"""Tell how training goes: seconds of a step, exposed communication and bytes, by standard logging and to any sink of scalars."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from zerofx.errors import ConfigError
from zerofx.module import runtime_of
from zerofx.runtime import Runtime

_log = logging.getLogger("zerofx")

# What TensorBoard's ``SummaryWriter.add_scalar`` takes: tag, value, step.
Sink = Callable[[str, float, int], Any]


class Monitor:
    """Report every so many optimizer steps of a compiled model, until ``close`` or the end of a ``with``.

    Each report is one line of the logger ``zerofx`` (level INFO, with the rank where there are several) and one call of
    ``sink(tag, value, step)`` for each figure, as TensorBoard's ``add_scalar`` takes them: ``zerofx/step_s`` (seconds from step to
    step), ``zerofx/exposed_s`` (of these, waiting for communication; where a wait holds up the host, as on CPU),
    ``zerofx/whole_peak_bytes`` (whole parameters and buffers, as scheduled) and ``zerofx/peak_bytes`` (of the accelerator, else
    resident). Means are over the steps since the last report.
    Raises ConfigError for a model that was not compiled, and an ``every`` below 1.
    """

    def __init__(self, model: nn.Module, *, every: int = 10, sink: Sink | None = None) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(
                f"every={every!r} is no number of steps",
                where="zerofx.Monitor(every=...)",
                why="a report comes every so many optimizer steps",
                remedy="pass an int of at least 1",
            )
        self._runtime: Runtime = runtime_of(model)
        self._every, self._sink = every, sink
        group = self._runtime.group
        self._of_rank = f"rank {group.rank}, " if group.size > 1 else ""
        self._ours = {id(tensor) for tensor in self._runtime.tensors}
        self._step, self._waited_s = 0, 0.0
        self._start_s = time.perf_counter()
        self._hook = register_optimizer_step_post_hook(self._saw)

    def close(self) -> None:
        """Report no more."""
        self._hook.remove()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _saw(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not any(id(tensor) in self._ours for group in optimizer.param_groups for tensor in group["params"]):
            return
        self._step += 1
        if self._step % self._every == 0:
            self._report()

    def _report(self) -> None:
        now_s, waited_s = time.perf_counter(), self._runtime.waited_s
        figures = {"step_s": (now_s - self._start_s) / self._every}
        if waited_s is not None:
            figures["exposed_s"] = (waited_s - self._waited_s) / self._every
        if (schedule := self._runtime.schedule()) is not None:
            figures["whole_peak_bytes"] = schedule.peak_total_bytes
        figures["peak_bytes"] = _peak_bytes(self._runtime)
        _log.info("%sstep %d: %s", self._of_rank, self._step, ", ".join(f"{name} {value:.6g}" for name, value in figures.items()))
        if self._sink is not None:
            for name, value in figures.items():
                self._sink(f"zerofx/{name}", value, self._step)
        self._start_s, self._waited_s = time.perf_counter(), waited_s or 0.0


def _peak_bytes(runtime: Runtime) -> int:
    device = runtime.tensors[0].device
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
