"""The demo: train a byte-level GPT on the standard library's own text with ZeRO, and check it against one process and the formulas."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerofx
from zerofx import formulas
from zerofx.errors import ZerofxError
from zerofx.traffic import TrafficCounter

VOCABULARY = 256
CONTEXT_BYTES = 128
ROWS_PER_RANK = 4
WIDTH = 144
HEADS = 6
BLOCKS = 6
LEARNING_RATE = 1e-3
CLIP_NORM = 1.0
SEED = 20

# Sums over ranks and over fused kernels add the same fp32 numbers in another order. A gradient differs by about 1e-7 of itself
# for it, and AdamW, which divides each element by its own size, passes that on in full to the elements that are nearly zero.
LOSS_TOLERANCE = 2e-3
# On the first step the weights are still equal, so only the order of summation differs. A wrong factor, which AdamW hides, shows.
FIRST_NORM_TOLERANCE = 1e-4

# Long enough for one rank to wait while another still compiles.
COLLECTIVE_TIMEOUT = timedelta(minutes=5)
EXIT_LOSSES_DIFFER = 3
EXIT_INTERRUPTED = 130
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the demo was asked to do. ``nproc`` None: two ranks, or as many as a launcher has started."""

    stage: int = 3
    nproc: int | None = None
    steps: int = 60
    backend: str = "inductor"
    json_path: Path | None = None


@dataclass(slots=True)
class History:
    """What happened in each step of one training: mean losses, gradient norms, seconds."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def median_seconds(self) -> float:
        """The median step, without the first, which compiles, and the last, which is counted."""
        return statistics.median(self.seconds[1:-1] or self.seconds[-1:])


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank held and sent in the last step, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    whole_peak: int
    sent: dict[str, int]


# --- model and data ---


class Block(nn.Module):
    """One transformer block: attention, then a two-layer network, each after a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.network_norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, positions, WIDTH) to the same shape."""
        rows, positions, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(rows, positions, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(rows, positions, WIDTH))
        return x + self.narrow(F.gelu(self.widen(self.network_norm(x))))


class ByteGPT(nn.Module):
    """A GPT over bytes, its embedding tied to its head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT_BYTES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.apply(_initialise)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats per byte, of ``targets`` (rows, positions) after ``inputs``."""
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def new_model(device: torch.device) -> ByteGPT:
    """Build the model with the same weights every time."""
    torch.manual_seed(SEED)
    return ByteGPT().to(device)


def standard_library_text() -> Tensor:
    """Read the modules of the installed standard library, in order of their names, as one tensor of bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) <= CONTEXT_BYTES:
        raise ZerofxError(f"there is no Python source to train on in {folder}", remedy="use a Python with its standard library on disk")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(text: Tensor, step: int, ranks: Iterable[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (rows, CONTEXT_BYTES) of one step for ``ranks``, concatenated in their order."""
    windows = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(SEED + step * 2**20 + rank)
        starts = torch.randint(len(text) - CONTEXT_BYTES, (ROWS_PER_RANK,), generator=generator)
        windows.append(text[starts[:, None] + torch.arange(CONTEXT_BYTES + 1)])
    rows = torch.cat(windows).long().to(device)
    return rows[:, :-1], rows[:, 1:]


# --- training ---


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank runs."""

    rank: int
    world_size: int
    device: torch.device

    def say(self, text: str, end: str = "\n") -> None:
        """Print on rank 0 only."""
        if self.rank == 0:
            print(text, end=end, flush=True)

    def mean(self, value: Tensor) -> float:
        """Return the mean over ranks of a scalar."""
        total = value.detach().clone()
        if self.world_size > 1:
            dist.all_reduce(total)
        return float(total) / self.world_size


def train_single(place: Place, text: Tensor, steps: int) -> History:
    """Train in this process alone, eagerly, on the batches of all ranks concatenated."""
    model = new_model(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    history = History()
    for step in range(steps):
        start = time.perf_counter()
        loss: Tensor = model(*batch(text, step, range(place.world_size), place.device))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        history.losses.append(float(loss))
        history.norms.append(float(norm))
        history.seconds.append(time.perf_counter() - start)
        _show_progress(place, step, steps, history)
    return history


def train_sharded(place: Place, text: Tensor, options: Options) -> Sharded:
    """Train one rank with zerofx, and measure what it holds and sends in the last step."""
    start = time.perf_counter()
    model = zerofx.compile(new_model(place.device), stage=options.stage, backend=options.backend)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    history = History()
    prepare_seconds = time.perf_counter() - start
    place.say(COMPILE_NOTE[options.backend])
    counter = TrafficCounter(place.world_size)
    for step in range(options.steps):
        last = step == options.steps - 1
        start = time.perf_counter()
        with counter if last else nullcontext():
            loss: Tensor = model(*batch(text, step, [place.rank], place.device))
            loss.backward()  # type: ignore[no-untyped-call]
        # Clipping communicates on the user's behalf, not on ZeRO's, so it is left out of the count.
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        with counter if last else nullcontext():
            optimizer.step()
        if last:
            held = held_bytes(model, optimizer)
        optimizer.zero_grad()
        history.add(place.mean(loss), norm, time.perf_counter() - start)
        show_progress(place, options.steps, history)
    compile_seconds = prepare_seconds + max(0.0, history.seconds[0] - history.median_seconds)
    return Sharded(history, held, counter, zerofx.schedule(model), compile_seconds)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of model states on one rank, as found in the tensors."""

    shards: int
    gradients: int
    optimizer: int


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    """Measure the storages of parameters, gradients and optimizer state."""
    parameters = list(model.parameters())
    state = [value for slots in optimizer.state.values() for value in slots.values() if isinstance(value, Tensor)]
    return Held(
        shards=_storage_bytes(parameters),
        gradients=_storage_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        optimizer=_storage_bytes(state),
    )


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Add up distinct storages: the shards of a bucket may share one."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}.values())
