"""A step planned without ranks is the step that ranks compile."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.programs import Repeated, TiedStack, compilation
from tests.ranks import Pool
from zerofx import planner
from zerofx.config import Config
from zerofx.program import digest


def _tokens() -> Tensor:
    return torch.arange(32).view(4, 8)


def _compiled_on_rank(rank: int, world: int, stage: int) -> list[str]:
    torch.manual_seed(0)
    model = zerofx.compile(TiedStack(3), stage=stage, backend="aot_eager")
    model(_tokens()).backward()
    found = compilation(model)
    return [digest(program) for program in (found.forward, found.backward) if program is not None]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_plan_for_eight_ranks_is_what_eight_ranks_compile(ranks: Pool, stage: int) -> None:
    planned = planner.trace(TiedStack(3), (_tokens(),), None, Config(stage=stage, backend="aot_eager"), 8, "gloo")
    found = ranks.run(_compiled_on_rank, 8, stage)
    assert found == [[digest(program) for program in planned.scheduled]] * 8


def test_a_digest_tells_programs_apart_and_not_names() -> None:
    settings: list[tuple[int, dict[str, Any]]] = [(2, {}), (2, {}), (4, {}), (2, {"prefetch_buckets": 0})]
    found = [
        tuple(map(digest, planner.trace(TiedStack(3), (_tokens(),), None, Config(backend="aot_eager", **changed), ranks, "gloo").scheduled))
        for ranks, changed in settings
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_a_plan_needs_no_weights_and_leaves_the_model_as_it_is() -> None:
    with torch.device("meta"):
        model = TiedStack(3)
    before = copy.deepcopy(model.state_dict())
    planned = planner.trace(model, (_tokens().to("meta"),), None, Config(backend="aot_eager"), 1024, "nccl")
    assert "1024 ranks" in str(planned.schedule)
    assert type(model) is TiedStack
    assert all(value.is_meta and value.shape == before[name].shape for name, value in model.state_dict().items())
    assert model.head.weight is model.wte.weight


def test_plans_of_one_class_with_other_sizes_stay_static() -> None:
    for rows in (4, 6, 2):
        planned = planner.trace(Repeated(), (torch.randn(rows, 64),), None, Config(backend="aot_eager"), 2, "gloo")
        assert not any(isinstance(node.meta.get("val"), torch.SymInt) for program in planned.scheduled for node in program.graph.nodes)


class Branching(nn.Module):
    """A forward whose way depends on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y.sum().item() > 0:
            y = 2 * y
        return y.sum()


def test_a_branch_on_data_is_told_with_its_line() -> None:
    with pytest.raises(zerofx.ConfigError) as raised:
        planner.trace(Branching(), (torch.zeros(2, 8),), None, Config(backend="aot_eager"), 4, "gloo")
    assert "y.sum().item() > 0" in raised.value.where
    assert __file__ in raised.value.where
