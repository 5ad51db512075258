import torch

from tests.programs import Repeated, TiedStack, compilation, compiled
from zerofx import ops


def test_repeated_reads_fold_to_one_gather_a_phase() -> None:
    found = compilation(compiled(Repeated(), torch.randn(4, 64), stage=3))
    for program in (found.forward, found.backward):
        assert program is not None
        gathered = [index for _, mark in program.marked("gather_start") for index in mark.params]
        assert len(gathered) == len(set(gathered))
    assert found.forward is not None
    assert {index for _, mark in found.forward.marked("gather_start") for index in mark.params} == {0, 1}


def test_whole_copies_are_read_without_any_op() -> None:
    found = compilation(compiled(TiedStack(2), torch.arange(16).view(2, 8), stage=2))
    assert found.forward is not None
    assert not list(found.forward.markers(ops.UNSHARD))
    wholes = [node for node, _ in found.forward.marked("whole")]
    assert len(wholes) == 15
    assert all(node.op == "placeholder" for node in wholes)
