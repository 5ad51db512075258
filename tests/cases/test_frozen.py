"""Parameters without a gradient: from the start, for some steps, beside trained ones of the same module."""

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.cases.places import FEW, TOLERANCE, Check, Place, adamw, mean_square, values, wrong
from tests.ranks import Pool
from tests.reference import named_differences, whole_parameters


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Prompted(nn.Module):
    """Trained rows in front of the embeddings of a frozen model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(19, 8), nn.Linear(8, 19)
        self.requires_grad_(False)
        self.prompt = nn.Embedding(4, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        prompt = self.prompt.weight.expand(tokens.shape[0], 4, 8)
        return self.head(torch.tanh(torch.cat([prompt, self.tokens(tokens)], 1).mean(1)))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def low_rank_adapters(place: Place) -> list[str]:
    """Only what is trained is reduced (5)."""
    plain = nn.Sequential(LowRank(), nn.Tanh(), LowRank()).double()
    found = place.train(plain, (values(8, 16),))
    model = place.compiled(plain)
    mean_square(model(place.rows(values(8, 16)))).backward()
    trained_bytes = sum(parameter.numel() * parameter.itemsize for parameter in plain.parameters() if parameter.requires_grad)
    reduced_bytes = sum(event.moved_bytes for event in zerofx.schedule(model).events if event.kind == "launch" and "reduce" in event.what)
    held_bytes = sum(parameter.grad.to_local().nbytes for parameter in model.parameters() if parameter.grad is not None)
    if reduced_bytes != trained_bytes or held_bytes * place.world != trained_bytes:
        found.append(f"{reduced_bytes} bytes reduced and {held_bytes} held for {trained_bytes} trained")
    return found


def optimizer_of_the_trained_ones(place: Place) -> list[str]:
    """A group of frozen parameters, an empty one, and none of them (6, 9)."""
    plain = two_layers()
    plain[0].requires_grad_(False)

    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": list(model[0].parameters())}, {"params": []}, {"params": list(model[2].parameters())}], 0.01)

    found = place.train(plain, (values(8, 6),), optimizer=grouped)
    return found + place.train(plain, (values(8, 6),), optimizer=lambda model: torch.optim.AdamW(model[2].parameters(), 0.01))


def frozen_stays_frozen(place: Place) -> list[str]:
    """Weight decay moves nothing that has no gradient, and no flag changes (7)."""
    plain = two_layers()
    plain[0].weight.requires_grad_(False)
    model = place.compiled(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
    for _ in range(2):
        mean_square(model(place.rows(values(8, 6)))).backward()
        optimizer.step()
    flags = [parameter.requires_grad for parameter in model.parameters()]
    found = [] if flags == [parameter.requires_grad for parameter in plain.parameters()] else [f"flags {flags}"]
    return found + ([] if torch.equal(whole_parameters(model)["0.weight"], plain[0].weight) else ["a frozen weight changed"])


def frozen_for_some_steps(place: Place) -> list[str]:
    """Unfrozen after two steps, by the flag and by dropped gradients; one graph for each set of flags (8)."""
    found = place.train(two_layers(), (values(8, 6),), steps=4, before=lambda model, step: model[2].requires_grad_(step >= 2))
    found += place.train(two_layers(), (values(8, 6),), steps=4, before=lambda model, step: model[0].requires_grad_(step % 2 == 0))
    plain = two_layers()
    model = place.compiled(plain)
    optimizers = {each: adamw(each) for each in (plain, model)}
    for step in range(4):
        for each, inputs in place.both(plain, model, values(8, 6)):
            optimizers[each].zero_grad()
            mean_square(each(*inputs)).backward()
            if step < 2:
                for parameter in each[2].parameters():
                    parameter.grad = None
            optimizers[each].step()
    return found + named_differences("dropped gradients: parameter", whole_parameters(model), whole_parameters(plain), TOLERANCE)


def nothing_to_train(place: Place) -> list[str]:
    """A frozen model computes, hands on gradients, and torch says that there is nothing to train (9)."""
    plain = two_layers().requires_grad_(False)
    model = place.compiled(plain)
    gradients = []
    for each in (plain, model):
        x = values(8, 6).requires_grad_()
        mean_square(each(x)).backward()
        gradients.append(x.grad)
    try:
        mean_square(model(values(8, 6))).backward()
    except RuntimeError as error:
        found = [] if "does not require grad" in str(error) else [str(error)]
    else:
        found = ["no error"]
    return found + ([] if torch.allclose(*gradients) else ["gradient of the input"])


def prompts_before_a_frozen_model(place: Place) -> list[str]:
    """Embeddings are found by their shape (10)."""
    plain = Prompted().double()
    model = place.compiled(plain)
    by_shape = [name for name, parameter in model.named_parameters() if parameter.shape == (19, 8) and parameter.numel() == 152]
    found = [] if by_shape == ["tokens.weight", "head.weight"] else [f"of the shape of embeddings: {by_shape}"]
    return found + place.train(plain, (torch.arange(40).reshape(8, 5) % 19,))


CHECKS: tuple[Check, ...] = (
    low_rank_adapters,
    optimizer_of_the_trained_ones,
    frozen_stays_frozen,
    nothing_to_train,
    prompts_before_a_frozen_model,
)
SLOW: tuple[Check, ...] = (frozen_for_some_steps,)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_is_right(ranks: Pool, check: Check) -> None:
    assert wrong(ranks, check) == []


@pytest.mark.parametrize("check", SLOW, ids=lambda check: check.__name__)
def test_is_right_at_few_places(ranks: Pool, check: Check) -> None:
    assert wrong(ranks, check, places=FEW) == []


def test_frozen_stays_frozen_on_one_rank(ranks: Pool) -> None:
    assert wrong(ranks, frozen_stays_frozen, world=1) == []
