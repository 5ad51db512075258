"""Modules that read their parameters, their inputs or their state in ways of their own."""

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.cases.places import FEW, TOLERANCE, Check, Place, adamw, error_of, mean_square, values, wrong
from tests.ranks import Pool
from tests.reference import named_differences, whole_gradients, whole_parameters


class Encoder(nn.Module):
    """Users call `encode` beside the forward, which calls it too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) * 2


def methods_beside_forward(place: Place) -> list[str]:
    """A method runs as a forward does where zerofx.compile was told; else it says so (21)."""
    plain = Encoder().double()
    found = error_of(lambda: place.compiled(plain).encode(place.rows(values(8, 6))), "methods=['encode']", "Encoder.encode")
    found += error_of(lambda: place.compiled(plain, methods=("decode",)), "decode", "encode")
    model = place.compiled(plain, methods=("encode",))
    for each, inputs in place.both(plain, model, values(8, 6)):
        (mean_square(each.encode(*inputs)) + each(*inputs).sin().mean()).backward()
    found += named_differences("gradient of", whole_gradients(model), whole_gradients(plain), TOLERANCE)
    found += [] if list(inspect.signature(model.encode).parameters) == ["x"] else ["the signature"]
    copied = copy.deepcopy(model)
    return found + ([] if torch.allclose(copied.encode(values(8, 6)), plain.encode(values(8, 6))) else ["a copy's method"])


class Exits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.is_early = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2] if self.is_early else self.layers:
            x = torch.tanh(layer(x))
        return x


def an_early_exit_between_steps(place: Place) -> list[str]:
    """Evaluation that skips layers, and whole weights outside of the model, leave nothing behind (22, 64)."""
    plain = Exits().double()
    model = place.compiled(plain)
    optimizers = {each: adamw(each) for each in (plain, model)}
    found = []
    for step in range(4):
        for each, inputs in place.both(plain, model, values(8, 6)):
            optimizers[each].zero_grad()
            mean_square(each(*inputs)).backward()
            optimizers[each].step()
            if step == 1:
                each.is_early = True
                with torch.no_grad():
                    each(*inputs)
                each.is_early = False
        with zerofx.gathered(model) as wholes, torch.no_grad():
            output = torch.func.functional_call(plain, wholes, (values(8, 6),))
        found += [] if torch.allclose(output, plain(values(8, 6))) else [f"step {step}: gathered weights"]
    return found + named_differences("parameter", whole_parameters(model), whole_parameters(plain), TOLERANCE)


class Delegates(nn.Module):
    """Looks in its child for what it has not itself."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["child"], name)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) * self.bias


def delegated_attributes(place: Place) -> list[str]:
    """A wrapper has no state of zerofx by way of its child (23)."""
    return place.train(nn.Sequential(Delegates(nn.Linear(6, 6)), nn.Tanh(), Delegates(nn.Linear(6, 6))).double(), (values(8, 6),))


def parametrized(place: Place) -> list[str]:
    """Weights computed from parameters and from buffers that change with each forward (24)."""
    plain = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 6), dim=0),
        parametrizations.weight_norm(nn.Linear(6, 6), dim=None),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(6, 5)),
    ).double()
    found = place.train(plain, (values(8, 6),), with_buffers=True)
    model, plain = place.compiled(plain.eval()), plain.eval()
    outputs = model(values(8, 6)), copy.deepcopy(model)(values(8, 6))
    return found + [f"output {index}" for index, output in enumerate(outputs) if not torch.allclose(output, plain(values(8, 6)))]


def a_row_of_padding(place: Place) -> list[str]:
    """The row that pads is one of the logical tensor, on whichever rank it lies (25)."""
    found = []
    for padding in (9, -1):
        plain = nn.Sequential(nn.Embedding(11, 4, padding_idx=padding), nn.Linear(4, 3)).double()
        found += place.train(plain, (torch.arange(24).reshape(12, 2) % 11,), steps=2)
    return found


@dataclass
class Item:
    value: Tensor
    count: int


class Passes(nn.Module):
    """Takes and returns what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(6))})

    def forward(self, item: Item, extra: dict[str, Any], device: torch.device, nothing: None = None) -> dict[str, Any]:
        value = self.linear(item.value) * self.listed[0] * self.listed[-1] + self.named["shift"]
        return {"item": Item(value, item.count + 1), "rest": (extra["nested"][0], None, device)}


class PassesOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Passes(), Passes()

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(Item(x, 0), {"nested": (x, [x])}, x.device)
        found = self.second(found["item"], {"nested": found["rest"]}, found["rest"][2], nothing=found["rest"][1])
        return found["item"].value + found["rest"][0]


def inputs_that_are_no_tensors(place: Place) -> list[str]:
    """Dataclasses, dicts, devices and None between submodules; lists and dicts of parameters (26)."""
    return place.train(PassesOn().double(), (values(8, 6),), steps=2)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6, dtype=torch.float64))
        self.noted = torch.zeros(6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        output = self.linear(x) + self.seen + self.noted
        self.seen, self.noted = self.seen + 1, self.noted + 1
        return output


def forget(model: nn.Module, step: int) -> None:
    if step == 2:
        model.seen, model.noted = torch.full((6,), 5.0, dtype=torch.float64), torch.full((6,), -3.0, dtype=torch.float64)


def buffers_assigned_anew(place: Place) -> list[str]:
    """By the forward and between steps, buffers and plain attributes (31)."""
    return place.train(Remembers().double(), (values(8, 6),), steps=4, before=forget, with_buffers=True)


class Overwrites(nn.Module):
    """Changes buffers in place: reads one of them before and after, and another through views."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.full((6,), 2.0, dtype=torch.float64))
        self.register_buffer("square", torch.full((2, 3), 2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        before = torch.tanh(self.linear(x) * (self.mean + 1))
        self.mean.mul_(0.5)
        self.square.view(6)[1:].mul_(0.5)
        return before * (self.linear(x) * self.mean) + self.linear(x) * self.square.t().reshape(6).sin()


def buffers_changed_and_read(place: Place) -> list[str]:
    """The backward computes with what the forward read, not with what the buffer has become."""
    return place.train(Overwrites().double(), (values(8, 6),), with_buffers=True)


def random_numbers(place: Place) -> list[str]:
    """Those of eager torch on each rank; compiling draws none (33)."""
    plain = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5))
    before = torch.get_rng_state()
    model = place.compiled(plain)
    found = [] if torch.equal(before, torch.get_rng_state()) else ["compiling draws"]
    drawn = []
    for each in (plain, model):
        torch.manual_seed(5 + place.rank)
        drawn.append((each(torch.ones(4, 6)) == 0, torch.get_rng_state()))
    found += [] if all(torch.equal(one, other) for one, other in zip(*drawn, strict=True)) else ["not the numbers of eager torch"]
    masks = [torch.empty(4, 64, dtype=torch.uint8) for _ in range(place.world)]
    dist.all_gather(masks, drawn[1][0].to(torch.uint8))
    return found + ([] if not torch.equal(masks[0], masks[1]) else ["two ranks drop the same"])


def modes(place: Place) -> list[str]:
    """Training and evaluation in turn, by the model and by a submodule; one graph for each (63)."""
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)).double()
    model = place.compiled(plain)
    found = []
    for is_training in (True, False, True, False):
        outputs = []
        for each in (plain, model):
            each.train(is_training)
            torch.manual_seed(3)
            outputs.append(each(values(8, 6)))
        flags = [module.training for module in model.modules()]
        found += [] if torch.allclose(*outputs) and set(flags) == {is_training} else [f"training: {is_training}, flags {flags}"]
    graphs = len(getattr(model._zerofx.runtime, "compilations", ())) if place.backend != "hooks" else 2
    found += [] if graphs == 2 else [f"{graphs} graphs"]
    outputs = []
    for each in (plain, model):
        each.train()
        each[2].eval()
        outputs.append(each(values(8, 6)))
    return found + ([] if torch.allclose(*outputs) else ["a submodule in evaluation"])


class Recurrent(nn.Module):
    """Modules that keep lists of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm, self.cell = nn.GRU(6, 5, batch_first=True), nn.LSTM(5, 4, batch_first=True), nn.LSTMCell(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.lstm(self.gru(x)[0])
        return self.cell(output[:, -1])[0]


def recurrent_layers(place: Place) -> list[str]:
    return place.train(Recurrent().double(), (values(8, 2, 6),), steps=2)


def attention(place: Place) -> list[str]:
    """In training, and by torch's fast path in evaluation."""
    plain = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True).double()
    found = place.train(plain, (values(8, 4, 6),), steps=2)
    model, plain = place.compiled(plain.eval()), plain.eval()
    with torch.inference_mode():
        return found + ([] if torch.allclose(model(values(8, 4, 6)), plain(values(8, 4, 6))) else ["in evaluation"])


class Layouts(nn.Module):
    """A parameter that is a transpose, one that is every other row of a tensor, convolutions of channels last, a spectral weight."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(6, 8).t())
        self.strided = nn.Parameter(torch.randn(12, 6)[::2])
        self.convolution = nn.Conv2d(2, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x).flatten(1)[:, :8] @ self.transposed @ self.strided


def memory_layouts(place: Place) -> list[str]:
    return place.train(Layouts().double().to(memory_format=torch.channels_last), (values(8, 2, 5, 5),), steps=2)


class Spectral(nn.Module):
    """A complex weight of uneven rows, and one too small to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.tensor([1 + 1j], dtype=torch.complex128))
        self.linear = nn.Linear(9, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.fft.irfft((torch.fft.rfft(x) @ self.weight)[:, :5] * self.scale, n=9))


def complex_parameters(place: Place) -> list[str]:
    """Gradients, Adam's moments and whole copies of complex numbers (70)."""
    plain = Spectral()
    model = place.compiled(plain)
    optimizers = {each: adamw(each) for each in (plain, model)}
    found = []
    for _ in range(3):
        for each, inputs in place.both(plain, model, values(12, 8)):
            optimizers[each].zero_grad()
            mean_square(each(*inputs)).backward()
            optimizers[each].step()
        for what, of in (("gradient of", whole_gradients), ("parameter", whole_parameters)):
            pair = [{name: torch.view_as_real(it) if it.is_complex() else it for name, it in of(each).items()} for each in (model, plain)]
            found += named_differences(what, *pair, TOLERANCE)
    return found


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(19, 8), nn.Linear(8, 19)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.embedding(tokens)).cumsum(1))


def growing_sequences(place: Place) -> list[str]:
    """Each length another, and a smaller last batch: one graph of fixed sizes and one of free ones (72)."""
    plain = Sequences().double()
    model = place.compiled(plain)
    optimizers = {each: adamw(each) for each in (plain, model)}
    for rows, length in ((4, 16), (4, 18), (4, 22), (4, 40), (2, 7)):
        for each, inputs in place.both(plain, model, torch.arange(rows * length).reshape(rows, length) % 19):
            optimizers[each].zero_grad()
            mean_square(each(*inputs)).backward()
            optimizers[each].step()
    found = named_differences("parameter", whole_parameters(model), whole_parameters(plain), TOLERANCE)
    graphs = len(getattr(model._zerofx.runtime, "compilations", ()))
    return found + ([] if graphs <= 3 else [f"{graphs} graphs"])


def norms_only(place: Place) -> list[str]:
    """No parameter but one-dimensional ones (75)."""
    return place.train(nn.Sequential(nn.LayerNorm(6), nn.Tanh(), nn.LayerNorm(6)).double(), (values(8, 6),), steps=2)


class Calls(nn.Module):
    """Hooks of the user on every module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def hooks_on_modules(place: Place) -> list[str]:
    """Each is called once a pass (55)."""
    plain = Calls().double()
    seen: dict[str, list[tuple[str, str]]] = {"plain": [], "sharded": []}
    model = copy.deepcopy(plain)
    for who, each in (("plain", plain), ("sharded", model)):
        for name, module in each.named_modules():
            module.register_forward_pre_hook(lambda *_, who=who, name=name: seen[who].append(("before", name)))
            module.register_forward_hook(lambda *_, who=who, name=name: seen[who].append(("after", name)))
            module.register_full_backward_hook(lambda *_, who=who, name=name: seen[who].append(("backward", name)))
    zerofx.compile(model, stage=place.stage, backend=place.backend)
    for _ in range(2):
        for each, (x,) in place.both(plain, model, values(8, 6)):
            each.zero_grad()
            mean_square(each(x.requires_grad_())).backward()
    found = [] if sorted(seen["plain"]) == sorted(seen["sharded"]) else [f"{seen['sharded']} instead of {seen['plain']}"]
    return found + named_differences("gradient of", whole_gradients(model), whole_gradients(plain), TOLERANCE)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = functional.dropout(self.first(x), 0.5)
        return self.second(kept + 0 * torch.rand_like(kept)), kept


def dropout(place: Place) -> list[str]:
    """The backward uses the mask of its forward (73)."""
    plain = Masked().double()
    model = place.compiled(plain)
    x = place.rows(values(8, 6))
    output, kept = model(x)
    mean_square(output).backward()
    mask = (kept != 0).double()
    mean_square(plain.second(plain.first(x) * mask * 2)).backward()
    expected = whole_gradients(plain)
    for gradient in expected.values():
        assert gradient is not None
        dist.all_reduce(gradient)
        gradient /= place.world
    return named_differences("gradient of", whole_gradients(model), expected, TOLERANCE)


class Recomputes(nn.Module):
    """Checkpoints a function that reads its own parameter and calls its submodules, in a frame without a graph."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.last, self.scale = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.ones(6))
        self.reentrant = reentrant

    def scaled(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale + torch.tanh(self.linear(x))

    @torch.compiler.disable
    def middle(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(lambda x: self.scaled(x) + x, x, use_reentrant=self.reentrant)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.last(x)))


def checkpoints_of_functions(place: Place) -> list[str]:
    """A backward that computes a function again, without a graph, reads whole parameters."""
    inputs = (values(8, 6),)
    return [found for reentrant in (False, True) for found in place.train(Recomputes(reentrant=reentrant).double(), inputs, steps=2)]


CHECKS: tuple[Check, ...] = (
    an_early_exit_between_steps,
    delegated_attributes,
    a_row_of_padding,
    buffers_assigned_anew,
    buffers_changed_and_read,
    random_numbers,
    memory_layouts,
    complex_parameters,
    norms_only,
)
SLOW: tuple[Check, ...] = (
    checkpoints_of_functions,
    recurrent_layers,
    attention,
    growing_sequences,
    modes,
    parametrized,
    hooks_on_modules,
    inputs_that_are_no_tensors,
    methods_beside_forward,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_is_right(ranks: Pool, check: Check) -> None:
    assert wrong(ranks, check) == []


@pytest.mark.parametrize("check", SLOW, ids=lambda check: check.__name__)
def test_is_right_at_few_places(ranks: Pool, check: Check) -> None:
    assert wrong(ranks, check, places=FEW) == []


@pytest.mark.parametrize("check", [complex_parameters, a_row_of_padding], ids=lambda check: check.__name__)
def test_is_right_where_shards_are_uneven(ranks: Pool, check: Check) -> None:
    assert wrong(ranks, check, world=3, places=FEW) == []


def test_random_numbers_by_inductor(ranks: Pool) -> None:
    assert wrong(ranks, dropout, places=((1, "inductor"), (3, "inductor"))) == []
