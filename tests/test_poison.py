"""Use after release, independent of the verifier: on real ranks, a released parameter is filled with NaN."""

from unittest.mock import patch

import pytest

from tests.models import case_named
from tests.ranks import Pool
from tests.reference import Trace, differences, train
from tests.stages import compiled
from zerofx.passes import STAGES
from zerofx.passes.lower import Lower
from zerofx.pipeline import Pipeline


def train_poisoned(rank: int, world: int, name: str) -> Trace:
    case = case_named(name)
    *passes, last = STAGES[3].passes
    assert isinstance(last, Lower)
    with patch.dict(STAGES, {3: Pipeline(*passes, Lower(poison=True))}):
        return train(compiled(case, 3), case, rank, world)


@pytest.mark.parametrize("name", ["tied_mlp", "odd_sizes", "seed"])
def test_nothing_reads_a_released_parameter(ranks: Pool, name: str) -> None:
    case = case_named(name)
    assert differences(ranks.run(train_poisoned, 2, name), train(case.model(), case)) == []
