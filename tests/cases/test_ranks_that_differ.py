"""Ranks that take different branches, make a different number of calls, fail or die: the right gradients on all, or an error on all."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zerofx
from tests.models import integers
from tests.ranks import Pool
from tests.reference import FP64_TOLERANCE, whole
from tests.stages import TIGHT
from zerofx.backend import unit_of
from zerofx.config import Config
from zerofx.errors import ConfigError

TIMEOUT_S = 5.0
COMPILED = [(stage, "aot_eager") for stage in (0, 1, 2, 3)]
EAGER = [(1, "hooks"), (3, "hooks")]
MODES = pytest.mark.parametrize("modes", [COMPILED, EAGER], ids=["compiled", "hooks"])


def sharded(model: nn.Module, stage: int, backend: str) -> nn.Module:
    return zerofx.compile(model, config=Config(stage=stage, backend=backend, hooks=TIGHT, timeout_s=TIMEOUT_S))


def integral(model: nn.Module) -> nn.Module:
    """Give a model small integers, and digits enough for all sums of products of them to be exact."""
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
    return model


class Multimodal(nn.Module):
    """The encoder runs only where a rank has an image; one more layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.encoder = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))
        self.head = nn.Linear(4, 2)
        self.spare = nn.Linear(2, 2)

    def forward(self, tokens: Tensor, image: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        if image is not None:
            x = x + self.encoder(image)
        return self.head(x)


class Experts(nn.Module):
    """Each token goes to one expert, picked by indexing; an expert without tokens is not called on that rank."""

    def __init__(self, count: int = 3, *, masked: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        route = x.abs().sum(1).long() % len(self.experts)
        x = self.inner(x)
        if self.masked:
            return sum(((route == number)[:, None] * expert(x) for number, expert in enumerate(self.experts)), torch.zeros_like(x))
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            places = (route == number).nonzero()[:, 0]
            if len(places):
                result = result.index_add(0, places, expert(x[places]))
        return result


Feed = Callable[[int, int], tuple[Tensor, ...]]


def images_at_even_steps(step: int, rank: int) -> tuple[Tensor, ...]:
    tokens = torch.randint(0, 7, (3,))
    return (tokens, integers(3, 3).double()) if rank == 0 and step % 2 == 0 else (tokens,)


def tokens_for_other_experts(step: int, rank: int) -> tuple[Tensor, ...]:
    """Rank 0 has tokens for all experts, rank 1 for one, another one in each step, in batches of different sizes."""
    rows = torch.eye(4)[:1] * (1 + step) if rank == 1 else integers(5 + step, 4)
    return (rows.double(),)


CASES: dict[str, tuple[Callable[[], nn.Module], Feed, int]] = {
    "multimodal": (Multimodal, images_at_even_steps, 4),
    "experts by index": (Experts, tokens_for_other_experts, 4),
    "experts by mask": (lambda: Experts(masked=True), tokens_for_other_experts, 10),
}


def trained_apart(rank: int, world: int, name: str, modes: list[tuple[int, str]]) -> list[str]:
    """Train on different programs beside a plain model that takes the mean of the ranks' losses; return what differs."""
    build, feed, steps = CASES[name]
    warnings.filterwarnings("ignore", "zerofx hooks: ")  # the eager mode says once that submodules run in another order
    found = []
    for stage, backend in modes:
        torch.manual_seed(3)
        plain = integral(build())
        torch.manual_seed(3)
        model = sharded(integral(build()), stage, backend)
        # the learning rate is a power of two, and so is the world: nothing is rounded
        optimizers = [torch.optim.SGD(each.parameters(), 2.0**-6) for each in (plain, model)]
        for step in range(steps):
            torch.manual_seed(50 + step)
            batches = [feed(step, other) for other in range(world)]
            (sum(plain(*batch).sum() for batch in batches) / world).backward()
            model(*batches[rank]).sum().backward()
            for (path, expected), actual in zip(plain.named_parameters(), model.parameters(), strict=True):
                where = f"stage {stage} {backend}, step {step}, gradient of {path}"
                if (expected.grad is None) != (actual.grad is None):
                    found.append(f"{where}: {expected.grad} and {actual.grad}")
                elif expected.grad is not None and not torch.equal(whole(actual.grad), expected.grad):
                    found.append(f"{where}: {whole(actual.grad) - expected.grad}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        torch._dynamo.reset()
    return found


@MODES
@pytest.mark.parametrize("name", CASES)
def test_different_programs_give_all_ranks_the_mean_gradient(ranks: Pool, name: str, modes: list[tuple[int, str]]) -> None:
    """cases.md 11, 12"""
    modes = modes if name == "multimodal" else [(stage, backend) for stage, backend in modes if stage in (1, 3)]
    assert ranks.run(trained_apart, 2, name, modes) == [[], []]


class ByRank(nn.Module):
    """A branch for each rank; one of them breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(3, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor, branch: int, fails: bool = False) -> Tensor:
        x = functional.relu(self.common(x))
        if fails:
            raise LookupError("nothing found")
        if branch == 2:
            torch._dynamo.graph_break()
        return self.branches[branch](x)


def branch_by_rank(rank: int, world: int) -> list[list[Any]]:
    found = []
    for stage, backend in [(3, "aot_eager"), (3, "hooks")]:
        torch.manual_seed(3)
        model = sharded(integral(ByRank()), stage, backend)
        for _ in range(3):
            # times the world, so that the mean over ranks is an integer
            (model(torch.ones(2, 3).double(), rank).sum() * world).backward()
        found.append([whole(parameter.grad) for parameter in model.parameters()])
        found.append([whole(parameter) for parameter in model.parameters()])
    return found


def test_three_ranks_with_three_programs(ranks: Pool) -> None:
    for compiled, start, hooked, _ in ranks.run(branch_by_rank, 3):
        plain = integral(ByRank())
        with torch.no_grad():
            for parameter, value in zip(plain.parameters(), start, strict=True):
                parameter.copy_(value)
        for _ in range(3):
            sum(plain(torch.ones(2, 3).double(), branch).sum() for branch in range(3)).backward()
        expected = [parameter.grad for parameter in plain.parameters()]
        torch.testing.assert_close(compiled, expected, rtol=0, atol=0)
        torch.testing.assert_close(hooked, expected, rtol=0, atol=0)


def lengths(rank: int, world: int) -> tuple[list[tuple[str, str]], list[Tensor], list[Tensor]]:
    """Train on batches that change their length on rank 0 only; return the communication of each graph, and the gradients."""
    torch.manual_seed(3)
    plain = integral(Multimodal())
    torch.manual_seed(3)
    model = sharded(integral(Multimodal()), 3, "aot_eager")
    for rows in range(2, 6):
        batches = [torch.arange(rows) + 1, torch.arange(3)]
        (sum(plain(batch).sum() for batch in batches) / world).backward()
        step(model, batches[rank])
    keys = [(unit_of(each.forward).key, unit_of(each.backward).key) for each in model._zerofx.runtime.compilations]
    used = [
        (whole(actual.grad), expected.grad)
        for actual, expected in zip(model.parameters(), plain.parameters(), strict=True)
        if actual.grad is not None
    ]
    return keys, [actual for actual, _ in used], [expected for _, expected in used]


def test_graphs_of_other_shapes_communicate_in_the_same_order(ranks: Pool) -> None:
    first, second = ranks.run(lengths, 2)
    assert (len(first[0]), len(second[0])) == (2, 1)  # rank 0 compiles once more, for any length
    assert len({*first[0], *second[0]}) == 1
    for _, actual, expected in (first, second):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert len(actual) == 3


class Exits(nn.Module):
    """Leaves a forward early, after so many layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, depth: int = 4) -> Tensor:
        for layer in self.layers[:depth]:
            x = functional.relu(layer(x))
        return x


def exits(rank: int, world: int, modes: list[tuple[int, str]]) -> list[str]:
    """Train, evaluate with ranks that leave at another layer each, train on; return what differs from a plain model."""
    warnings.filterwarnings("ignore", "zerofx hooks: ")
    found = []
    for stage, backend in modes:
        torch.manual_seed(3)
        plain = integral(Exits())
        torch.manual_seed(3)
        model = sharded(integral(Exits()), stage, backend)
        x = torch.ones(2, 4).double()
        for depth in (4, 4, 2 + rank, 4):
            if depth == 4:
                step(plain, x)
                step(model, x)
                continue
            with torch.no_grad():
                if not torch.equal(model(x, depth), plain(x, depth)):
                    found.append(f"stage {stage} {backend}: the output of {depth} layers")
            if backend == "hooks" and model._zerofx.runtime._coordinator._live_elements:
                found.append(f"stage {stage}: whole parameters left")
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        found += [f"stage {stage} {backend}: gradient" for expected, actual in pairs if not torch.equal(whole(actual.grad), expected.grad)]
        torch._dynamo.reset()
    return found


def test_ranks_that_leave_a_forward_early(ranks: Pool) -> None:
    """cases.md 22"""
    assert ranks.run(exits, 2, [(2, "aot_eager"), (3, "aot_eager"), (3, "hooks")]) == [[], []]


def two_models(rank: int, world: int, modes: list[tuple[int, str]]) -> list[float]:
    """Train a generator and a critic in turn beside plain ones on both ranks' batches; return how far each parameter is off."""
    warnings.filterwarnings("ignore", "zerofx hooks: ")
    found = []
    for stage, backend in modes:
        kinds = []
        for compiles in (False, True):
            torch.manual_seed(3)
            pair = [nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))]
            models = [sharded(model.double(), stage, backend) if compiles else model.double() for model in pair]
            kinds.append((models, [torch.optim.SGD(model.parameters(), 0.1) for model in models]))
        for number in range(4):
            torch.manual_seed(60 + number)
            noise, real = torch.randn(world, 4, 3).double(), torch.randn(world, 4, 2).double()
            for compiles, ((generator, critic), optimizers) in enumerate(kinds):
                shares = [rank] if compiles else range(world)
                for trained in (1, 0):
                    losses = [
                        critic(real[share]).mean() - critic(generator(noise[share]).detach()).mean()
                        if trained
                        else critic(generator(noise[share])).mean()
                        for share in shares
                    ]
                    (sum(losses) / len(losses)).backward()
                    optimizers[trained].step()
                    for optimizer in optimizers:  # the critic's gradients of the generator's step are dropped
                        optimizer.zero_grad()
        plain, compiled = ([parameter for model in models for parameter in model.parameters()] for models, _ in kinds)
        found += [(whole(actual) - expected).abs().max().item() for expected, actual in zip(plain, compiled, strict=True)]
        torch._dynamo.reset()
    return found


def test_two_models_in_turn(ranks: Pool) -> None:
    """cases.md 54"""
    for differences in ranks.run(two_models, 2, [(1, "aot_eager"), (3, "aot_eager"), (3, "hooks")]):
        assert max(differences) < FP64_TOLERANCE


def said(run: Callable[[], Any]) -> tuple[str, str, float]:
    """Return what an error says, by its class and text, and after how many seconds; empty where none is raised."""
    start = time.monotonic()
    try:
        run()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def step(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    model(*args, **kwargs).sum().backward()


def different_counts(rank: int, world: int, modes: list[tuple[int, str]]) -> list[list[tuple[str, str, float]]]:
    """Generate 2 and 5 tokens, evaluate 3 and 2 batches, train 1 and 2 steps; after each, a step that all ranks take together."""
    found = []
    for stage, backend in modes:
        model = sharded(Multimodal(), stage, backend)
        tokens = torch.zeros(2, dtype=torch.long)

        def generate(model: nn.Module = model, tokens: Tensor = tokens, times: int = (2, 5)[rank]) -> None:
            with torch.no_grad():
                for _ in range(times):
                    tokens = model(tokens).argmax(1)
            step(model, tokens)

        def evaluate(model: nn.Module = model, tokens: Tensor = tokens, times: int = (3, 2)[rank]) -> None:
            with torch.no_grad():
                for _ in range(times):
                    model(tokens)
            step(model, tokens)

        def train(model: nn.Module = model, tokens: Tensor = tokens, times: int = 1 + rank) -> None:
            for _ in range(times):
                step(model, tokens)
            if times == 1:
                time.sleep(TIMEOUT_S + 2)  # what a rank does that has left the loop
                step(model, tokens)

        for differ in (generate, evaluate, train) if stage == 3 else (evaluate,):
            found.append([said(differ), said(lambda model=model, tokens=tokens: step(model, tokens))])
        torch._dynamo.reset()
    return found


def test_different_number_of_calls_is_an_error_in_time_on_all_ranks(ranks: Pool) -> None:
    """cases.md 13, 14"""
    modes = [(3, "aot_eager"), (3, "hooks"), (2, "aot_eager")]
    first, second = ranks.run(different_counts, 2, modes)
    for mine, other in zip(first, second, strict=True):
        assert mine[0][:2] == other[0][:2]
        assert mine[1][:2] == other[1][:2] == ("", "")
    whats = [mine[0][1].partition("\n")[0] for mine in first]
    for generated, evaluated, left in (whats[:3], whats[3:6]):
        assert generated == "rank 0 is in training forward 3, rank 1 is in forward without gradients 3"
        assert evaluated == "rank 0 is in forward without gradients 7, rank 1 is in training forward 7"
        assert left == f"rank 0 did not come to training forward 10 within {TIMEOUT_S:g} s"
    assert whats[6:] == [""]  # evaluating communicates nothing at stage 2, so that it may be uneven
    assert all(TIMEOUT_S <= second[place][0][2] < TIMEOUT_S + 30 for place in (2, 5))  # the last rank starts to wait at once


def accumulated(rank: int, world: int, modes: list[tuple[int, str]]) -> list[str]:
    """Gather up gradients over 2 and 3 micro-batches; return what differs from the sum of the ranks' means."""
    found = []
    for stage, backend in modes:
        torch.manual_seed(3)
        plain = integral(Exits())
        torch.manual_seed(3)
        model = sharded(integral(Exits()), stage, backend)
        for _ in range(2):
            plain.zero_grad()
            model.zero_grad()  # adding to a gradient that is reduced already would reduce what is kept
            (plain(torch.ones(5, 4).double()).sum() / world).backward()
            with zerofx.no_sync(model):
                for _ in range(1 + rank):
                    step(model, torch.ones(1, 4).double())
            step(model, torch.ones(1, 4).double())
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        found += [f"stage {stage} {backend}: gradient" for expected, actual in pairs if not torch.equal(whole(actual.grad), expected.grad)]
        torch._dynamo.reset()
    return found


def test_ranks_may_differ_in_what_communicates_nothing(ranks: Pool) -> None:
    assert ranks.run(accumulated, 2, [(0, "aot_eager"), (1, "aot_eager"), (1, "hooks")]) == [[], []]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise LookupError("nothing found")
        return grad, None


class FailsInBackward(nn.Module):
    """Fails between two submodules, and for a compiler between two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    @torch.compiler.disable
    def between(self, x: Tensor, fails: bool) -> Tensor:
        return Fails.apply(x, fails)

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        return self.second(self.between(self.first(x), fails))


def failures(rank: int, world: int, modes: list[tuple[int, str]]) -> list[Any]:
    found: list[Any] = []
    for stage, backend in modes:
        x = torch.ones(2, 3)
        branches, inner = sharded(ByRank(), stage, backend), sharded(FailsInBackward(), stage, backend)
        runs = [
            lambda model=branches, x=x: step(model, x, 0, fails=rank == 1),
            lambda model=inner, x=x: step(model, x, fails=rank == 1),
            lambda model=inner, x=x: Fails.apply(model(x), rank == 1).sum().backward(),
        ]
        for number, run in enumerate(runs):
            model, more = (inner, ()) if number else (branches, (0,))
            step(model, x, *more)
            model.zero_grad()
            error = said(run)
            held = any(parameter.grad is not None for parameter in model.parameters())
            if number == 2 and rank == 1:  # the others are in a backward that this rank has not begun
                assert said(lambda model=model, x=x: step(model, x))[0] == "RankMismatchError"
            step(model, x, *more)
            found.append(
                [error[0], error[1], held, [whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]]
            )
        torch._dynamo.reset()
    return found


@MODES
def test_exception_of_one_rank_is_an_error_of_all_and_they_go_on(ranks: Pool, modes: list[tuple[int, str]]) -> None:
    first, second = ranks.run(failures, 2, modes)
    for place, (mine, other) in enumerate(zip(first, second, strict=True)):
        # no rank is left with a gradient that others lack, and the next step gives both the same
        assert (mine[2], other[2]) == (False, False), place
        torch.testing.assert_close(mine[3], other[3], rtol=0, atol=0)
        assert other[:2] == ["LookupError", "nothing found"]
        assert mine[0] == "RankMismatchError"
        by_place = ["rank 1 raised LookupError: nothing found\n", "rank 1 raised in a backward\n", "rank 1 is in "]
        assert by_place[place % 3] in mine[1], mine[1]


@torch.library.custom_op("zerofx_tests::interrupt", mutates_args=())
def interrupt(x: Tensor, how: str) -> Tensor:
    """An op in the middle of a graph that fails, or ends its process."""
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "fails":
        raise LookupError("nothing found")
    return x.clone()


interrupt.register_fake(lambda x, how: x.clone())
interrupt.register_autograd(lambda ctx, grad: (grad, None))


class Interrupted(nn.Module):
    """Layers that travel each in a bucket of its own, with an op between them that may not return."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(200, 200) for _ in range(4))

    def forward(self, x: Tensor, how: str = "") -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x if number != 2 else interrupt(x, how))
        return x


def interrupted(rank: int, world: int, backend: str, how: str) -> list[tuple[str, str, float]]:
    model, x = sharded(Interrupted(), 3, backend), torch.ones(2, 200)
    step(model, x)
    return [said(lambda: step(model, x, how if rank == world - 1 else "")), said(lambda: step(model, x))]


@pytest.mark.parametrize(("backend", "world"), [("aot_eager", 2), ("hooks", 3)])
def test_rank_that_dies_is_named_by_the_others(ranks: Pool, backend: str, world: int) -> None:
    *left, dead = ranks.outcomes(interrupted, world, backend, "dies")
    assert dead.failure is not None
    assert dead.failure.type_name == "Died"
    for outcome in left:
        assert outcome.failure is None, outcome.failure
        for kind, text, seconds in outcome.value:
            assert kind == "RankLostError"
            assert text.startswith(f"rank {world - 1} is gone\n  where: Interrupted, training forward 2\n  why: ")
            assert "remedy: " in text
            assert seconds < 30  # compiling again included


def test_failure_inside_of_a_graph_ends_communication_on_all_ranks(ranks: Pool) -> None:
    first, second = ranks.run(interrupted, 2, "aot_eager", "fails")
    assert second[0][:2] == ("LookupError", "nothing found")
    for kind, text, _ in (*first, second[1]):
        assert kind == "RankMismatchError"
        assert text.startswith("rank 1 raised LookupError: nothing found, in the middle of communication\n  where: Interrupted, ")


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), True, "60"])
def test_timeout_is_a_positive_number_of_seconds(value: Any) -> None:
    with pytest.raises(ConfigError, match="is no number of seconds"):
        Config(timeout_s=value)


class ReadsAhead(nn.Module):
    """A layer that an inner one gathers ahead of, and leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.outer(x)
        return self.inner(x) + y + self.outer(x).detach()


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ReadsAhead(), nn.Linear(16, 16), ReadsAhead()])
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            for number, layer in enumerate(self.layers):
                if not (skip and number == 0):
                    x = layer(x)
        return self.last(x).square().mean()


def skipped_by_all(rank: int, world: int) -> list[list[str]]:
    """Return the skipped layer's parameters that have gradients after each step, the last of which skips it."""
    limits = zerofx.HookLimits(prefetch_elements=300, max_reuse_distance_elements=0, persistence_threshold_elements=20)
    torch.manual_seed(0)
    model = zerofx.compile(Skips(), config=Config(stage=3, backend="hooks", hooks=limits, timeout_s=TIMEOUT_S))
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "zerofx hooks: ")
        for number in range(4):
            model.zero_grad()
            model(torch.ones(3, 4), number >= 2).backward()
            found.append([name for name, param in model.layers[0].named_parameters() if param.grad is not None])
    return found


def test_what_was_gathered_ahead_and_used_by_none_has_no_gradient(ranks: Pool) -> None:
    for found in ranks.run(skipped_by_all, 2):
        assert found == [["inner.weight", "inner.bias"]] * 2 + [[]] * 2
