"""Every way to change a parameter is seen, refused, or kept apart from gradients; at every stage, with and without a graph."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.ranks import Pool
from tests.reference import named_differences, whole_gradients, whole_parameters
from tests.stages import STAGES, at_stage
from zerofx.errors import ShardingError

BACKENDS = ("aot_eager", "hooks")


class Net(nn.Module):
    """Has a parameter too small to shard, one that is added to the output as it is, and one whose gradient is a scalar, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(()))
        self.shift, self.other = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(4, 6))
        self.total = nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        return self.second(hidden) + self.shift + self.other + self.total.sum()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.5, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, 0.05, fused=True),
}


def everywhere(check: Callable[[nn.Module, nn.Module, Tensor], list[str]], plain: nn.Module) -> list[str]:
    """Run a check at each stage on each backend, on float64 data that is the same on all ranks: an average of equals is exact."""
    found = []
    x = torch.randn(4, 6, dtype=torch.float64)
    for backend in BACKENDS:
        for stage in STAGES:
            with at_stage(stage):
                model = zerofx.compile(copy.deepcopy(plain), stage=stage, backend=backend)
                found += [f"{backend}, stage {stage}: {text}" for text in check(model, copy.deepcopy(plain), x)]
    return found


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def list_optimizers(model: nn.Module, plain: nn.Module, x: Tensor) -> list[str]:
    found = []
    for name, make in OPTIMIZERS.items():
        pairs = [(trained, make(trained.parameters())) for trained in (plain, model)]
        for _ in range(3):
            for trained, optimizer in pairs:
                optimizer.zero_grad()
                trained(x).square().mean().backward()
                optimizer.step()
        found += named_differences(name, whole_parameters(model), whole_parameters(plain), 1e-12)
    return found


def step_in_between(model: nn.Module, plain: nn.Module, x: Tensor) -> list[str]:
    """An optimizer's step between a forward and its backward is an error, as it is in plain torch; then training goes on."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = [model(x).square().mean(), model(2 * x).square().mean()]
    losses[0].backward()
    optimizer.step()
    optimizer.zero_grad()
    try:
        losses[1].backward()
    except (ShardingError, RuntimeError) as error:
        if "modified by an inplace operation" not in str(error):
            return [f"another error: {error}"]
    else:
        return ["no error"]
    model.zero_grad()
    with torch.no_grad():
        for name, whole in whole_parameters(model).items():
            plain.get_parameter(name).copy_(whole)
    for trained in (plain, model):
        trained(x).square().mean().backward()
    return named_differences("after it,", whole_gradients(model), whole_gradients(plain))


def gradients_of_their_own(model: nn.Module, plain: nn.Module, x: Tensor) -> list[str]:
    """Accumulating in place changes neither another gradient nor what the caller passed to backward."""
    upstream = torch.ones(4, 6, dtype=torch.float64)
    kept = upstream.clone()
    for trained in (plain, model):
        for index in range(4):
            with zerofx.no_sync(model) if trained is model and index < 3 else torch.enable_grad():
                trained(x * (index + 1)).backward(upstream)
    found = [] if torch.equal(upstream, kept) else ["what the caller passed has changed"]
    found += named_differences("gradient of", whole_gradients(model), whole_gradients(plain), 1e-12)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return found


def check_on_ranks(rank: int, world: int, check: Callable[[nn.Module, nn.Module, Tensor], list[str]]) -> list[str]:
    return everywhere(check, model_of(Net))


@pytest.mark.parametrize("check", [list_optimizers, step_in_between, gradients_of_their_own], ids=lambda check: check.__name__)
@pytest.mark.parametrize("world", [1, 2])
def test_is_right_at_every_stage(ranks: Pool, check: Callable[[nn.Module, nn.Module, Tensor], list[str]], world: int) -> None:
    assert ranks.run(check_on_ranks, world, check) == [[]] * world


class Clamps(nn.Module):
    """Writes into a parameter inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x)


class Renorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Embedding(5, 6, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.long().abs() % 5)


def errors_of(rank: int, world: int, kind: type[nn.Module]) -> list[str]:
    found = []
    for backend in BACKENDS:
        for stage in STAGES:
            with at_stage(stage):
                model = zerofx.compile(model_of(kind), stage=stage, backend=backend)
                try:
                    model(torch.randn(4, 6, dtype=torch.float64))
                    found.append(f"{backend}, stage {stage}: no error")
                except ShardingError as error:
                    if "the forward changes linear.weight in place" not in str(error):
                        found.append(str(error))
    return found


@pytest.mark.parametrize("kind", [Clamps, Renorms])
def test_a_write_inside_forward_is_refused(ranks: Pool, kind: type[nn.Module]) -> None:
    assert ranks.run(errors_of, 2, kind) == [[]] * 2


def narrow_gradients(rank: int, world: int) -> list[float]:
    """Two ranks whose fp16 gradients fit, and whose sum does not."""
    found = []
    for backend in BACKENDS:
        for stage in STAGES:
            with at_stage(stage):
                model = nn.Linear(2, 2, bias=False)
                policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32)
                model = zerofx.compile(model, stage=stage, backend=backend, precision=policy)
                model(torch.full((1, 2), 40000.0)).sum().backward()
                found.append(float(next(iter(whole_gradients(model).values())).max()))
    return found


def test_narrow_gradients_do_not_overflow(ranks: Pool) -> None:
    for found in ranks.run(narrow_gradients, 2):
        assert found == [40000.0] * 8
