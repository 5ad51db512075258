import torch
from torch import Tensor, nn
from torch.fx import Node

from tests.programs import Block, TiedStack, compilation, compiled
from zerofx.backend import Compilation
from zerofx.program import output_of


def _crossing(found: Compilation) -> list[Node]:
    """What the forward hands to the backward: all that it returns behind the loss, but for its own inputs."""
    assert found.forward is not None
    return [node for node in output_of(found.forward.graph).args[0][1:] if node.op != "placeholder"]


def _kept(found: Compilation) -> set[int]:
    return next(record.plan.keep for record in found.records if record.name == "Recompute")


def test_only_what_the_plan_keeps_crosses_whole() -> None:
    model = TiedStack(4, width=64)
    shapes = {tuple(tensor.shape) for tensor in model.h.parameters()} - {(64,)}
    found = compilation(compiled(model, torch.arange(16).view(2, 8), stage=3))
    assert _kept(found) == (0,)  # the tied embedding, which the head ends with
    crossing = [tuple(node.meta["val"].shape) for node in _crossing(found)]
    transposed = {shape[::-1] for shape in shapes}
    assert not [shape for shape in crossing if shape in shapes | transposed]
    assert crossing.count((300, 64)) == 1


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
    found = compilation(compiled(Derived(), torch.randn(4, 32), stage=3))
    assert not [
        node for node in _crossing(found) if 96 in node.meta["val"].shape or tuple(node.meta["val"].shape) in ((192, 32), (32, 192))
    ]


def test_a_limit_too_small_for_the_last_block_keeps_nothing() -> None:
    model = nn.Sequential(Block(64), Block(64), nn.Flatten(0))
    block_bytes = sum(tensor.numel() * 4 for tensor in model[1].parameters())
    model.register_forward_hook(lambda module, inputs, output: output.sum())
    found = compilation(compiled(model, torch.randn(4, 64), stage=3, memory_limit_bytes=2 * block_bytes - 1))
    assert _kept(found) == ()
    assert found.backward is not None
    assert not [node for node, _ in found.backward.marked("gather") if node.op == "placeholder"]
