"""One broken program for each invariant: each must be refused, with its own message."""

import operator
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.fx import Node

from tests.programs import compilation, stack
from zerofx import ops
from zerofx.errors import VerifyError
from zerofx.passes import STAGES
from zerofx.pipeline import Record
from zerofx.program import Level, Mark, Phase, Program
from zerofx.verify import INVARIANTS, verify


@pytest.fixture(scope="module")
def scheduled() -> dict[Phase, Program]:
    found = compilation(stack(3, stage=3))
    assert found.forward is not None
    assert found.backward is not None
    return {Phase.FORWARD: found.forward, Phase.BACKWARD: found.backward}


def _first(program: Program, kind: str) -> Node:
    return next(node for node, _ in program.marked(kind))


def _release_twice(program: Program) -> None:
    release = _first(program, "release")
    with program.graph.inserting_after(release):
        program.graph.call_function(ops.release, release.args).meta["zerofx"] = release.meta["zerofx"]


def _never_release(program: Program) -> None:
    program.graph.erase_node(_first(program, "release"))


def _use_after_release(program: Program) -> None:
    release = _first(program, "release")
    with program.graph.inserting_after(release):
        program.graph.call_function(torch.ops.aten.relu.default, release.args)


def _start_without_wait(program: Program) -> None:
    start = _first(program, "gather_start")
    with program.graph.inserting_after(start):
        extra = program.graph.call_function(ops.gather_start, start.args)
    extra.meta["zerofx"] = start.meta["zerofx"]


def _swap_starts(program: Program) -> None:
    first, second = [node for node, _ in program.marked("gather_start")][:2]
    first.meta["zerofx"], second.meta["zerofx"] = second.meta["zerofx"], first.meta["zerofx"]


def _reduce_twice(program: Program) -> None:
    first, second = [node for node, _ in program.marked("reduce_start")][:2]
    second.meta["zerofx"] = Mark("reduce_start", first.meta["zerofx"].params, second.meta["zerofx"].bucket)


def _leave_a_marker(program: Program) -> None:
    shard = next(node for node in program.graph.nodes if node.op == "placeholder")
    with program.graph.inserting_after(shard):
        program.graph.call_function(ops.REDUCE_GRAD, (shard, 0, [2], 0, torch.float32, 2, ""))


@pytest.mark.parametrize(
    ("phase", "mutate", "message"),
    [
        (Phase.FORWARD, _release_twice, "is released 2 times"),
        (Phase.FORWARD, _never_release, "is released 0 times"),
        (Phase.FORWARD, _use_after_release, "after its release"),
        (Phase.FORWARD, _start_without_wait, "is waited for 0 times"),
        (Phase.FORWARD, _swap_starts, "the gather_start order is"),
        (Phase.BACKWARD, _reduce_twice, "is reduced 2 times"),
        (Phase.BACKWARD, _leave_a_marker, "a marker op is left"),
    ],
)
def test_a_broken_program_is_refused(
    scheduled: dict[Phase, Program], phase: Phase, mutate: Callable[[Program], None], message: str
) -> None:
    program = scheduled[phase].copy()
    verify(program, after="nothing")
    mutate(program)
    with pytest.raises(VerifyError, match=message):
        verify(program, after="a mutation")


def test_a_limit_below_the_program_is_refused(scheduled: dict[Phase, Program]) -> None:
    program = scheduled[Phase.FORWARD]
    limited = replace(program, config=replace(program.config, memory_limit_bytes=1))
    with pytest.raises(VerifyError, match="the limit is 1"):
        verify(limited, after="a mutation")


def test_an_event_left_after_lowering_is_refused(scheduled: dict[Phase, Program]) -> None:
    with pytest.raises(VerifyError, match="an event is left"):
        verify(scheduled[Phase.FORWARD].at(Level.LOWERED), after="a mutation")


def test_two_unshards_of_one_parameter_are_refused(scheduled: dict[Phase, Program]) -> None:
    graph = torch.fx.Graph()
    shard = graph.placeholder("shard")
    reads = [graph.call_function(ops.UNSHARD, (shard, None, 0, [4], 0, torch.float32, 2, "")) for _ in range(2)]
    graph.output((graph.call_function(operator.add, tuple(reads)),))
    base = scheduled[Phase.FORWARD]
    traced = replace(base, module=torch.fx.GraphModule({}, graph), phase=Phase.JOINT, level=Level.UNSHARDED)
    with pytest.raises(VerifyError, match="is unsharded 2 times"):
        verify(traced, after="a mutation")


def test_a_gather_without_a_tag_is_refused(scheduled: dict[Phase, Program]) -> None:
    graph = torch.fx.Graph()
    read = graph.call_function(ops.UNSHARD, (graph.placeholder("shard"), None, 0, [4], 0, torch.float32, 2, ""))
    read.meta["zerofx"] = Mark("gather", (0,))
    graph.output((read,))
    traced = replace(scheduled[Phase.FORWARD], module=torch.fx.GraphModule({}, graph), phase=Phase.JOINT, level=Level.RECOMPUTED)
    with pytest.raises(VerifyError, match="has no recompute tag"):
        verify(traced, after="a mutation")


def test_every_invariant_has_a_mutation_here() -> None:
    checks = {check.__name__ for rows in INVARIANTS.values() for check, _ in rows}
    tried = {
        "one_unshard_each", "gathers_tagged", "released_once", "reduced_once", "no_markers", "waited_once", "order_kept", "within_limit",
        "no_events",
    }  # fmt: skip
    assert checks == tried


def test_passes_leave_their_input_alone(scheduled: dict[Phase, Program]) -> None:
    program = scheduled[Phase.BACKWARD]
    before = str(program.graph)
    records: list[Record] = []
    STAGES[3].run(program, records, Level.LOWERED)
    assert [record.name for record in records] == ["Lower"]
    assert str(program.graph) == before
