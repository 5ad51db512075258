"""What a backward computes again is what the forward computed."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.ranks import Pool
from tests.reference import whole
from tests.stages import TIGHT
from zerofx.config import Config, HookLimits

RECOMPUTE = ("blocks", "selective", ("h.1", "h.*.linear"))


class Block(nn.Module):
    """Reads a parameter by name, draws random numbers, keeps statistics, and changes a buffer that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.scale = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Parameter(torch.ones(6))
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("decay", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.decay.mul_(0.9)
        return self.dropout(torch.tanh(self.norm(self.linear(x))) * self.scale) * self.decay + x


class Stack(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.h, self.head = nn.ModuleList([Block() for _ in range(layers)]), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return self.head(x).square().sum()


def trained(plain: nn.Module, rank: int, **settings: Any) -> list[Tensor]:
    torch._dynamo.reset()
    model = zerofx.compile(copy.deepcopy(plain), config=Config(**settings))
    torch.manual_seed(rank)
    x = torch.randn(5, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        model(2 * x)  # a forward without a backward changes buffers once too
    return [*map(whole, model.parameters()), *(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()]


def differing(rank: int, world: int, backend: str, stage: int) -> list[str]:
    torch.manual_seed(0)
    plain, found = Stack(), []
    limits = (HookLimits(), TIGHT) if backend == "hooks" else (HookLimits(),)
    expected = trained(plain, rank, backend=backend, stage=stage)
    for recompute, hooks in itertools.product(RECOMPUTE, limits):
        tensors = trained(plain, rank, backend=backend, stage=stage, recompute=recompute, hooks=hooks)
        if not all(map(torch.equal, tensors, expected)):
            found.append(f"{backend}, stage {stage}, recompute={recompute}, {hooks}")
    return found


@pytest.mark.parametrize(("backend", "stage"), [("aot_eager", 1), ("aot_eager", 3), ("hooks", 1), ("hooks", 3), ("inductor", 3)])
def test_equals_keeping_everything_bitwise(ranks: Pool, backend: str, stage: int) -> None:
    if backend == "inductor":
        assert ranks.run(differing_by_inductor, 2) == [[], []]
    else:
        assert ranks.run(differing, 2, backend, stage) == [[], []]


def differing_by_inductor(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    plain = Stack(1)
    expected = trained(plain, rank, stage=3)
    # Inductor may add up in another order where it fuses other loops.
    again = trained(plain, rank, stage=3, recompute="blocks")
    return [str(place) for place, pair in enumerate(zip(again, expected, strict=True)) if not torch.allclose(*pair, rtol=1e-6, atol=1e-6)]


class Summed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        return output.sum()


def cast_differences(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    plain, found = Summed(*(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(3))), []
    for backend in ("aot_eager", "hooks"):
        settings: dict[str, Any] = {"backend": backend, "stage": 3, "param_dtype": torch.bfloat16}
        expected, again = trained(plain, rank, **settings), trained(plain, rank, recompute="blocks", **settings)
        found += [backend for pair in zip(again, expected, strict=True) if not torch.equal(*pair)]
    return found


def test_inputs_are_cast_once(ranks: Pool) -> None:
    """fp32 inputs of a model that computes in bfloat16 (case 32)."""
    assert ranks.run(cast_differences, 2) == [[], []]
