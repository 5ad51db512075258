import pytest
import torch

from tests.programs import Repeated, compilation, compiled, stack
from zerofx import ops
from zerofx.program import Sync


def test_repeated_reads_reduce_once() -> None:
    found = compilation(compiled(Repeated(), torch.randn(4, 64), stage=3))
    assert found.backward is not None
    reduced = [index for _, mark in found.backward.marked("reduce_start") for index in mark.params]
    assert sorted(reduced) == [0, 1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_trained_parameter_reduces_once(stage: int) -> None:
    found = compilation(stack(3, stage=stage))
    assert found.backward is not None
    reduced = [index for _, mark in found.backward.marked("reduce_start") for index in mark.params]
    assert sorted(reduced) == list(range(21))
    assert found.backward.sync is Sync.REDUCE
    assert not list(found.backward.markers(ops.REDUCE_GRAD))
