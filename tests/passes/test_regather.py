from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from tests.programs import Block, TiedStack, compilation, compiled
from zerofx.compilation import Compilation
from zerofx.params import block_of
from zerofx.program import output_of


def _crossing(found: Compilation) -> list[Node]:
    """What the forward hands to the backward: all that it returns behind the loss, but for its own inputs."""
    assert found.forward is not None
    return [node for node in output_of(found.forward.graph).args[0][1:] if node.op != "placeholder"]


def _kept(found: Compilation) -> set[int]:
    return next(record.plan.keep for record in found.records if record.name == "Regather")


def test_only_what_the_plan_keeps_crosses_whole() -> None:
    model = TiedStack(4, width=64)
    names = [name for name, _ in model.named_parameters()]
    last = Counter(tuple(sorted(tensor.shape)) for tensor in model.h[-1].parameters() if tensor.dim() > 1)
    found = compilation(compiled(model, torch.arange(16).view(2, 8), stage=3))
    # the tied embedding, which the head ends with, and the block before it: there is no room for one more
    kept = {names[index] for index in _kept(found)}
    assert kept == {name for name in names if block_of(name) in ("wte", "ln_f", "h.3")}
    parameters = dict(model.named_parameters())
    assert sum(parameters[name].numel() for name in kept) <= 2 * sum(tensor.numel() for tensor in model.h[-1].parameters())
    crossing = Counter(tuple(sorted(node.meta["val"].shape)) for node in _crossing(found))
    assert {shape: crossing[shape] for shape in last} == last
    assert crossing[64, 300] == 1


class Derived(nn.Module):
    """Weights that are computed from parameters: a product, and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(96, 1))
        self.base = nn.Parameter(torch.randn(96, 32))
        self.other = nn.Parameter(torch.randn(96, 32))
        self.out = nn.Linear(192, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat([self.base * self.scale, self.other])
        return self.out(torch.tanh(x @ weight.t())).sum()


def test_what_follows_from_parameters_alone_does_not_cross_either() -> None:
    found = compilation(compiled(Derived(), torch.randn(4, 32), stage=3, prefetch_buckets=0))
    assert not [
        node for node in _crossing(found) if 96 in node.meta["val"].shape or tuple(node.meta["val"].shape) in ((192, 32), (32, 192))
    ]


@pytest.mark.parametrize("share", [1.0, 1.5, 2.0, 3.0])
def test_what_stays_is_at_most_half_of_the_limit(share: float) -> None:
    model = nn.Sequential(Block(64), Block(64), nn.Flatten(0))
    sizes = [tensor.numel() * 4 for tensor in model.parameters()]
    limit = int(share * sum(sizes) / 2)
    model.register_forward_hook(lambda module, inputs, output: output.sum())
    found = compilation(compiled(model, torch.randn(4, 64), stage=3, memory_limit_bytes=limit))
    kept = _kept(found)
    assert sum(sizes[index] for index in kept) <= limit / 2
    assert found.backward is not None
    crossing = {mark.params[0] for node, mark in found.backward.marked("gather") if node.op == "placeholder"}
    assert crossing <= set(kept)
    assert crossing or share < 2.0
