"""Optimizers: groups, what needs whole matrices, more than one, averages of weights, and edits between steps."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zerofx
from tests.cases.places import FEW, TOLERANCE, Check, Place, error_of, mean_square, sgd, values, wrong
from tests.ranks import Pool
from tests.reference import named_differences, whole_parameters


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 6)).double()


class Grouped:
    """Decay for matrices only, rates of their own, and a schedule of rates."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [parameter for name, parameter in model.named_parameters() if parameter.ndim >= 2]
        others = [parameter for name, parameter in model.named_parameters() if name.endswith("bias") or parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1, "lr": 0.01}, {"params": others, "weight_decay": 0.0, "lr": 0.05}]
        self.optimizer = torch.optim.AdamW(groups)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()
        self.schedule.step()


def decay_groups(place: Place) -> list[str]:
    """Groups by shape and by name, from the first step on (49, 52)."""
    return place.train(net(), (values(12, 7),), optimizer=Grouped)


class CompiledStep:
    """AdamW whose step torch.compile runs. Compiled, it corrects the bias in fp32, so its equal is the compiled step of a plain model."""

    def __init__(self, model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
        self.zero_grad = optimizer.zero_grad
        self.graphs = CompileCounterWithBackend("aot_eager")
        self.step = torch.compile(optimizer.step, backend=self.graphs)


def a_compiled_step(place: Place) -> list[str]:
    """One graph steps, and the next forward sees it (71)."""
    made: list[CompiledStep] = []

    def optimizer(model: nn.Module) -> CompiledStep:
        made.append(CompiledStep(model))
        return made[-1]

    found = place.train(nn.Linear(7, 5, bias=False).double(), (values(12, 7),), optimizer=optimizer)
    return found + [f"{each.graphs.frame_count} graphs" for each in made if each.graphs.frame_count != 1]


def an_optimizer_of_before(place: Place) -> list[str]:
    """Its first step is an error: it would change what no forward reads (50)."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model = zerofx.compile(model, stage=place.stage, backend=place.backend)
    before = whole_parameters(model)
    mean_square(model(place.rows(values(12, 7)))).backward()
    found = error_of(optimizer.step, "AdamW", "0.weight", "after zerofx.compile")
    found += named_differences("after the error", whole_parameters(model), before)
    sgd(model).step()
    return found + ([] if named_differences("", whole_parameters(model), before) else ["an optimizer of after changes nothing"])


class ByRowsAndColumns(torch.optim.Optimizer):
    """Divides the momentum of a matrix by the norms of its rows and of its columns."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.ndim == 2
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
                scale = momentum.norm(dim=0, keepdim=True) * momentum.norm(dim=1, keepdim=True)
                parameter.sub_(momentum / (scale + 1e-8), alpha=group["lr"])


def matrices(place: Place) -> list[str]:
    """What needs the whole matrix gets it, or is refused; never a shard that looks like one (51)."""
    plain = nn.Sequential(nn.Linear(7, 5, bias=False), nn.Tanh(), nn.Linear(5, 6, bias=False)).double()
    found = place.train(plain, (values(12, 7),), optimizer=lambda model: ByRowsAndColumns(model.parameters()))
    # Muon multiplies in bfloat16, and sharded sums of products round in another order.
    found += place.train(
        plain, (values(12, 7),), steps=1, optimizer=lambda model: torch.optim.Muon(model.parameters(), 0.02), tolerance=1e-2
    )
    for kind in (torch.optim.Adafactor, torch.optim.Rprop, torch.optim.LBFGS):
        model = place.compiled(plain)
        optimizer = kind(model.parameters(), 0.01)
        mean_square(model(place.rows(values(12, 7)))).backward()
        try:
            optimizer.step(lambda: torch.zeros(()))
        except RuntimeError:
            continue
        found.append(f"{kind.__name__} takes steps now: compare them with those of one process")
    return found


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.makes = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.judges = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1), nn.Sigmoid())

    def forward(self, noise: Tensor, real: Tensor, *, judges: bool) -> Tensor:
        if judges:
            return self.judges(real).mean() - self.judges(self.makes(noise).detach()).mean()
        return self.judges(self.makes(noise)).mean()


def two_optimizers(place: Place) -> list[str]:
    """A generator and its judge, as two models and as parts of one (54)."""
    plain = Adversaries().double()
    apart = nn.Module()
    apart.makes, apart.judges = place.compiled(plain.makes), place.compiled(plain.judges)
    whole = place.compiled(plain)
    for model in (plain, whole, apart):
        noise, real = (x if model is plain else place.rows(x) for x in (values(8, 4), values(8, 6, seed=1)))
        optimizers = {judges: torch.optim.Adam((model.judges if judges else model.makes).parameters(), 0.01) for judges in (True, False)}
        for judges in (True, False) * 2:
            (Adversaries.forward(model, noise, real, judges=judges) if model is apart else model(noise, real, judges=judges)).backward()
            optimizers[judges].step()
            model.zero_grad()
    expected = whole_parameters(plain)
    found = named_differences("one model:", whole_parameters(whole), expected, TOLERANCE)
    return found + named_differences("two models:", whole_parameters(apart), expected, TOLERANCE)


def averages_of_weights(place: Place) -> list[str]:
    """A deep copy that follows by lerp, and torch's averaged models (65)."""
    plain = net()
    model = place.compiled(plain)
    followers = {}
    for each in (plain, model):
        averaged = AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        followers[each] = copy.deepcopy(each), AveragedModel(each), averaged
    for _ in range(2):
        for each, inputs in place.both(plain, model, values(12, 7)):
            each.zero_grad()
            mean_square(each(*inputs)).backward()
            sgd(each).step()
            copied, *others = followers[each]
            for other in others:
                other.update_parameters(each)
            with torch.no_grad():
                for old, new in zip(copied.parameters(), each.parameters(), strict=True):
                    old.lerp_(new, 0.1)
    found = []
    for expected, follower in zip(followers[plain], followers[model], strict=True):
        found += named_differences(type(follower).__name__, whole_parameters(follower), whole_parameters(expected), TOLERANCE)
        found += [] if torch.allclose(follower(values(12, 7)), expected(values(12, 7))) else [f"output of {type(follower).__name__}"]
    return found


def edits_of_masters(place: Place) -> list[str]:
    """What is written into parameters shows in the next forward, and the next step keeps it, computed in bfloat16 too (66)."""
    plain = nn.Linear(6, 6)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = zerofx.compile(copy.deepcopy(plain), stage=place.stage, backend=place.backend, precision=policy)
    x = values(8, 6).float()
    found = []
    for edit in (lambda it: it.mul_(1.5), lambda it: it.data.mul_(0.5), lambda it: it.clamp_(-0.1, 0.1), lambda it: it.fill_(0.25)):
        for each, inputs in place.both(plain, model, x):
            each.zero_grad()
            mean_square(each(*inputs)).backward()
            sgd(each).step()
            with torch.no_grad():
                for parameter in each.parameters():
                    edit(parameter)
        # eight bits of each product, and of each gradient
        found += [] if torch.allclose(model(x), plain(x), rtol=2e-2, atol=2e-2) else ["the next forward"]
        found += named_differences("parameter", whole_parameters(model), whole_parameters(plain), 2e-2)
    return found


CHECKS: tuple[Check, ...] = (
    decay_groups,
    an_optimizer_of_before,
    edits_of_masters,
)
SLOW: tuple[Check, ...] = (
    two_optimizers,
    averages_of_weights,
    matrices,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_is_right(ranks: Pool, check: Check) -> None:
    assert wrong(ranks, check) == []


@pytest.mark.parametrize("check", SLOW, ids=lambda check: check.__name__)
def test_is_right_at_few_places(ranks: Pool, check: Check) -> None:
    assert wrong(ranks, check, places=FEW) == []


@pytest.mark.parametrize("check", [averages_of_weights, decay_groups], ids=lambda check: check.__name__)
def test_is_right_where_shards_are_uneven(ranks: Pool, check: Check) -> None:
    assert wrong(ranks, check, world=3, places=FEW) == []


def test_a_compiled_step_is_right(ranks: Pool) -> None:
    # whole copies stay at stage 2, and shards of five rows are uneven; tracing the step takes seconds anywhere
    assert wrong(ranks, a_compiled_step, places=((2, "hooks"),)) == []
