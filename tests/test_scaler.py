"""Loss scales: the rules, and that all ranks skip and halve together."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.ranks import Pool
from tests.reference import named_differences, whole, whole_gradients, whole_parameters
from tests.stages import at_stage
from zerofx.lossscale import LossScale


def scales(rules: LossScale, overflows: str) -> list[float | None]:
    """The scale after each step, ``x`` being one that overflows; None where the rules give up."""
    found: list[float | None] = []
    state = rules.start()
    for step in overflows:
        after = rules.after(state, step == "x")
        found.append(None if after is None else after.scale)
        state = after or state
    return found


def test_the_rules_of_a_loss_scale() -> None:
    rules = LossScale(initial_scale=8.0, growth_interval_steps=3, hysteresis=2, min_scale=2)
    # the first overflow only skips, those after it halve, down to the minimum; growth restores the first
    assert scales(rules, "xxx...xx...") == [8, 4, 2, 2, 2, 4, 4, 2, 2, 2, 4]
    assert scales(rules, "xxxx") == [8, 4, 2, None]
    # steps in between do not restore it, unless told so, and start the interval again
    assert scales(rules, "x..x") == [8, 8, 8, 4]
    assert scales(LossScale(initial_scale=8.0, is_consecutive=True), "x.x.xx") == [8, 8, 8, 8, 8, 4]
    assert scales(LossScale(initial_scale=8.0, growth_interval_steps=1), "...") == [16, 32, 64]
    assert scales(LossScale(initial_scale=8.0, is_dynamic=False), "x.xxxx") == [8] * 6
    defaults = LossScale()
    assert (defaults.initial_scale, defaults.growth_interval_steps, defaults.hysteresis, defaults.min_scale) == (2**16, 1000, 2, 1)


class Logits(nn.Module):
    """The first parameter is replicated, the others are sharded, unevenly: some ranks hold none of the bias at world 4."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.linear = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.linear(x), self.temperature * x[:, :1]], 1)


def skip_together(rank: int, world: int, plain: bool, modes: tuple[tuple[str, int], ...]) -> list[str]:
    """In step 1 one row of one rank's gradient overflows; another rank holds that row's shard, and all else is finite."""
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (2, 3)).float()
    found = []
    for backend, stage in modes:
        with at_stage(stage):
            model = zerofx.compile(Logits(), stage=stage, backend=backend, precision="fp16")
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
            rules = LossScale(initial_scale=8.0, hysteresis=1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if plain else zerofx.GradScaler(rules, device="cpu")
            kept: list[dict[str, Tensor | None]] = []
            for step, scale in enumerate((8.0, 4.0, 4.0)):
                outputs = model(x).float()
                if step == 1 and rank == 0:
                    outputs = outputs * torch.tensor([1.0, 1.0, 1.0, 1.0, 1e30, 1.0])
                scaler.scale(outputs.square().sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if scaler.get_scale() != scale:
                    found.append(f"{backend}, stage {stage}, step {step}: a scale of {scaler.get_scale()}")
                kept.append({**whole_parameters(model), **whole_moments(model, optimizer)})
            found += named_differences(f"{backend}, stage {stage}: skipped", kept[1], kept[0])
            if not named_differences("", kept[2], kept[1]):
                found.append(f"{backend}, stage {stage}: step 2 changes nothing")
    return found


def whole_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    states = named_states(model, optimizer)
    return {f"{key} of {name}": whole(state[key]) for name, state in states for key in ("exp_avg", "exp_avg_sq")}


def named_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return [(name, optimizer.state[parameter]) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize(
    ("world", "plain", "modes"),
    [(2, True, (("hooks", 0), ("hooks", 1), ("hooks", 3), ("aot_eager", 2))), (4, False, (("hooks", 3),))],
    ids=["torch's scaler", "with rules"],
)
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks: Pool, world: int, plain: bool, modes: tuple[tuple[str, int], ...]) -> None:
    assert ranks.run(skip_together, world, plain, modes) == [[]] * world


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def scale_one_element(rank: int, world: int) -> list[str]:
    found = []
    rows = torch.arange(1.0, 1 + world)
    model, reference = zerofx.compile(One(), backend="aot_eager"), One()
    for step in range(3):
        for module, inputs in ((model, rows[rank : rank + 1]), (reference, rows)):
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            optimizer = torch.optim.SGD(module.parameters(), 0.25)
            optimizer.zero_grad()
            scaler.scale(module(inputs).mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5, foreach=False)
            scaler.step(optimizer)
            scaler.update()
        found += named_differences(f"step {step}: gradient of", whole_gradients(model), whole_gradients(reference))
        found += named_differences(f"step {step}: parameter", whole_parameters(model), whole_parameters(reference))
    return found


def test_ranks_without_an_element_scale_too(ranks: Pool) -> None:
    assert ranks.run(scale_one_element, 4) == [[]] * 4


def one_step(scaler: Any, optimizer: torch.optim.Optimizer, factor: float, **options: Any) -> None:
    optimizer.zero_grad()
    scaler.scale(sum(parameter.sum() for group in optimizer.param_groups for parameter in group["params"]) * factor).backward()
    scaler.step(optimizer, **options)
    scaler.update()


def test_a_skipped_step_is_logged_and_counted_and_skips_the_schedule(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = zerofx.GradScaler(LossScale(initial_scale=4.0, hysteresis=1), device="cpu")
    with caplog.at_level(logging.WARNING, "zerofx"):
        one_step(scaler, optimizer, 1.0, scheduler=schedule)
        assert (schedule.get_last_lr(), scaler.skipped_steps, caplog.messages) == ([0.5], 0, [])
        before = {name: value.clone() for name, value in [*model.named_parameters(), *momenta(model, optimizer).items()]}
        one_step(scaler, optimizer, float("nan"), scheduler=schedule)
    assert not named_differences("", {**dict(model.named_parameters()), **momenta(model, optimizer)}, before)
    assert (schedule.get_last_lr(), scaler.skipped_steps, scaler.get_scale()) == ([0.5], 1, 2.0)
    assert len(caplog.messages) == 1
    assert "loss scale of 4; it is 2 now (1 skipped so far)" in caplog.messages[0]


def momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {f"momentum of {name}": state["momentum_buffer"] for name, state in named_states(model, optimizer)}


def test_an_overflow_at_the_smallest_scale_raises() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 1.0)
    scaler = zerofx.GradScaler(LossScale(initial_scale=4.0), device="cpu")
    for _ in range(3):
        one_step(scaler, optimizer, float("nan"))
    with pytest.raises(zerofx.LossScaleError, match="smallest loss scale, 1") as caught:
        one_step(scaler, optimizer, float("nan"))
    assert all(part.strip() for part in (caught.value.what, caught.value.where, caught.value.why, caught.value.remedy))


def test_a_scaler_goes_on_from_its_state_and_from_torchs() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 1.0)
    rules = LossScale(initial_scale=4.0, growth_interval_steps=3)
    scaler = zerofx.GradScaler(rules, device="cpu")
    for factor in (1.0, float("nan"), 1.0):
        one_step(scaler, optimizer, factor)
    again = zerofx.GradScaler(rules, device="cpu")
    again.load_state_dict(scaler.state_dict())
    assert again.skipped_steps == 1
    for one in (scaler, again):
        one_step(one, optimizer, float("nan"))
        assert one.get_scale() == 2.0  # the first overflow was before
    torchs = torch.amp.GradScaler("cpu", init_scale=32.0)
    again.load_state_dict(torchs.state_dict())
    assert (again.get_scale(), again.skipped_steps) == (32.0, 0)


def test_without_rules_nothing_is_scaled_or_skipped() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scaler = zerofx.GradScaler(None, device="cpu")
    assert scaler.scale(torch.ones(())) == 1
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    one_step(scaler, optimizer, float("nan"), scheduler=schedule)
    assert (scaler.get_scale(), scaler.skipped_steps, schedule.get_last_lr()) == (1.0, 0, [0.5])
    assert model.bias.isnan().all()


@pytest.mark.parametrize("wrong", [{"initial_scale": 0.0}, {"hysteresis": 0}, {"growth_interval_steps": 1.5}, {"min_scale": 2**20}])
def test_numbers_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(zerofx.ConfigError, match=next(iter(wrong))):
        LossScale(**wrong)
