"""Two trainings of the same model on the same batches: with zerofx on every rank, and in one process alone."""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerofx.demo.measure import Measured, measure, watch_wholes
from zerofx.demo.model import CONTEXT_BYTES, ROWS_PER_RANK, batch, new_model
from zerofx.traffic import TrafficCounter

LEARNING_RATE = 1e-3
CLIP_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of the training, and where it runs."""

    index: int
    world_size: int
    device: torch.device

    def say(self, text: str = "", end: str = "\n") -> None:
        """Print on rank 0 only."""
        if self.index == 0:
            print(text, end=end, flush=True)

    def mean(self, value: Tensor) -> float:
        """Return the mean of a scalar over the ranks."""
        total = value.detach().clone()
        if self.world_size > 1:
            dist.all_reduce(total)
        return total.item() / self.world_size


@dataclass(slots=True)
class History:
    """What each step of one training gave: mean loss, norm of the mean gradient, seconds."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def median_seconds(self) -> float:
        """The median step, without the first two, which may compile, and the last, which is measured."""
        return statistics.median(self.seconds[2:-1] or self.seconds[-1:])

    @property
    def excess_seconds(self) -> float:
        """What the first two steps took beyond a median one: their compilation."""
        return max(0.0, sum(self.seconds[:2]) - 2 * self.median_seconds)

    def add(self, loss: float, norm: Tensor, start: float) -> None:
        """Note one step that began at ``start`` (seconds of ``perf_counter``)."""
        self.losses.append(loss)
        self.norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        self.seconds.append(time.perf_counter() - start)


def train_single(rank: Rank, text: Tensor, steps: int) -> History:
    """Train in this process alone, eagerly, on the batches of all ranks concatenated."""
    model = new_model(rank.device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    history = History()
    for step in range(steps):
        start = time.perf_counter()
        loss: Tensor = model(*batch(text, step, range(rank.world_size), rank.device))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        history.add(loss.item(), norm, start)
        show_progress(rank, history, steps)
    return history


def train_sharded(rank: Rank, text: Tensor, model: nn.Module, steps: int) -> tuple[History, Measured]:
    """Train one rank of a compiled model, and measure its last step."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    counter = TrafficCounter(rank.world_size)
    history = History()
    for step in range(steps):
        last = step == steps - 1
        if last:
            watch_wholes(model, counter)
        start = time.perf_counter()
        with counter if last else nullcontext():
            loss: Tensor = model(*batch(text, step, [rank.index], rank.device))
            loss.backward()
        # Clipping communicates for the user, not for ZeRO, so it is left out of the count.
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        with counter if last else nullcontext():
            optimizer.step()
        if last:
            measured = measure(model, optimizer, counter)
        optimizer.zero_grad()
        history.add(rank.mean(loss), norm, start)
        show_progress(rank, history, steps)
    return history, measured


def show_progress(rank: Rank, history: History, steps: int) -> None:
    """Print the last step: in place on a terminal, else every tenth of the training."""
    done = len(history.losses)
    on_terminal = sys.stdout.isatty()
    if not on_terminal and done not in (1, steps) and done % max(1, steps // 10):
        return
    tokens = rank.world_size * ROWS_PER_RANK * CONTEXT_BYTES
    line = f"  step {done}/{steps}  loss {history.losses[-1]:.4f}  {tokens / history.seconds[-1]:,.0f} tokens/s"
    rank.say(f"\r{line:<70}" if on_terminal else line, end="" if on_terminal and done < steps else "\n")
