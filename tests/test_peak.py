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
from tests.programs import TiedStack
from tests.ranks import Pool
from zerofx.config import Config
from zerofx.hardware import hardware
from zerofx.liveness import Kind
from zerofx.plans import plan
from zerofx.presets import PRESETS

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


# The schedule of the ranks that the tests run: gloo, and planned without figures of a machine.
_LINK = replace(PRESETS["h100"].intra_node, cpu_s_per_byte=1e-12)
GLOO = replace(PRESETS["h100"], intra_node=_LINK, inter_node=_LINK)


def _measured(rank: int, world_size: int, cases: list[tuple[str, Config]]) -> list[int]:
    """Return, for each case, the most bytes that a step allocates above those at its start."""
    found = []
    for name, config in cases:
        torch._dynamo.reset()
        build, feed = MODELS[name]
        model, batch = zerofx.compile(build(), config=config), feed()

        def step(model: nn.Module = model, batch: Tensor = batch) -> None:
            model(batch).backward()
            model.zero_grad()

        step()  # compiles
        found.append(min(allocated_bytes(step) for _ in range(12)))  # each free on gloo's threads, that it misses, adds to a run
    return found


def _check(ranks: Pool, world_size: int, backend: str, cases: list[tuple[str, int, Any]]) -> None:
    """Compare plans with what real ranks allocate: what is sent lives until it has arrived, which no fake group knows."""
    configs = [(name, Config(stage=stage, backend=backend, recompute=recompute)) for name, stage, recompute in cases]
    measured = ranks.run(_measured, world_size, configs, group=world_size > 1)[0]
    planned = []
    for name, config in configs:
        build, feed = MODELS[name]
        found = plan(build(), (feed(),), world_size=world_size, hardware=GLOO, optimize=False, config=config)
        planned.append(found.step_peak_bytes)
    ratios = {case: mine / theirs for case, mine, theirs in zip(cases, planned, measured, strict=True)}
    assert ratios == pytest.approx(dict.fromkeys(cases, 1.0), rel=_TOLERANCE)


# Every stage, every number of ranks: alone, even and uneven shards.
@pytest.mark.parametrize(("world_size", "stages"), [(1, (2, 3)), (2, (0, 1, 3)), (3, (1, 3)), (4, (2,))])
def test_peak_of_a_gpt(ranks: Pool, world_size: int, stages: tuple[int, ...]) -> None:
    _check(ranks, world_size, "aot_eager", [("gpt", stage, None) for stage in stages])


def test_peak_of_other_models(ranks: Pool) -> None:
    _check(ranks, 2, "aot_eager", [(name, stage, None) for name in ("stack", "convolutions") for stage in (0, 3)])


def test_peak_with_what_is_computed_again(ranks: Pool) -> None:
    _check(ranks, 2, "aot_eager", [("gpt", 3, "blocks"), ("gpt", 1, "selective"), ("gpt", 3, 0.5)])


@pytest.mark.parametrize(("stage", "recompute"), [(0, None), (3, "blocks")])
def test_peak_under_inductor(ranks: Pool, stage: int, recompute: str | None) -> None:
    _check(ranks, 2, "inductor", [("gpt", stage, recompute)])
