"""The peak that a plan predicts is the peak that a step has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads import GPT
from tests.peaks import PEAK_TOLERANCE, step_peaks_bytes
from tests.programs import TiedStack
from zerofx.config import Config


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


def _check(name: str, world_size: int, stage: int, backend: str, **settings: Any) -> None:
    build, feed = MODELS[name]
    measured, planned = step_peaks_bytes(build, feed(), world_size, Config(stage=stage, backend=backend, **settings))
    print({"measured": measured, "planned": planned})
    assert planned == pytest.approx(measured, rel=PEAK_TOLERANCE)


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


@pytest.mark.parametrize(("stage", "recompute"), [(0, None), (3, "blocks")])
def test_peak_under_inductor(stage: int, recompute: str | None) -> None:
    _check("gpt", 2, stage, "inductor", recompute=recompute)
