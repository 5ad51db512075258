"""The eager mode gives the numbers of the compiled one, bitwise, and fetches, prefetches and releases as its trace says."""

import contextlib
import copy
import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.models import BRANCH, EXACT, FROZEN, GPT, SMOOTH_MLP, Case, case_named
from tests.programs import TiedStack, fake_ranks, stack
from tests.ranks import Pool
from tests.reference import Trace, differences, drift, named_differences, train, whole_gradients
from tests.stages import STAGES, TIGHT, at_stage, compiled
from zerofx.config import Config, HookLimits
from zerofx.errors import ConfigError, ZerofxError

# Nothing is fetched ahead or kept, whatever its size.
NOTHING = HookLimits(prefetch_elements=0, max_live_elements=0, max_reuse_distance_elements=0, persistence_threshold_elements=0)


def train_eagerly(rank: int, world: int, name: str, limits: HookLimits) -> list[tuple[Trace, list[str]]]:
    """At each stage, the trace of the eager mode, and what it warns of."""
    case = case_named(name)
    found = []
    for stage in STAGES:
        with at_stage(stage), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            settings = Config(stage=stage, backend="hooks", hooks=limits)
            trace = train(compiled(case, stage, config=settings), case, rank, world)
            found.append((trace, [str(warning.message).split(";")[0] for warning in told]))
    return found


def train_compiled(rank: int, world: int, name: str) -> list[Trace]:
    case = case_named(name)
    found = []
    for stage in STAGES:
        with at_stage(stage):
            found.append(train(compiled(case, stage), case, rank, world))
    return found


def name_of(value: Case | HookLimits) -> str:
    return str(value) if isinstance(value, Case) else "tight" if value is TIGHT else "default"


@pytest.mark.parametrize(
    ("case", "limits"), [*((case, TIGHT) for case in EXACT), (BRANCH, HookLimits()), (FROZEN, HookLimits())], ids=name_of
)
def test_exact_cases_are_bitwise_equal(ranks: Pool, case: Case, limits: HookLimits) -> None:
    """Equal to one process, as the compiled mode is."""
    expected = train(case.model(), case)
    for stage, found in zip(STAGES, zip(*ranks.run(train_eagerly, 2, case.name, limits), strict=True), strict=True):
        assert differences([trace for trace, _ in found], expected) == [], f"stage {stage}"
        # only a branch changes the order of submodules, and that is said once
        once = ["zerofx hooks: Linear runs where another submodule did before"] if case is BRANCH and stage == 3 else []
        assert [told for _, told in found] == [once] * 2, f"stage {stage}"


@pytest.mark.parametrize(("case", "limits"), [(GPT, (TIGHT, HookLimits())), (SMOOTH_MLP, (TIGHT,))], ids=["gpt", "smooth_mlp"])
def test_equals_the_compiled_mode_bitwise(ranks: Pool, case: Case, limits: tuple[HookLimits, ...]) -> None:
    compiled_by_rank = ranks.run(train_compiled, 2, case.name)
    for eager_by_rank in (ranks.run(train_eagerly, 2, case.name, each) for each in limits):
        for by_stage in zip(compiled_by_rank, eager_by_rank, strict=True):
            for stage, expected, (actual, told) in zip(STAGES, *by_stage, strict=True):
                assert drift([expected, actual]) == [], f"stage {stage}"
                assert actual.losses == expected.losses, f"stage {stage}"
                assert told == [], f"stage {stage}"


class Hidden:
    """An output in which a tensor hides from everyone who does not know the class."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Hidden:
        return Hidden(self.linear(x) * self.scale)


class Unusual(nn.Module):
    """Checkpointed layers, an output of an unknown class, and a frozen layer between trained ones."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.hides = Hides()
        self.last = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=self.reentrant)
        x = checkpoint(lambda x: torch.tanh(x * self.scale), x, use_reentrant=self.reentrant)
        x = self.hides(torch.tanh(self.frozen(x))).value
        if fails:
            raise KeyError("in the middle of a forward")
        return checkpoint(self.last, x, use_reentrant=self.reentrant)


def train_unusually(rank: int, world: int, reentrant: bool) -> list[str]:
    """All ranks have the same rows, so that the average of their gradients is exactly the gradient of one."""
    torch.manual_seed(0)
    plain = Unusual(reentrant=reentrant)
    x = torch.randn(4, 6, requires_grad=True)
    found = []
    for stage in STAGES:
        with at_stage(stage):
            model = zerofx.compile(copy.deepcopy(plain), config=Config(stage=stage, backend="hooks", hooks=TIGHT))
            for step in range(4):
                warnings.filterwarnings("ignore", "zerofx hooks: .* in which tensors may hide")
                if step == 2:
                    with contextlib.suppress(KeyError):
                        model(x, fails=True)
                for trained in (plain, model):
                    trained.zero_grad()
                    loss = trained(x).square().sum()
                    loss.backward(retain_graph=step == 1 and not reentrant)
                    if step == 1 and not reentrant:
                        loss.backward()
                found += named_differences(f"stage {stage}, step {step}:", whole_gradients(model), whole_gradients(plain))
    return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_hidden_outputs_exceptions_and_second_backwards(ranks: Pool, reentrant: bool) -> None:
    assert ranks.run(train_unusually, 2, reentrant) == [[]] * 2


def test_a_second_derivative_is_refused() -> None:
    with fake_ranks(2):
        model = zerofx.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), config=Config(backend="hooks"))
        x = torch.randn(2, 4, requires_grad=True)
        with pytest.raises(ZerofxError, match="create_graph"):
            torch.autograd.grad(model(x).sum(), x, create_graph=True)


def stepped(model: nn.Module, limits: HookLimits, steps: int = 2) -> nn.Module:
    """Run eager steps as one of two ranks: the first records, the next ones follow."""
    with fake_ranks(2):
        model = zerofx.compile(model, config=Config(backend="hooks", hooks=limits))
        for _ in range(steps):
            model(torch.arange(32).view(4, 8)).backward()
            model.zero_grad()
    return model


def test_golden_event_log(request: pytest.FixtureRequest) -> None:
    limits = HookLimits(prefetch_elements=70_000, max_reuse_distance_elements=0, persistence_threshold_elements=1000)
    text = str(zerofx.schedule(stepped(TiedStack(3), limits))) + "\n"
    path = Path(__file__).parent / "golden" / "stack_hooks.txt"
    if request.config.getoption("rewrite_golden"):
        path.write_text(text)
    assert text == path.read_text()


def test_default_limits_gather_a_small_model_once() -> None:
    schedule = zerofx.schedule(stepped(TiedStack(3), HookLimits()))
    # the small parameters, which were not updated, stay; what is large is gathered once for forward and backward
    launched = [event.label for event in schedule.events if event.what.startswith("gather") and event.kind == "launch"]
    assert len(launched) == len(set(launched)) == 0 or schedule.traffic_bytes["all_gather"] < schedule.parameter_bytes


@pytest.mark.parametrize("max_live_elements", [40_000, 60_000, 90_000])
def test_live_parameters_are_bounded(max_live_elements: int) -> None:
    limits = HookLimits(max_live_elements=max_live_elements, persistence_threshold_elements=0)
    schedule = zerofx.schedule(stepped(TiedStack(4), limits))
    largest = max(event.moved_bytes for event in schedule.events if event.kind == "launch")
    assert schedule.peak_whole_bytes <= 4 * max_live_elements + largest
    assert schedule.traffic_bytes["all_gather"] > schedule.parameter_bytes // 2


def test_frozen_parameters_are_released_in_the_backward() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
            for layer in self.layers:
                layer.weight.requires_grad_(False)

        def forward(self, tokens: Tensor) -> Tensor:
            x = tokens.float() @ torch.ones(8, 64)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.sum()

    schedule = zerofx.schedule(stepped(Adapted(), TIGHT))
    assert schedule.peak_whole_bytes <= 3 * 65 * 64 * 4


def test_prefetch_runs_ahead_of_use() -> None:
    schedule = zerofx.schedule(stepped(TiedStack(4), HookLimits(prefetch_elements=40_000, max_reuse_distance_elements=0)))
    launched = {event.what: place for place, event in enumerate(schedule.events) if event.kind == "launch" and event.phase == "forward"}
    waited = {event.what: place for place, event in enumerate(schedule.events) if event.kind == "wait" and event.phase == "forward"}
    between = [schedule.events[launched[what] : waited[what]] for what in launched if what in waited]
    assert sum(any(event.kind == "compute" for event in events) for events in between) >= len(between) - 1


def test_diff_shows_both_modes() -> None:
    compiled_schedule = zerofx.schedule(stack(2, stage=3))
    eager_schedule = zerofx.schedule(stepped(TiedStack(2), TIGHT))
    lines = compiled_schedule.diff(eager_schedule).splitlines()
    assert lines[:2] == ["--- aot_eager, stage 3", "+++ hooks, stage 3"]
    assert any(line.startswith("-  launch") for line in lines)
    assert any(line.startswith("+  launch") for line in lines)
    assert compiled_schedule.diff(compiled_schedule) == ""


def test_copies_have_hooks_of_their_own() -> None:
    model = stepped(TiedStack(2), TIGHT)
    with fake_ranks(2):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other._zerofx.runtime is not model._zerofx.runtime
            other(torch.arange(32).view(4, 8)).backward()
            assert all(parameter.grad is not None for parameter in other.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_signature_of_forward_stays() -> None:
    model = stepped(TiedStack(1), TIGHT, steps=0)
    assert list(inspect.signature(model.forward).parameters) == ["tokens"]
    assert list(inspect.signature(model.h[0].forward).parameters) == ["x"]


@pytest.mark.parametrize(("field", "value"), [("memory_limit_bytes", 10**9), ("passes", (object(),))])
def test_what_needs_a_graph_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match="hooks"):
        Config(backend="hooks", **{field: value})


def test_limits_are_counts() -> None:
    with pytest.raises(ConfigError, match="whole number"):
        HookLimits(prefetch_elements=-1)


class Positions(nn.Module):
    """Returns a view of its own parameter."""

    def __init__(self, rows: int = 8) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[: x.shape[0]]


class Attributes(dict):  # type: ignore[type-arg]
    """A dict that pytree does not know."""


class Base:
    __slots__ = ("value",)


class Slotted(Base):
    """A tensor in a slot of the base, and a __dict__ of its own."""


class Wraps(nn.Module):
    """Returns its output in another form each time."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.scale, self.kind = nn.Linear(6, 6), nn.Parameter(torch.ones(6)), kind

    def forward(self, x: Tensor) -> Any:
        value = self.linear(x) * self.scale
        if self.kind == "dict":
            return Attributes(value=value)
        if self.kind == "slots":
            made = Slotted()
            made.value = value
            return made
        return lambda: value  # nobody can look into a closure

    def unwrap(self, wrapped: Any) -> Tensor:
        found: Tensor = wrapped["value"] if self.kind == "dict" else wrapped.value if self.kind == "slots" else wrapped()
        return found


class Aux(nn.Module):
    """Called twice, with a branch that begins at its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.second + (self.first @ self.first).tanh() @ self.second


class Awkward(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.positions, self.wraps, self.aux = Positions(), Wraps(kind), Aux()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh() * self.positions(x)
        x = self.wraps.unwrap(self.wraps(x))
        y, _ = self.attention(x[None], x[None], x[None], need_weights=False)
        y = torch.relu_(y)[0]  # an in-place write into a view
        return self.out(self.aux(y) + self.aux(y.sin()))


def train_awkwardly(rank: int, world: int, kind: str, limits: HookLimits) -> list[str]:
    torch.manual_seed(0)
    plain = Awkward(kind)
    model = zerofx.compile(copy.deepcopy(plain), config=Config(backend="hooks", hooks=limits))
    warnings.filterwarnings("ignore", "zerofx hooks: .* returns a function, in which tensors may hide")
    found = []
    x = torch.randn(6, 6, requires_grad=True)
    for step in range(3):
        for trained in (plain, model):
            trained.zero_grad()
            trained(x).square().sum().backward()
            torch.optim.SGD(trained.parameters(), 0.01, foreach=step == 1).step()
        found += named_differences(f"step {step}:", whole_gradients(model), whole_gradients(plain))
    if x._backward_hooks:
        found.append("hooks pile up on an input")
    return found


@pytest.mark.parametrize("limits", [HookLimits(), TIGHT, NOTHING], ids=["default", "tight", "nothing"])
@pytest.mark.parametrize("kind", ["dict", "slots", "closure"])
def test_awkward_modules(ranks: Pool, kind: str, limits: HookLimits) -> None:
    assert ranks.run(train_awkwardly, 2, kind, limits) == [[]] * 2


class Raises(torch.autograd.Function):
    """A backward that fails when told to."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Raises.fails:
            raise KeyError("in the middle of a backward")
        return grad


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(Raises.apply(torch.tanh(self.first(x))))))


def train_through_a_failing_backward(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    plain = Chain()
    x, found = torch.randn(4, 6), []
    for stage in STAGES:
        with at_stage(stage):
            model = zerofx.compile(copy.deepcopy(plain), config=Config(stage=stage, backend="hooks", hooks=TIGHT))
            for step in range(3):
                Raises.fails = step == 1
                for trained in (plain, model):
                    trained.zero_grad()
                    with contextlib.suppress(KeyError):
                        trained(x).square().sum().backward()
                if step != 1:
                    found += named_differences(f"stage {stage}, step {step}:", whole_gradients(model), whole_gradients(plain))
    return found


def test_a_backward_that_raised_leaves_nothing_behind(ranks: Pool) -> None:
    assert ranks.run(train_through_a_failing_backward, 2) == [[]] * 2
