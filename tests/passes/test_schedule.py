import functools
import itertools

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.programs import TiedStack, compilation, compiled, fake_ranks, stack
from zerofx import memory
from zerofx.program import Program

LAYERS = 4  # more buckets than any window here is wide


@functools.cache
def _smallest_limit() -> int:
    with pytest.raises(zerofx.MemoryLimitError) as caught:
        stack(LAYERS, stage=3, memory_limit_bytes=1)
    return caught.value.smallest_bytes


def _programs(limit: int | None, **options: int) -> list[Program]:
    found = compilation(stack(LAYERS, stage=3, memory_limit_bytes=limit, **options))
    assert found.forward is not None
    assert found.backward is not None
    return [found.forward, found.backward]


def test_gathers_run_ahead_of_use() -> None:
    for program in _programs(None):
        order = [(mark.kind, mark.bucket) for _, mark in program.marked("gather_start", "gather_wait")]
        buckets = max(bucket for _, bucket in order)
        for bucket in range(1, buckets + 1):
            assert order.index(("gather_start", bucket)) < order.index(("gather_wait", bucket - 1))


def test_no_gather_queues_behind_a_reduction() -> None:
    """Transfers leave in the order of their launch, and only gathers keep the next block waiting."""
    kinds = [mark.kind for _, mark in _programs(None)[1].marked("gather_start", "gather_wait", "reduce_start")]
    assert ("reduce_start", "gather_start") not in itertools.pairwise(kinds)


def test_reductions_run_on_behind_the_next_launch() -> None:
    backward = _programs(None)[1]
    order = [(mark.kind, mark.bucket) for _, mark in backward.marked("reduce_start", "reduce_wait")]
    buckets = max(bucket for _, bucket in order)
    for bucket in range(buckets):
        assert order.index(("reduce_wait", bucket)) > order.index(("reduce_start", bucket + 1))


def test_the_smallest_limit_in_the_message_is_the_smallest_that_works() -> None:
    smallest = _smallest_limit()
    for program in _programs(smallest):
        assert memory.peak_bytes(program) <= smallest
    with pytest.raises(zerofx.MemoryLimitError, match=f"the smallest that works is {smallest} bytes"):
        stack(LAYERS, stage=3, memory_limit_bytes=smallest - 1)


class UsedFirstAndLast(nn.Module):
    """What stays whole from forward to backward stands beside the reduction of another, larger parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(400, 512))
        self.between = nn.Linear(512, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.between(torch.sin(x * self.scale)) + self.scale).sum()


def test_what_stays_never_makes_a_limit_too_small() -> None:
    x = torch.randn(400, 512)
    with pytest.raises(zerofx.MemoryLimitError) as caught:
        compiled(UsedFirstAndLast(), x, stage=3, memory_limit_bytes=1)
    smallest = caught.value.smallest_bytes
    model = compiled(UsedFirstAndLast(), x, stage=3, memory_limit_bytes=smallest)
    assert zerofx.schedule(model).peak_total_bytes <= smallest
    kept = next(record.plan.keep for record in compilation(model).records if record.name == "Regather")
    assert kept == ()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.7, 1.5])
def test_no_event_exceeds_the_limit(share: float) -> None:
    smallest = _smallest_limit()
    limit = int(smallest * (1 + share))
    peaks = [memory.peak_bytes(program) for program in _programs(limit)]
    assert max(peaks) <= limit


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_gathers_run_ahead_as_far_as_the_window_is_wide(ahead: int) -> None:
    program = _programs(None, prefetch_buckets=ahead)[0]
    largest = max(memory.bucket_bytes(program, mark) for _, mark in program.marked("gather_start"))
    whole = [event.whole_bytes for event in memory.live(program)]
    assert max(whole) <= (1 + ahead) * largest
    order = [(mark.kind, mark.bucket) for _, mark in program.marked("gather_start", "gather_wait")]
    for bucket in range(ahead, max(bucket for _, bucket in order) + 1):
        assert order.index(("gather_start", bucket)) < order.index(("gather_wait", bucket - ahead))


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_reductions_run_on_as_far_as_their_window_is_wide(in_flight: int) -> None:
    backward = _programs(None, reduces_in_flight=in_flight)[1]
    largest = max(memory.bucket_bytes(backward, mark) for _, mark in backward.marked("reduce_start"))
    buffers = [event.buffer_bytes for event in memory.live(backward) if event.node.meta["zerofx"].kind.startswith("reduce")]
    assert max(buffers) <= in_flight * largest
    order = [(mark.kind, mark.bucket) for _, mark in backward.marked("reduce_start", "reduce_wait")]
    for bucket in range(in_flight - 1, max(bucket for _, bucket in order) + 1):
        assert order.index(("reduce_start", bucket)) < order.index(("reduce_wait", bucket - in_flight + 1))


def test_a_window_of_nothing_overlaps_nothing() -> None:
    for program in _programs(None, prefetch_buckets=0, reduces_in_flight=0):
        kinds = [mark.kind for _, mark in program.marked("gather_start", "gather_wait", "reduce_start", "reduce_wait")]
        assert all(wait == start.replace("start", "wait") for start, wait in zip(kinds[::2], kinds[1::2], strict=True))


def test_the_error_names_the_event_and_the_remedy() -> None:
    with fake_ranks(2):
        model = zerofx.compile(TiedStack(1), stage=3, backend="aot_eager", memory_limit="1KiB")
        with pytest.raises(zerofx.MemoryLimitError) as caught:
            model(torch.arange(16).view(2, 8))
    text = str(caught.value)
    assert all(part in text for part in ("memory_limit=1024", "where:", "why:", "remedy: pass memory_limit="))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_limit_counts_what_stays_whole(stage: int) -> None:
    with pytest.raises(zerofx.MemoryLimitError) as raised:
        stack(2, stage=stage, memory_limit_bytes=1)
    smallest = raised.value.smallest_bytes
    schedule = zerofx.schedule(stack(2, stage=stage, memory_limit_bytes=smallest))
    assert schedule.peak_total_bytes <= smallest
    assert (smallest >= schedule.parameter_bytes) == (stage < 3)
    with pytest.raises(zerofx.MemoryLimitError):
        stack(2, stage=stage, memory_limit_bytes=smallest - 1)
