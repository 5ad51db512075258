"""A step that must fit a limit gives up what costs the least time for each byte, and nothing where it fits."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

import zerofx
from benchmarks.measure import allocated_bytes
from tests.programs import TiedStack, fake_ranks
from tests.ranks import Pool
from zerofx.activations import Kept
from zerofx.backend import CompiledRuntime
from zerofx.config import Config
from zerofx.errors import ConfigError, MemoryLimitError
from zerofx.fitting import Attempt, fit
from zerofx.module import runtime_of
from zerofx.origins import Call
from zerofx.recomputing import Choice, Extent

FIRST, SECOND = Call("h.0"), Call("h.1")
CHOICES = {extent: Choice(((FIRST, extent), (SECOND, extent))) for extent in Extent}
# What a part keeps, and the seconds that this spends.
KEPT = {Extent.NOTHING: (100, 0.0), Extent.CHEAP: (60, 4.0), Extent.ALL: (10, 14.0)}


def _keep(choice: Choice) -> Kept:
    return Kept({call: KEPT[extent][0] for call, extent in choice.levels}, {call: KEPT[extent][1] for call, extent in choice.levels})


def _steps(seconds_a_byte: float) -> tuple[Callable[[Choice, int], Attempt], list[Attempt]]:
    """Steps of 10 bytes that stay, 40 more at most in motion, 20 at least; each byte in motion saves some seconds."""
    made: list[Attempt] = []

    def attempt(choice: Choice, limit_bytes: int) -> Attempt:
        if limit_bytes < 30:
            error = MemoryLimitError("too small")
            error.smallest_bytes = 30
            raise error
        moving, kept = min(limit_bytes, 50), _keep(choice)
        seconds = 100 + sum(kept.seconds.values()) + seconds_a_byte * (50 - moving)
        made.append(Attempt(seconds, moving + kept.total_bytes, moving, 10, {"whole": moving, "saved": kept.total_bytes}, choice))
        return made[-1]

    return attempt, made


def _fitted(limit_bytes: int, seconds_a_byte: float) -> tuple[Mapping[Call, Extent], int, int]:
    """What is computed again, the bytes in motion, and the number of attempts."""
    attempt, made = _steps(seconds_a_byte)
    found, _ = fit(attempt, _keep, CHOICES, limit_bytes)
    assert found.total_bytes <= limit_bytes
    return dict(found.made.levels), found.moving_bytes, len(made)


def test_nothing_is_given_up_where_it_fits() -> None:
    assert _fitted(250, 1.0) == ({FIRST: Extent.NOTHING, SECOND: Extent.NOTHING}, 50, 1)


def test_the_bytes_that_cost_the_least_time_go_first() -> None:
    # cheap operators cost 0.1 seconds a byte, all of a block 0.2 more a byte: overlap in between goes before the latter
    assert _fitted(210, 10.0)[:2] == ({FIRST: Extent.CHEAP, SECOND: Extent.NOTHING}, 50)
    assert _fitted(170, 10.0)[:2] == ({FIRST: Extent.CHEAP, SECOND: Extent.CHEAP}, 50)
    assert _fitted(150, 0.15)[:2] == ({FIRST: Extent.CHEAP, SECOND: Extent.CHEAP}, 30)
    assert _fitted(150, 0.6)[:2] == ({FIRST: Extent.ALL, SECOND: Extent.CHEAP}, 50)
    assert _fitted(230, 0.01)[:2] == ({FIRST: Extent.NOTHING, SECOND: Extent.NOTHING}, 30)


def test_a_limit_that_cannot_be_met_says_the_smallest_that_can() -> None:
    for limit in (49, 10):
        with pytest.raises(MemoryLimitError, match="the smallest that works for this batch is 50 bytes") as failure:
            _fitted(limit, 1.0)
        assert "30 bytes of whole, 20 bytes of saved" in failure.value.why
    assert _fitted(failure.value.smallest_bytes, 1.0)[:2] == ({FIRST: Extent.ALL, SECOND: Extent.ALL}, 30)


def test_the_smallest_limit_is_that_of_the_step_which_holds_least() -> None:
    """Computing again takes memory too: here a step that gives up all activations holds more than one that gives up some."""
    held = {Extent.NOTHING: 100, Extent.CHEAP: 80, Extent.ALL: 90}

    def attempt(choice: Choice, limit_bytes: int) -> Attempt:
        return Attempt(1.0, held[choice.levels[0][1]], 0, 0, {}, choice)

    with pytest.raises(MemoryLimitError) as failure:
        fit(attempt, _keep, CHOICES, 10)
    assert failure.value.smallest_bytes == 80
    assert fit(attempt, _keep, CHOICES, 80)[0].total_bytes == 80


def _tokens(rows: int) -> Tensor:
    return torch.arange(rows * 16).view(rows, 16) % 32


def _fitting_bytes(rows: int) -> int:
    """What a step of so many rows holds, and a little more for the parameters that are too small to shard."""
    return 8192 + zerofx.plan(TiedStack(2, 64, 32), (_tokens(rows),), world_size=2, stage=3, backend="aot_eager").step_peak_bytes


def _again(model: torch.nn.Module) -> int:
    """How many nodes the last step computed again."""
    runtime = runtime_of(model)
    assert isinstance(runtime, CompiledRuntime)
    return sum(1 for ran in runtime.last_step if ran.backward for _ in ran.backward.marked("recompute"))


def test_a_larger_batch_is_fitted_anew_and_a_smaller_one_stays_within() -> None:
    limit = _fitting_bytes(4)
    with fake_ranks(2):
        config = Config(stage=3, backend="aot_eager", recompute="auto", memory_limit_bytes=limit)
        model = zerofx.compile(TiedStack(2, 64, 32), config=config)

        def step(rows: int) -> int:
            model(_tokens(rows)).backward()
            model.zero_grad()
            return _again(model)

        assert [step(rows) > 0 for rows in (4, 7, 6, 4, 7)] == [False, True, True, False, True]
        for rows in (4, 7, 6):
            # what is planned counts no scalars, which take some 64 bytes each
            assert min(allocated_bytes(lambda rows=rows: step(rows)) for _ in range(2)) <= limit + 1024
        with pytest.raises(MemoryLimitError, match="the smallest that works for this batch"):
            step(40)
        assert step(7) > 0
        assert len(runtime_of(model).compilations) == 2


def _unlike_batches(rank: int, world: int, limit: int) -> tuple[bool, int, str]:
    """Whether gradients are those of a step without a limit, what is computed again, and what a batch too large raises."""
    torch._dynamo.reset()
    rows, steps = 7 if rank else 4, list[list[Tensor]]()
    for settings in ({}, {"recompute": "auto", "memory_limit_bytes": limit}):
        torch.manual_seed(0)
        model = zerofx.compile(TiedStack(2, 64, 32), config=Config(stage=3, backend="aot_eager", **settings))
        model(_tokens(rows)).backward()
        steps.append([parameter.grad.to_local().clone() for parameter in model.parameters() if parameter.grad is not None])
    again, raised = _again(model), ""
    try:
        model(_tokens(40 if rank else 4))
    except zerofx.ZerofxError as error:
        raised = f"{type(error).__name__}: {error}"
    model.zero_grad()
    model(_tokens(rows)).backward()  # all go on
    steps.append([parameter.grad.to_local() for parameter in model.parameters() if parameter.grad is not None])
    return all(len(step) == len(steps[0]) > 0 and all(map(torch.equal, step, steps[0])) for step in steps), again, raised


def test_ranks_with_unlike_batches_give_up_unlike_and_agree(ranks: Pool) -> None:
    (first, again_first, raised_first), (second, again_second, raised_second) = ranks.run(_unlike_batches, 2, _fitting_bytes(4))
    assert first
    assert second
    assert (again_first, again_second > 0) == (0, True)
    assert raised_second.startswith("MemoryLimitError: memory_limit=")
    assert raised_first.startswith("RankMismatchError")
    assert "raised MemoryLimitError" in raised_first


class Broken(TiedStack):
    """A forward in several graphs."""

    def forward(self, tokens: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(tokens)


def test_what_cannot_be_fitted_is_told() -> None:
    with pytest.raises(ConfigError, match="no choice without a memory_limit"):
        Config(recompute="auto")
    with pytest.raises(ConfigError, match="takes no"):
        Config(recompute="auto", backend="hooks")
    for settings in ({"recompute": "auto"}, {"offload": "activations"}):
        with fake_ranks(2), pytest.raises(ConfigError, match=f"{next(iter(settings))}.*breaks into several graphs"):
            zerofx.compile(Broken(1), backend="aot_eager", memory_limit="1GB", **settings)(_tokens(2))
