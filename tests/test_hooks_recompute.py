"""What the eager mode computes again reads what the forward read."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.reference import named_differences, whole_gradients
from tests.test_bad_input import assert_four_parts, failure_of


class Block(nn.Module):
    """Reads a buffer, a tensor passed by name, one within a dict, and a list that it fills."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor, seen: list[Tensor], *, shift: Tensor, held: dict[str, Tensor]) -> Tensor:
        seen.append(x)
        return torch.tanh(self.linear(sum(seen)) * self.scale.clone() + shift) * held["factor"]


class Changing(nn.Module):
    """Changes, once its blocks have run, what they read."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        held: dict[str, Tensor] = {}
        shift = x.detach() * 0
        for block in self.blocks:
            held["factor"] = shift + 2
            x = block(x, seen, shift=shift, held=held)
            shift = shift + 1
        for block in self.blocks:
            if self.in_place:
                block.scale.mul_(3)
            else:
                block.scale = block.scale * 3
        return x.square().sum()


@pytest.mark.parametrize("recompute", ["blocks", "selective"])
def test_the_eager_mode_computes_again_what_the_forward_did(recompute: str) -> None:
    plain = Changing(in_place=False)
    model = zerofx.compile(copy.deepcopy(plain), backend="hooks", recompute=recompute)
    x = torch.linspace(-1, 1, 12).view(3, 4)
    for step in range(2):
        plain(x).backward()
        model(x).backward()
        grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
        assert named_differences(f"step {step}: gradient", whole_gradients(model), grads) == []
        assert named_differences(f"step {step}: buffer", dict(model.named_buffers()), dict(plain.named_buffers())) == []


def test_a_buffer_changed_in_place_before_it_is_read_again_is_an_error() -> None:
    model = zerofx.compile(Changing(in_place=True), backend="hooks", recompute="blocks")
    loss = model(torch.ones(3, 4))
    assert_four_parts(failure_of(loss.backward), "ZerofxError", "blocks.1.scale", "assign a new tensor")


@pytest.mark.parametrize("recompute", ["blocks", "selective"])
def test_what_was_computed_again_keeps_no_model_alive(recompute: str) -> None:
    model = zerofx.compile(Changing(in_place=False), backend="hooks", recompute=recompute)
    model(torch.ones(3, 4)).backward()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_recurrent_layers_are_no_place_for_a_policy() -> None:
    model = nn.ModuleList([nn.GRU(3, 3)])
    with pytest.raises(zerofx.ConfigError, match='cannot be had with backend="hooks"'):
        zerofx.compile(model, backend="hooks", recompute="selective")
    with pytest.raises(zerofx.ConfigError, match='pass recompute="blocks" or compile'):
        zerofx.Config(backend="hooks", recompute=0.5)
