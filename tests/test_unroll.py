"""Plans of deep models from a few of their layers: the same as from all, or from all where not all layers are equal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.programs import Block, TiedStack
from zerofx import planner
from zerofx.config import Config
from zerofx.hardware import hardware
from zerofx.program import digest

H100 = hardware("h100")


class Stack(nn.Module):
    """Equal blocks, and what each test makes of them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.h = nn.ModuleList([Block(64) for _ in range(layers)])
        self.last = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.h):
            x = self.layer(number, block, x)
        return self.last(x).sum()

    def layer(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = block(x)
        return found


class Alternating(Stack):
    """Every other layer differs."""

    def layer(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return functional.relu(block(x)) if number % 2 else block(x)


class Checkpointed(Stack):
    """Every layer is computed again in the backward."""

    def layer(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(block, x, use_reentrant=False)
        return found


class Branching(Stack):
    """One layer in the middle differs."""

    def layer(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return functional.relu(block(x)) if number == 3 else block(x)


class Scaled(Stack):
    """Each layer has its own constant."""

    def layer(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return x + block(x) * (1 - number / 8)


class DepthScaled(Stack):
    """All layers have a constant that depends on how many they are."""

    def layer(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return x + block(x) / len(self.h)


class Collecting(Stack):
    """What each layer gives is a result."""

    def forward(self, x: Tensor) -> Any:
        found = [self.first(x)]
        for block in self.h:
            found.append(block(found[-1]))
        return found


class Breaking(Stack):
    """The graph breaks between layers."""

    def layer(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        found: Tensor = block(x)
        return found


class Skipping(Stack):
    """All layers read what comes in front of them."""

    def forward(self, x: Tensor) -> Tensor:
        x = start = self.first(x)
        for block in self.h:
            x = block(x) + start
        return self.last(x + start).sum()


def _widened() -> Stack:
    made = Stack(7)
    made.h[3].up, made.h[3].down = nn.Linear(64, 320), nn.Linear(320, 64)
    return made


def _frozen(*layers: int) -> Stack:
    made = Stack(7)
    for number in layers:
        made.h[number].requires_grad_(False)
    return made


def _partly_frozen() -> Stack:
    made = Stack(7)
    for block in made.h:
        block.up.requires_grad_(False)
    return made


@contextmanager
def _whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(planner, "stacks_of", lambda model: iter(()))
        yield


def _compare(monkeypatch: pytest.MonkeyPatch, model: nn.Module, inputs: Any, depths: list[int | None], **settings: Any) -> None:
    """Check that a plan is that of the whole model, and how many layers Dynamo traced for it (None: not told), trace by trace."""
    traced: list[int | None] = []
    few = planner._traced

    def noting(*args: Any) -> planner.Traced:
        traced.append(None if args[-1] is None else args[-1].least.depth)
        return few(*args)

    monkeypatch.setattr(planner, "_traced", noting)
    config = Config(**{"backend": "aot_eager", **settings})
    found = planner.trace(model, (inputs,), None, config, 8, "nccl")
    assert traced == depths
    with _whole(monkeypatch):
        expected = planner.trace(model, (inputs,), None, config, 8, "nccl")
    for mine, other in zip((*found.scheduled, *found.lowered), (*expected.scheduled, *expected.lowered), strict=True):
        assert digest(mine) == digest(other)
    assert str(found.schedule) == str(expected.schedule)
    assert (found.params, found.refresh_buckets) == (expected.params, expected.refresh_buckets)


def _tokens() -> Tensor:
    return torch.zeros(4, 16, dtype=torch.long)


def _rows() -> Tensor:
    return torch.zeros(8, 64)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_tied_stack_is_planned_from_four_layers(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    _compare(monkeypatch, TiedStack(7), _tokens(), [4], stage=stage)


@pytest.mark.parametrize(
    ("build", "depth"),
    [
        pytest.param(lambda: Alternating(11), 9, id="alternating"),
        pytest.param(lambda: Checkpointed(6), 4, id="checkpointed"),
        pytest.param(lambda: Skipping(6), 4, id="skipping"),
        pytest.param(_partly_frozen, 4, id="partly frozen"),
        pytest.param(lambda: _frozen(*range(7)), 4, id="frozen"),
    ],
)
def test_layers_that_repeat_are_planned_from_few(monkeypatch: pytest.MonkeyPatch, build: Callable[[], nn.Module], depth: int) -> None:
    _compare(monkeypatch, build(), _rows(), [depth])


@pytest.mark.parametrize(
    ("build", "depths"),
    [
        pytest.param(lambda: Branching(7), [None], id="branching"),
        pytest.param(lambda: Scaled(7), [None], id="scaled"),
        pytest.param(lambda: DepthScaled(7), [None], id="scaled by depth"),
        pytest.param(_widened, [None], id="widened"),
        pytest.param(lambda: _frozen(3), [None], id="one frozen"),
        pytest.param(lambda: Collecting(7), [None], id="collecting"),
        pytest.param(lambda: Breaking(6), [4, None], id="breaking"),
    ],
)
def test_layers_that_do_not_are_all_traced(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[], nn.Module], depths: list[int | None]
) -> None:
    _compare(monkeypatch, build(), _rows(), depths)


@pytest.mark.parametrize("recompute", ["blocks", "selective", 0.4, ("h.*.up",)])
def test_what_is_computed_again_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch, recompute: Any) -> None:
    _compare(monkeypatch, TiedStack(7), _tokens(), [4], recompute=recompute)


def test_what_is_kept_for_the_hardware_is_chosen_at_full_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    _compare(monkeypatch, TiedStack(9), _tokens(), [4], backend="inductor", hardware=H100, memory_limit_bytes=1_200_000)
