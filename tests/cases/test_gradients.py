"""What users do with gradients: accumulate, weigh, clip, edit, drop, watch, and differentiate again."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import zerofx
from tests.cases.places import TOLERANCE, Check, Place, adamw, error_of, mean_square, sgd, values, wrong
from tests.ranks import Pool
from tests.reference import named_differences, whole, whole_gradients, whole_parameters


class Awkward(nn.Module):
    """A tied weight, one of uneven rows, one with fewer rows than ranks, replicated ones, one of no dimension and one of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 5), nn.Linear(7, 5)
        self.second.weight = self.first.weight
        self.rows = nn.Embedding(33, 5)
        self.logit_scale, self.single = nn.Parameter(torch.tensor(2.3)), nn.Parameter(torch.ones(1))
        self.two, self.empty = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.ones(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.first(x) + self.second(x.sin())) * self.logit_scale.exp() * self.single
        return x + self.rows.weight.sum(0) + self.two.prod() + self.empty.sum()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 5)).double()


def as_tensor(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def norms(place: Place) -> list[str]:
    """Clipping by each kind of norm: every element counts once, whoever owns it (15, 16, 18, 42, 43)."""
    plain = Awkward().double()
    model = place.compiled(plain)
    found = []
    for kind in (1.0, 2.0, 3.0, float("inf")):
        for each, inputs in place.both(plain, model, values(12, 7)):
            # torch knows no infinity norm of nothing
            each.empty.requires_grad_(kind < float("inf"))
            each.zero_grad()
            mean_square(each(*inputs)).backward()
        expected = torch.nn.utils.get_total_norm([each.grad for each in plain.parameters() if each.grad is not None], kind)
        got = [torch.nn.utils.clip_grad_norm_(each.parameters(), expected.item() / 2, kind) for each in (plain, model)]
        if not all(torch.allclose(as_tensor(norm), expected, rtol=TOLERANCE) for norm in got):
            found.append(f"norm of kind {kind}: {got[1]} instead of {got[0]}")
        found += named_differences(f"clipped by kind {kind}:", whole_gradients(model), whole_gradients(plain), TOLERANCE)
    return found


def edits_and_zeros(place: Place) -> list[str]:
    """Gradients are there after each backward, and what is done to them counts (45, 53)."""
    plain = net()
    model = place.compiled(plain)
    optimizers = {each: sgd(each) for each in (plain, model)}
    found = []
    for to_none in (True, False, True):
        for each, inputs in place.both(plain, model, values(8, 6)):
            each.zero_grad(set_to_none=to_none)
            mean_square(each(*inputs)).backward()
        found += named_differences("gradient of", whole_gradients(model), whole_gradients(plain), TOLERANCE)
    for parameter in plain.parameters():
        parameter.grad.mul_(0.1)
    for parameter in model.parameters():
        parameter.grad.to_local().mul_(0.1)
    got = [as_tensor(torch.nn.utils.clip_grad_norm_(each.parameters(), 1e-3)) for each in (plain, model)]
    for optimizer in optimizers.values():
        optimizer.step()
    found += [] if torch.allclose(*got, rtol=TOLERANCE) else [f"norm {got[1]} instead of {got[0]}"]
    return found + named_differences("parameter", whole_parameters(model), whole_parameters(plain), TOLERANCE)


def step_after_no_sync(place: Place) -> list[str]:
    """Clipping and a step right after a backward under no_sync reduce first (38)."""
    plain = net()
    model = place.compiled(plain)
    found = []
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        optimizers = {each: torch.optim.AdamW(each.parameters(), 0.01, **options) for each in (plain, model)}
        got = []
        for each, inputs in place.both(plain, model, values(8, 6)):
            each.zero_grad()
            with zerofx.no_sync(model):
                mean_square(each(*inputs)).backward()
            got.append(as_tensor(torch.nn.utils.clip_grad_norm_(each.parameters(), 1e-2)))
            optimizers[each].step()
        found += [] if torch.allclose(*got, rtol=TOLERANCE) else [f"norm {got[1]} instead of {got[0]}"]
        found += named_differences(f"{options}: parameter", whole_parameters(model), whole_parameters(plain), TOLERANCE)
    return found


def small_contributions(place: Place) -> list[str]:
    """Computed in bfloat16, gradients add up in the dtype of their parameters (39)."""
    found = []
    for is_kept in (False, True):
        model = zerofx.compile(
            nn.Linear(2, 2, bias=False),
            stage=place.stage,
            backend=place.backend,
            precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        )
        for step in range(17):
            with zerofx.no_sync(model) if is_kept and step < 16 else contextlib.nullcontext():
                # a sixteenth of what bfloat16 can tell from the first
                model(torch.ones(1, 2) / (1 if step == 0 else 2**12)).sum().backward()
        gradient = whole(model.weight.grad)
        if gradient.dtype is not torch.float32 or not torch.equal(gradient, torch.full((2, 2), 1 + 2.0**-8)):
            found.append(f"kept: {is_kept}, {gradient}")
    return found


def tokens_counted_over_all_ranks(place: Place) -> list[str]:
    """With reduce="sum" each rank divides by the count over all of them; the default is the mean of the ranks' means (40)."""
    plain = net()
    x = values(10, 6)
    mine = (x[:3], x[3:])[place.rank]
    found = []
    for is_kept in (False, True):
        model = place.compiled(plain, reduce="sum")
        plain.zero_grad()
        (plain(x).square().sum() / 10).backward()
        with zerofx.no_sync(model) if is_kept else contextlib.nullcontext():
            (model(mine).square().sum() / 20).backward()
        (model(mine).square().sum() / 20).backward()
        found += named_differences(f"sum, kept: {is_kept},", whole_gradients(model), whole_gradients(plain), TOLERANCE)
    model = place.compiled(plain)
    plain.zero_grad()
    (mean_square(plain(x[:3])) / 2 + mean_square(plain(x[3:])) / 2).backward()
    mean_square(model(mine)).backward()
    return found + named_differences("mean of means,", whole_gradients(model), whole_gradients(plain), TOLERANCE)


def watch(model: nn.Module) -> tuple[list[tuple[str, int, Tensor]], list[Any]]:
    """Write down, by hooks on each parameter, what arrives."""
    seen: list[tuple[str, int, Tensor]] = []
    handles: list[Any] = []
    for index, parameter in enumerate(model.parameters()):
        handles.append(parameter.register_hook(lambda grad, index=index: seen.append(("hook", index, whole(grad)))))
        handles.append(
            parameter.register_post_accumulate_grad_hook(lambda it, index=index: seen.append(("post-accumulate", index, whole(it.grad))))
        )
    return seen, handles


def hooks_on_parameters(place: Place) -> list[str]:
    """Hooks get the reduced gradient, once a step, whether they are older than the shards or not, and may change it (55)."""
    plain = net()
    expected, _ = watch(plain)
    found = []
    for is_older in (True, False):
        model = net()
        model.load_state_dict(plain.state_dict())
        model[0].weight.mark = "decayed"
        seen, handles = watch(model) if is_older else ([], [])
        model = zerofx.compile(model, stage=place.stage, backend=place.backend)
        found += [] if model[0].weight.mark == "decayed" else ["a mark on a parameter is lost"]
        if not is_older:
            seen, handles = watch(model)
        doubled = [each[3].weight.register_hook(lambda grad: grad * 2) for each in (plain, model)]
        expected.clear()
        for _ in range(2):
            for each, inputs in place.both(plain, model, values(8, 6)):
                each.zero_grad()
                mean_square(each(*inputs)).backward()
        pairs = list(zip(*(sorted(events, key=lambda event: event[:2]) for events in (expected, seen)), strict=False))
        if len(expected) != len(seen) or not all(one[:2] == other[:2] and torch.allclose(one[2], other[2]) for one, other in pairs):
            found.append(f"older: {is_older}, {[event[:2] for event in seen]} instead of {[event[:2] for event in expected]}")
        found += named_differences("changed by a hook:", whole_gradients(model), whole_gradients(plain), TOLERANCE)
        for handle in [*handles, *doubled]:
            handle.remove()
        seen.clear()
        mean_square(model(place.rows(values(8, 6)))).backward()
        found += ["a removed hook is called"] if seen else []
    return found


def steps_inside_a_backward(place: Place) -> list[str]:
    """An optimizer for each parameter, stepped by its post-accumulate hook (55)."""
    plain = net()
    model = place.compiled(plain)
    for each in (plain, model):
        for parameter in each.parameters():
            optimizer = torch.optim.SGD([parameter], 0.1)

            def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        for each, inputs in place.both(plain, model, values(8, 6)):
            mean_square(each(*inputs)).backward()
    return named_differences("parameter", whole_parameters(model), whole_parameters(plain), TOLERANCE)


def second_derivatives(place: Place) -> list[str]:
    """First derivatives by autograd.grad are right; second ones are refused, before anything is wrong (67)."""
    plain = net()
    model = place.compiled(plain)
    got = []
    for each, inputs in place.both(plain, model, values(8, 6)):
        gradients = torch.autograd.grad(mean_square(each(*inputs)), list(each.parameters()))
        got.append({str(index): whole(gradient) for index, gradient in enumerate(gradients)})
    found = named_differences("gradient", got[1], got[0], TOLERANCE)
    loss = mean_square(model(place.rows(values(8, 6))))
    found += error_of(lambda: torch.autograd.grad(loss, list(model.parameters()), create_graph=True), "create_graph")
    x = values(8, 6).requires_grad_()
    try:
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (gradient.norm(dim=1) - 1).square().mean().backward()
    except (zerofx.ZerofxError, RuntimeError) as error:
        return found + ([] if "create_graph" in str(error) or "does not currently support double backward" in str(error) else [str(error)])
    return [*found, "no error for a gradient penalty"]


def two_backwards_of_one_forward(place: Place) -> list[str]:
    """The same loss twice, and two losses of one forward with gradients dropped in between, after a plain step (68)."""
    plain = net()
    model = place.compiled(plain)
    got: list[list[dict[str, Tensor | None]]] = []
    for each, inputs in place.both(plain, model, values(8, 6)):
        mean_square(each(*inputs)).backward()
        each.zero_grad()
        loss = mean_square(each(*inputs))
        loss.backward(retain_graph=True)
        loss.backward()
        got.append([whole_gradients(each)])
        each.zero_grad()
        output = each(*inputs)
        output[:, 0].square().mean().backward(retain_graph=True)
        got[-1].append(whole_gradients(each))
        each.zero_grad()
        output[:, 1].sin().mean().backward()
        got[-1].append(whole_gradients(each))
    return [text for one, other in zip(*got, strict=True) for text in named_differences("gradient of", other, one, TOLERANCE)]


CHECKS: tuple[Check, ...] = (
    norms,
    edits_and_zeros,
    step_after_no_sync,
    small_contributions,
    tokens_counted_over_all_ranks,
    hooks_on_parameters,
    steps_inside_a_backward,
    second_derivatives,
    two_backwards_of_one_forward,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_is_right(ranks: Pool, check: Check) -> None:
    assert wrong(ranks, check) == []


def one_parameter_of_two_elements(place: Place) -> list[str]:
    """Two of four ranks own nothing (18)."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    class Clipped:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.optimizer = model, adamw(model)

        def zero_grad(self) -> None:
            self.optimizer.zero_grad()

        def step(self) -> None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
            self.optimizer.step()

    return place.train(Two().double(), (values(12, 2),), optimizer=Clipped)


@pytest.mark.parametrize("check", [norms, one_parameter_of_two_elements], ids=lambda check: check.__name__)
def test_is_right_where_ranks_own_nothing(ranks: Pool, check: Check) -> None:
    # Five rows of four ranks are two, two, one and none.
    assert wrong(ranks, check, world=4, places=((1, "aot_eager"), (3, "hooks"))) == []
