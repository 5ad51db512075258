"""A model that is too large to train any other way here: a few steps, with what they take of memory, disk and time."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import zerofx
from zerofx.demo import Options
from zerofx.demo.model import ByteGPT, Size, batch
from zerofx.demo.train import Rank

EXIT_OVER_LIMIT = 4
STEPS = 3
LEARNING_RATE = 1e-5
MIB = 2**20
# Whole parameters and communication buffers may take this share of the limit; the rest is for activations, windows and the process.
_SHARE = 4


@dataclass(slots=True)
class Step:
    """Seconds of one step by phase, its loss, and what its rank read from disk and wrote, in bytes."""

    loss: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    read_bytes: int = 0
    written_bytes: int = 0

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def train_large(options: Options, rank: Rank, text: Tensor) -> int:
    """Build and train a model of ``Options.params`` parameters; say what it took. Returns the exit status.

    It is ``EXIT_OVER_LIMIT`` where a rank had more resident than ``Options.memory_limit_bytes`` at any time.
    """
    assert options.params is not None
    size, limit = Size.of(options.params), options.memory_limit_bytes
    start, progress = time.perf_counter(), Progress(rank)
    progress.say(f"building {size.blocks} blocks of width {size.width}, each parameter cut as it is made")
    torch.manual_seed(0)
    with torch.device(rank.device), zerofx.init(offload=options.offload):
        model = ByteGPT(size)
    count = sum(parameter.numel() for parameter in model.parameters())
    zerofx.compile(
        model,
        stage=options.stage,
        backend=options.backend,
        recompute="blocks",
        offload=options.offload,
        memory_limit=None if limit is None else limit // _SHARE,
    )
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    progress.end(f"built {count / 1e9:.3g} billion parameters in {time.perf_counter() - start:.0f} s")
    rank.say("the first step compiles")
    steps = []
    total = options.steps or STEPS
    for number in range(total):
        step, io = Step(), io_bytes()
        for phase in ("forward", "backward", "optimizer"):
            progress.say(f"step {number + 1}/{total}: {phase}, {resident_bytes() / MIB:,.0f} MiB resident")
            with timed(step, phase):
                if phase == "forward":
                    loss: Tensor = model(*batch(text, number, [rank.index], rank.device, rows_per_rank=1))
                elif phase == "backward":
                    loss.backward()
                else:
                    optimizer.step()
                    optimizer.zero_grad()
        step.loss = rank.mean(loss)
        step.read_bytes, step.written_bytes = (now - before for now, before in zip(io_bytes(), io, strict=True))
        steps.append(step)
        progress.end(f"step {number + 1}/{total}: loss {step.loss:.4f}, {_phases(step)}, {resident_bytes() / MIB:,.0f} MiB resident")
    peak_bytes = _most(resident_bytes("VmHWM"), rank)
    rank.say("\n".join(_summary(steps, peak_bytes, options, rank)))
    if options.json_path is not None and rank.index == 0:
        found = {"parameters": count, "peak_bytes": peak_bytes, "steps": [asdict(step) for step in steps]}
        options.json_path.write_text(json.dumps(found, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()
    return EXIT_OVER_LIMIT if limit is not None and peak_bytes > limit else 0


class Progress:
    """One line that says what goes on: in place on a terminal; elsewhere only what has ended."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._on_terminal = rank, sys.stdout.isatty()

    def say(self, text: str) -> None:
        if self._on_terminal:
            self._rank.say(f"\r{text:<100}", end="")

    def end(self, text: str) -> None:
        self._rank.say(f"\r{text:<100}" if self._on_terminal else text)


@contextmanager
def timed(step: Step, phase: str) -> Iterator[None]:
    """Note the seconds of a phase."""
    start = time.perf_counter()
    yield
    step.seconds[phase] = time.perf_counter() - start


def resident_bytes(field: str = "VmRSS") -> int:
    """Return what this process has in memory, or had at most (``VmHWM``)."""
    return _status(Path("/proc/self/status")).get(field, 0) * 1024


def io_bytes() -> tuple[int, int]:
    """Return what this process has made its disks read, and what it has given them to write."""
    found = _status(Path("/proc/self/io"))
    return found.get("read_bytes", 0), found.get("write_bytes", 0)


def _status(path: Path) -> dict[str, int]:
    fields = (line.split() for line in path.read_text().splitlines()) if path.exists() else ()
    return {words[0].rstrip(":"): int(words[1]) for words in fields if len(words) > 1 and words[1].isdecimal()}


def _most(value: int, rank: Rank) -> int:
    if rank.world_size == 1:
        return value
    most = torch.tensor(value, device=rank.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def _phases(step: Step) -> str:
    return ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in step.seconds.items())


def _summary(steps: list[Step], peak_bytes: int, options: Options, rank: Rank) -> Iterator[str]:
    later = steps[1:]
    seconds = statistics.median(step.total_s for step in later)
    yield ""
    yield f"a step takes {seconds:.1f} s (median of {len(later)}, without the first)"
    read, written = (statistics.median(getattr(step, name) for step in later) for name in ("read_bytes", "written_bytes"))
    if options.offload is not None:
        both = rank.world_size * (read + written) / 1e9
        yield (
            f"in a step each rank reads {read / 1e9:.2f} GB from disk and writes {written / 1e9:.2f} GB: "
            f"all ranks together {both:.1f} GB, {1e3 * both / seconds:.0f} MB/s"
        )
    limit = options.memory_limit_bytes
    verdict = "" if limit is None else f": {'within' if peak_bytes <= limit else 'OVER'} the limit of {limit / MIB:,.0f} MiB"
    yield f"most resident of any rank, the interpreter and torch included: {peak_bytes / MIB:,.0f} MiB{verdict}"
