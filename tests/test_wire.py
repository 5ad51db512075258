"""Collectives by hand on round numbers, their order in bytes and bandwidth, and buckets by what really travels."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.programs import fake_ranks
from zerofx import collectives, wire
from zerofx.groups import Group
from zerofx.hardware import PRESETS, Link, hardware
from zerofx.machine import Hardware
from zerofx.params import Param, choose_dim
from zerofx.wire import collective_s, gather, reduction

US, GB = 1e-6, 1e9
# 8 ranks a node; 1 us and 100 GB/s within, 10 us and 50 GB/s between nodes.
ROUND = dataclasses.replace(
    hardware("h100"),
    launch_s=0.0,
    ranks_per_node=8,
    intra_node=Link(1 * US, ((1, 100 * GB),)),
    inter_node=Link(10 * US, ((1, 50 * GB),)),
)
ROUNDING = 1 + 1e-8  # rates that stand for equal times differ in their last digits
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@pytest.mark.parametrize(
    ("kind", "world_size", "seconds"),
    [
        # 8 GB in all: 4, 1 and 0.5 GB a message
        ("all_gather", 2, 1 * US + 4 / 100),
        ("all_gather", 8, 7 * (1 * US + 1 / 100)),
        ("all_gather", 16, 14 * US + 10 * US + 15 * 0.5 / 50),
        ("reduce_scatter", 2, 1 * US + 4 / 100),
        ("reduce_scatter", 8, 7 * (1 * US + 1 / 100)),
        ("reduce_scatter", 16, 14 * US + 10 * US + 15 * 0.5 / 50),
        ("all_reduce", 2, 2 * (1 * US + 4 / 100)),
        ("all_reduce", 8, 14 * (1 * US + 1 / 100)),
        ("all_reduce", 16, 2 * (14 * US + 10 * US + 15 * 0.5 / 50)),
        ("all_to_all", 2, 1 * US + 4 / 100),
        ("all_to_all", 8, 7 * (1 * US + 1 / 100)),
        # 8 ranks send 8 messages each out of the node, by 50 GB/s together
        ("all_to_all", 16, 7 * US + 8 * 10 * US + 8 * 8 * 0.5 / 50),
    ],
)
def test_collectives_by_hand(kind: str, world_size: int, seconds: float) -> None:
    assert collective_s(kind, 8 * GB, world_size, ROUND) == pytest.approx(seconds, rel=1e-9)


def test_a_small_all_reduce_goes_by_the_tree() -> None:
    # up and down: one hop between the two nodes, and a chain of 8 ranks; the ring would take 2 * 24 us
    assert collective_s("all_reduce", 50, 16, ROUND) == pytest.approx(2 * (10 * US + 7 * US + 50 / 50e9), rel=1e-9)


def test_a_fast_network_leaves_the_links_within_nodes_to_wait_for() -> None:
    fast = dataclasses.replace(ROUND, inter_node=Link(0.0, ((1, 400 * GB),)))
    assert collective_s("all_gather", 8 * GB, 16, fast) == pytest.approx(14 * US + 15 * 0.5 / 100, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_has_nothing_to_send(kind: str) -> None:
    assert collective_s(kind, GB, 1, hardware("h100")) == 0.0


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        collective_s("broadcast", GB, 2, ROUND)


@pytest.mark.parametrize(("name", "bus_gb_per_s"), [("a100", 235), ("h100", 370), ("h200", 370)])
def test_large_gathers_in_a_node_reach_the_published_bandwidth(name: str, bus_gb_per_s: float) -> None:
    size = 8 * 2**30
    # 1 %: the latency of seven steps
    assert size * 7 / 8 / collective_s("all_gather", size, 8, PRESETS[name]) == pytest.approx(bus_gb_per_s * GB, rel=0.01)


@st.composite
def links(draw: st.DrawFn) -> Link:
    """A link whose time rises with size, in bends."""
    sizes = sorted(draw(st.sets(st.integers(1, 10**9), min_size=1, max_size=4)))
    seconds = sorted(draw(st.lists(st.floats(1e-6, 10.0), min_size=len(sizes), max_size=len(sizes))))
    return Link(draw(st.floats(0, 1e-3)), tuple((size, size / time) for size, time in zip(sizes, seconds, strict=True)))


@given(st.sampled_from(KINDS), st.integers(2, 1024), links(), links(), st.integers(0, 10**10), st.integers(0, 10**10))
def test_more_bytes_never_take_less_time(kind: str, world_size: int, intra: Link, inter: Link, one: int, other: int) -> None:
    machine = dataclasses.replace(ROUND, intra_node=intra, inter_node=inter)
    less, more = (collective_s(kind, size, world_size, machine) for size in sorted((one, other)))
    assert less <= more * ROUNDING


@given(st.sampled_from(KINDS), st.integers(2, 1024), links(), st.integers(1, 10**10), st.floats(1.0, 100.0), st.booleans())
def test_more_bandwidth_never_takes_more_time(kind: str, world_size: int, link: Link, size: int, factor: float, within: bool) -> None:
    faster = dataclasses.replace(link, rates=tuple((size, rate * factor) for size, rate in link.rates))
    slow = dataclasses.replace(ROUND, intra_node=link, inter_node=link)
    fast = dataclasses.replace(slow, **{"intra_node" if within else "inter_node": faster})
    assert collective_s(kind, size, world_size, fast) <= collective_s(kind, size, world_size, slow) * ROUNDING


# ---------------------------------------------------------------- buckets

# In pieces on gloo, alone, packed, along dimension 1, replicated.
SHAPES = ((1501, 1500), (1100, 512), (1025, 512), (7, 3), (1, 12), ())


def bucket(world: int, dtype: torch.dtype = torch.float32) -> list[Param]:
    return [Param(i, (f"p{i}",), shape, torch.float32, dtype, world, choose_dim(shape, world)) for i, shape in enumerate(SHAPES)]


class Sent(TorchDispatchMode):
    """Write down each collective with the bytes of its whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        for kind in ("all_gather", "all_to_all", "all_reduce", "reduce_scatter"):
            if "_c10d_functional" in name and kind in name:
                self.messages.append((kind, (result if kind == "all_gather" else args[0]).nbytes))
        return result


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_bucket_costs_what_is_really_sent(backend: str, world: int, dtype: torch.dtype | None) -> None:
    collectives.import_functional()
    params = bucket(world, dtype or torch.float32)
    with fake_ranks(world):
        group = Group(torch.distributed.group.WORLD.group_name, world, 0, backend)
        with Sent() as gathers:
            started = collectives.gather_start([torch.ones(param.shard_shape) for param in params], params, group)
        collectives.gather_wait(started, params, group)
        grads = [torch.ones(param.shape, dtype=param.compute_dtype) for param in params]
        with Sent() as reductions:
            started = collectives.reduce_start(grads, params, group, dtype, group.size)
        collectives.reduce_wait(started, params, group, group.size)
    for sent, predicted in (
        (gathers, wire.messages(params, group, "all_gather", None)),
        (reductions, wire.messages(params, group, group.transport.reduce, dtype)),
    ):
        found = list(predicted)
        assert [kind for kind, _ in sent.messages] == [kind for kind, _ in found]
        for (_, real), (_, size) in zip(sent.messages, found, strict=True):
            assert size == pytest.approx(real, rel=1e-2)  # rows do not always divide by the pieces
        assert sum(size for _, size in found) == sum(size for _, size in sent.messages)


def test_gloo_sends_at_once_what_nccl_sends_in_turn() -> None:
    params = [Param(i, (f"p{i}",), (512, 512), torch.float32, torch.float32, 2, 0) for i in range(3)]
    size = params[0].whole_bytes
    gloo, nccl = Group("", 2, 0, "gloo"), Group("", 2, 0, "nccl")
    assert gather(params, gloo, ROUND).seconds == collective_s("all_gather", 3 * size, 2, ROUND)
    assert reduction(params, gloo, ROUND).seconds == collective_s("all_to_all", 3 * size, 2, ROUND)
    # one buffer for all three
    assert gather(params, nccl, ROUND).seconds == collective_s("all_gather", 3 * size, 2, ROUND)
    mixed = [params[0], dataclasses.replace(params[1], dtype=torch.bfloat16, compute_dtype=torch.bfloat16)]
    expected = collective_s("reduce_scatter", size, 2, ROUND) + collective_s("reduce_scatter", size / 2, 2, ROUND)
    assert reduction(mixed, nccl, ROUND).seconds == pytest.approx(expected)


def test_what_is_replicated_is_reduced_and_not_gathered() -> None:
    params, group = [Param(0, ("p",), (), torch.float32, torch.float32, 2, None)], Group("", 2, 0, "gloo")
    assert gather(params, group, ROUND).seconds == 0.0
    assert reduction(params, group, ROUND).seconds == collective_s("all_reduce", 4, 2, ROUND)


def test_a_narrow_dtype_halves_what_a_reduction_sends() -> None:
    params, group = bucket(2), Group("", 2, 0, "nccl")
    free = dataclasses.replace(ROUND, intra_node=Link(0.0, ((1, GB),)))
    # 0.1 %: the replicated scalar goes by the tree
    assert reduction(params, group, free, torch.bfloat16).seconds == pytest.approx(reduction(params, group, free).seconds / 2, rel=1e-3)


def _processor_s(params: list[Param], machine: Hardware, backend: str = "gloo") -> tuple[float, float]:
    group = Group("", 2, 0, backend)
    found = (gather(params, group, machine), reduction(params, group, machine))
    gathered, reduced = (transfer.copying_s + transfer.driving_s for transfer in found)
    return gathered, reduced


def test_the_processor_pays_for_copies_and_for_driving_the_transfer() -> None:
    machine = dataclasses.replace(ROUND, memory_bytes_per_s=GB)
    alone = [Param(0, ("p",), (512, 512), torch.float32, torch.float32, 2, 0)]
    mib = 2**20
    # it arrives in place; a reduction reads what both ranks sent and writes a shard
    assert _processor_s(alone, machine) == pytest.approx((0.0, 1.5 * mib / GB))
    # NCCL brings the sum of a shard, to be averaged
    assert _processor_s(alone, machine, "nccl") == pytest.approx((0.0, 1.0 * mib / GB))
    # two share a buffer: packed and unpacked, read and written
    two = [alone[0], dataclasses.replace(alone[0], index=1)]
    assert _processor_s(two, machine, "nccl") == pytest.approx((2 * (1 + 2) * mib / GB, (2 * 2 + 1 + 1) * mib / GB))
    driven = dataclasses.replace(machine, intra_node=Link(0.0, ((1, GB),), cpu_s_per_byte=1 / GB))
    assert _processor_s(alone, driven) == pytest.approx((0.5 * mib / GB, 2 * mib / GB))
