"""The peak that a plan predicts is the peak that a step has."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zerofx
from benchmarks.measure import allocated_bytes
from benchmarks.workloads import GPT
from tests.programs import TiedStack, fake_ranks
from zerofx.config import Config
from zerofx.hardware import hardware
from zerofx.liveness import Kind
from zerofx.plans import plan

# The plan counts what tensors ask for; allocators round up, kernels have a little scratch memory, and scalars are not counted.
_TOLERANCE = 0.05


class Convolutions(nn.Module):
    """Convolutions, norms and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3)
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return functional.max_pool2d(functional.relu(self.second(functional.relu(self.norm(self.first(x))))), 2).square().mean()


def _tokens(rows: int, positions: int, vocabulary: int) -> Tensor:
    return torch.arange(rows * positions).view(rows, positions) % vocabulary


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (lambda: GPT(2, 128, 4, 1024, 64), lambda: _tokens(4, 64, 1024)),
    "stack": (lambda: TiedStack(4, 128, 512), lambda: _tokens(8, 32, 512)),
    "convolutions": (Convolutions, lambda: torch.randn(4, 3, 32, 32)),
}


def _measured(build: Callable[[], nn.Module], batch: Tensor, world_size: int, config: Config) -> int:
    """Return the most bytes that a step allocates above those at its start; the fake group allocates what a real one would."""
    with fake_ranks(world_size):
        model = zerofx.compile(build(), config=config)

        def step() -> None:
            model(batch).backward()

        found = []
        for _ in range(4):
            found.append(allocated_bytes(step))
            model.zero_grad()
    return min(found[1:])  # the first compiles


def _check(name: str, world_size: int, stage: int, backend: str, **settings: Any) -> None:
    build, feed = MODELS[name]
    config = Config(stage=stage, backend=backend, **settings)
    measured = _measured(build, feed(), world_size, config)
    machine = replace(hardware("h100"), disk_bytes_per_s=1e9)
    planned = plan(build(), (feed(),), world_size=world_size, hardware=machine, config=config)
    allocated = planned.step_peak_bytes - planned.peak_bytes.get(Kind.LOADED, 0)  # files are mapped
    print({"measured": measured, "planned": allocated})
    assert allocated == pytest.approx(measured, rel=_TOLERANCE)


# Every stage, every number of ranks: alone, even and uneven shards.
@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (2, 1), (4, 2), (2, 3), (1, 3), (3, 1), (3, 3), (1, 2)])
def test_peak_of_a_gpt(world_size: int, stage: int) -> None:
    _check("gpt", world_size, stage, "aot_eager")


@pytest.mark.parametrize("name", ["stack", "convolutions"])
@pytest.mark.parametrize("stage", [0, 3])
def test_peak_of_other_models(name: str, stage: int) -> None:
    _check(name, 2, stage, "aot_eager")


@pytest.mark.parametrize(("stage", "recompute"), [(3, "blocks"), (1, "selective"), (3, 0.5)])
def test_peak_with_what_is_computed_again(stage: int, recompute: str | float) -> None:
    _check("gpt", 2, stage, "aot_eager", recompute=recompute)


@pytest.mark.parametrize("kinds", [("gradients",), ("parameters", "gradients")])
def test_peak_with_shards_on_disk(kinds: tuple[str, ...]) -> None:
    _check("gpt", 2, 3, "aot_eager", offload={**dict.fromkeys(kinds, "disk"), "min_bytes": 1})


@pytest.mark.parametrize("stage", [0, 3])
def test_peak_under_inductor(stage: int) -> None:
    _check("gpt", 2, stage, "inductor")
