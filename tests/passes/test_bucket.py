import pytest
import torch
from torch import nn

from tests.programs import compilation, compiled, stack
from zerofx.params import block_of
from zerofx.program import Program


def _buckets(program: Program | None, kind: str) -> list[tuple[int, ...]]:
    assert program is not None
    return [mark.params for _, mark in program.marked(kind)]


def test_buckets_end_where_blocks_end() -> None:
    found = compilation(stack(4, stage=3))
    assert found.forward is not None
    middle = _buckets(found.forward, "gather_start")[1:-1]
    for members in middle:
        assert len({block_of(found.forward.params[index].name) for index in members}) == 1


def test_small_blocks_merge() -> None:
    one = _buckets(compilation(stack(4, stage=3)).forward, "gather_start")
    merged = _buckets(compilation(stack(4, stage=3, bucket_min_bytes=2**19)).forward, "gather_start")
    assert len(merged) < len(one)


def test_large_blocks_split() -> None:
    found = compilation(stack(4, stage=3, bucket_max_bytes=2**16))
    assert found.forward is not None
    for members in _buckets(found.forward, "gather_start"):
        size = sum(found.forward.params[index].whole_bytes for index in members)
        assert size <= 2**16 or len(members) == 1


@pytest.mark.parametrize("stage", [1, 3])
def test_buckets_without_a_least_size(stage: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Flatten(0))
    model.register_forward_hook(lambda module, inputs, output: output.sum())
    found = compilation(compiled(model, torch.randn(2, 8), stage=stage, bucket_min_bytes=0))
    assert [len(members) for members in _buckets(found.backward, "reduce_start")] == [1, 1]


def test_first_gather_and_last_reduction_taper() -> None:
    found = compilation(stack(3, stage=3, bucket_max_bytes=2**22, bucket_min_bytes=2**15))
    assert found.forward is not None
    for program, kind, end in ((found.forward, "gather_start", 0), (found.backward, "reduce_start", -1)):
        sizes = [sum(found.forward.params[i].whole_bytes for i in members) for members in _buckets(program, kind)]
        assert 2**15 <= sizes[end] <= sum(sizes) / 4
