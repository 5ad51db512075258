"""A program as a problem of placement: its bytes are those of the program, and figures order it."""

import dataclasses
import functools
import itertools

import pytest
import torch

from tests.programs import TiedStack, compilation, stack
from zerofx import memory, placement, planner
from zerofx.compilation import Compilation
from zerofx.config import Config
from zerofx.hardware import Hardware, Link, hardware
from zerofx.passes import STAGES
from zerofx.program import Level, Phase, Program
from zerofx.slots import slots_of


def _slow(bytes_per_s: float) -> Hardware:
    """A processor of round numbers, and a link that takes nothing from it."""
    return dataclasses.replace(hardware("h100"), intra_node=Link(0.0, ((1, bytes_per_s),)), inter_node=Link(0.0, ((1, bytes_per_s),)))


def _programs(found: Compilation) -> list[Program]:
    return [program for program in (found.forward, found.backward) if program is not None]


@functools.cache
def _planned(layers: int, machine: Hardware | None, **settings: object) -> list[Program]:
    config = Config(backend="aot_eager", hardware=machine, **settings)  # type: ignore[arg-type]
    return list(planner.trace(TiedStack(layers), (torch.arange(32).view(4, 8),), None, config, 2, "nccl").scheduled)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bytes_along_the_slots_are_those_of_the_program(stage: int) -> None:
    """What placement counts is what the scheduled program holds, so that its limit is the program's."""
    for program, bytes_per_s in itertools.product(_programs(compilation(stack(4, stage=stage))), (None, 1e5, 1e7, 1e9)):
        bare, machine = _unscheduled(program), None if bytes_per_s is None else _slow(bytes_per_s)
        smallest = memory.peak_bytes(bare)
        for limit in (None, smallest, int(1.2 * smallest), int(1.6 * smallest), 3 * smallest):
            config = dataclasses.replace(program.config, memory_limit_bytes=limit, hardware=machine)
            again = dataclasses.replace(bare, config=config)
            scheduled = STAGES[stage].run(again, [], Level.SCHEDULED)
            assert limit is None or memory.peak_bytes(scheduled) <= limit
            events = memory.live(scheduled)
            if machine is None and events:
                counted = placement.earliest(slots_of(again).problem).alive_bytes
                assert max(counted) == max(event.total_bytes for event in events)


def _unscheduled(program: Program) -> Program:
    """Put launches and waits of a scheduled program back to where they are used."""
    copied = program.copy()
    for start, mark in list(copied.marked("gather_start", "reduce_start")):
        (wait,) = start.users
        if mark.kind == "gather_start":
            wait.prepend(start)
        else:
            for node in reversed([wait, *wait.users]):
                start.append(node)
    return dataclasses.replace(copied, level=Level.BUCKETED)


def test_no_wait_for_a_reduction_cuts_a_compute_region() -> None:
    """In front of each such wait, or behind it, other communication stands: in front of a launch that packs, none would."""
    for bytes_per_s in (1e5, 1e8):
        for program in _planned(4, _slow(bytes_per_s)):
            nodes = [node for node in program.graph.nodes if node.op not in ("placeholder", "get_attr")]
            for here, node in enumerate(nodes):
                mark = node.meta.get("zerofx")
                if mark is not None and mark.kind == "reduce_wait":
                    items = set(node.users)
                    beside = (nodes[here - 1], next(other for other in nodes[here + 1 :] if other not in items))
                    assert any(_communicates(other) for other in beside), f"{node.name} stands between {beside}"


def _communicates(node: torch.fx.Node) -> bool:
    mark = node.meta.get("zerofx")
    source = node.args[0] if node.args else None
    item = isinstance(source, torch.fx.Node) and source.meta.get("zerofx") is not None and source.meta["zerofx"].kind == "reduce_wait"
    return node.op == "output" or item or (mark is not None and mark.kind.partition("_")[0] in ("gather", "reduce"))


def test_every_launch_and_wait_says_why_it_stands_there() -> None:
    for machine in (None, _slow(1e6)):
        for program in _planned(3, machine):
            for _, mark in program.marked("gather_start", "reduce_start", "reduce_wait"):
                assert mark.why, mark
    forward, backward = _planned(3, None)
    assert next(mark.why for _, mark in forward.marked("gather_start")) == "no earlier work"
    assert {mark.why for _, mark in backward.marked("reduce_start")} == {"ready here"}


def test_a_full_memory_is_named_with_the_event_that_fills_it() -> None:
    smallest = max(memory.peak_bytes(program) for program in _planned(4, None, prefetch_buckets=0, reduces_in_flight=0))
    whys = [mark.why for program in _planned(4, None, memory_limit_bytes=smallest) for _, mark in program.marked("gather_start")]
    assert any(why.startswith("memory limit at ") for why in whys), whys


def test_memory_to_spare_keeps_what_the_backward_would_wait_for() -> None:
    """On a slow link, a limit above the window is spent on parameters that stay whole; on a fast one there is nothing to save."""

    def gathered_bytes(machine: Hardware, limit: int) -> int:
        backward = next(program for program in _planned(5, machine, memory_limit_bytes=limit) if program.phase is Phase.BACKWARD)
        assert memory.peak_bytes(backward) <= limit
        return sum(memory.bucket_bytes(backward, mark) for _, mark in backward.marked("gather_start"))

    tight, wide = 600_000, 16 * 2**20
    instant = dataclasses.replace(_slow(1e15), launch_s=1.0)
    assert gathered_bytes(_slow(1e6), wide) == 0
    assert gathered_bytes(_slow(1e6), tight) > 0
    assert gathered_bytes(instant, wide) > 0
