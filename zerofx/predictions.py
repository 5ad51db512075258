"""One optimizer step of lowered programs: its tasks in order, the bytes alive, and the bytes between steps. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerofx import formulas, liveness, memory, timeline
from zerofx.config import Config
from zerofx.liveness import Peak, Piece
from zerofx.machine import Hardware
from zerofx.params import Param
from zerofx.program import Program
from zerofx.simulate import Kind, Task, Timeline, simulate
from zerofx.steps import Step, steps_of
from zerofx.timeline import Moment
from zerofx.wholes import Arrivals


@dataclass(frozen=True, slots=True)
class Prediction:
    """An optimizer step on given hardware: its timeline, the bytes alive at each event, the peak of a graph, and the flops."""

    timeline: Timeline
    alive_bytes: tuple[int, ...]
    peak: Peak
    flops: int


def predict(
    forwards: Sequence[Program],
    backwards: Sequence[Program],
    buckets: Sequence[Sequence[int]],
    machine: Hardware,
    *,
    micro_batches: int = 1,
    optimizer_bytes: int = 0,
    streamed_bytes: int = 0,
    standing_bytes: int = 0,
) -> Prediction:
    """Predict the step that some lowered programs make; the ``standing_bytes`` are alive all the time, whatever runs.

    Its optimizer moves ``optimizer_bytes`` in memory and ``streamed_bytes`` between memory and disk, beside each other.
    """
    standing = liveness.storages(node for program in forwards for node in program.graph.nodes if node.op == "placeholder")
    before, after = _stacked(*([_Lowered.of(program, standing) for program in programs] for programs in (forwards, backwards)))
    streaming_s = streamed_bytes / machine.disk_bytes_per_s if streamed_bytes else 0.0
    update_s = max(optimizer_bytes / machine.memory_bytes_per_s, streaming_s)
    found = _moments(before, after, buckets, machine, micro_batches, update_s)
    parts = (*before, *after)
    return Prediction(
        simulate(moment.task for moment in found),
        tuple(standing_bytes + moment.alive_bytes for moment in found),
        max((part.peak for part in parts), key=lambda peak: peak.total_bytes),
        micro_batches * sum(step.kernel.flops for part in parts for step in part.steps if step.kernel),
    )


@dataclass(frozen=True, slots=True)
class _Lowered:
    """A lowered program, what its tape runs, its allocations, and the bytes that other graphs of the step keep meanwhile."""

    program: Program
    steps: list[Step]
    pieces: list[Piece]
    alive_bytes: list[int]
    beside_bytes: int = 0

    @staticmethod
    def of(program: Program, standing: frozenset[int]) -> _Lowered:
        steps = steps_of(program)
        pieces = liveness.pieces(program, steps, standing)
        return _Lowered(program, steps, pieces, liveness.alive_bytes(pieces, len(steps)))

    def moments(self, machine: Hardware) -> list[Moment]:
        alive = [self.beside_bytes + size for size in self.alive_bytes]
        return list(timeline.moments(self.program, self.steps, alive, machine))

    @property
    def peak(self) -> Peak:
        own = liveness.peak(self.pieces, len(self.steps))
        saved = own.by_kind.get(liveness.Kind.SAVED, 0) + self.beside_bytes
        return replace(own, total_bytes=own.total_bytes + self.beside_bytes, by_kind={**own.by_kind, liveness.Kind.SAVED: saved})


def _stacked(forwards: Sequence[_Lowered], backwards: Sequence[_Lowered]) -> tuple[list[_Lowered], list[_Lowered]]:
    """Put several graphs into one step: what each forward leaves stays until its backward, and these run in reverse."""
    beside = list(itertools.accumulate((part.alive_bytes[-1] for part in forwards), initial=0))
    before = [replace(part, beside_bytes=size) for part, size in zip(forwards, beside[:-1], strict=True)]
    after = [replace(part, beside_bytes=size) for part, size in zip(backwards, reversed(beside[: len(backwards)]), strict=True)]
    return before, after


def _moments(
    forwards: Sequence[_Lowered],
    backwards: Sequence[_Lowered],
    buckets: Sequence[Sequence[int]],
    machine: Hardware,
    micro_batches: int,
    update_s: float,
) -> list[Moment]:
    """Put an optimizer step together: refreshes with the first forward only, reductions of stages 0 and 1 with the last backward."""
    program = forwards[0].program
    forward = _waiting_once([moment for part in forwards for moment in part.moments(machine)])
    backward = [moment for part in backwards for moment in part.moments(machine)]
    first = _refreshing(program, buckets, forward, machine)
    fresh = [moment for moment in forward if not moment.task.collective.startswith("refresh")]
    reductions = (
        {moment.task.collective for moment in backward if moment.task.queue == timeline.QUEUE} if program.config.stage < 2 else set()
    )
    keeping = [moment for moment in backward if moment.task.collective not in reductions]
    found: list[Moment] = []
    for number in range(micro_batches):
        found += first if number == 0 else fresh
        found += backward if number == micro_batches - 1 else keeping
    return [*found, Moment(Task("optimizer", Kind.COMPUTE, update_s))]


@dataclass(frozen=True, slots=True)
class _Refresh:
    """A refresh on a timeline."""

    name: str
    found: list[Moment]

    def wait(self) -> None:
        self.found.append(Moment(Task(f"forward: wait for {self.name}", Kind.WAIT, collective=self.name)))


def _refreshing(program: Program, buckets: Sequence[Sequence[int]], forward: Sequence[Moment], machine: Hardware) -> list[Moment]:
    """Put the refreshes into a forward, as they are launched when it runs."""
    found: list[Moment] = []
    arrivals = Arrivals(memory.refreshing_bytes(buckets, program.params, program.group, program.config))
    tasks = list(timeline.refreshes(program.params, buckets, program.group, machine))
    for number, (task, members) in enumerate(zip(tasks, buckets, strict=True)):

        def launch(task: Task = task) -> _Refresh:
            found.append(Moment(task))
            return _Refresh(task.name, found)

        arrivals.add(number, memory.packed_bytes([program.params[index] for index in members], program.group), launch)
    numbers = {task.name: number for number, task in enumerate(tasks)}
    for moment in forward:
        if moment.task.collective in numbers:
            arrivals.wait(numbers[moment.task.collective])
        else:
            found.append(moment)
    arrivals.finish()
    return found


def _waiting_once(found: Sequence[Moment]) -> list[Moment]:
    """Drop the waits for a refresh behind the first: each of several graphs waits for what it reads, and only the first pays."""
    kept, waited = list[Moment](), set[str]()
    for moment in found:
        if moment.task.collective not in waited:
            kept.append(moment)
        if moment.task.collective.startswith("refresh"):
            waited.add(moment.task.collective)
    return kept


def states_bytes(params: Sequence[Param], config: Config, optimizer_states: int, micro_batches: int) -> dict[str, int]:
    """Return the bytes that stay in memory between steps, by kind; gradients stay between micro-batches."""
    on_disk = disk_bytes(params, config, optimizer_states)
    shards = memory.shards_bytes(params)
    wholes = sum(param.whole_bytes for param in params if param.has_copy)
    gradients = sum(param.whole_bytes for param in params) if config.stage == 1 else shards
    return {
        "shards": shards - on_disk["shards"],
        "whole copies": wholes,
        "optimizer states": optimizer_states * formulas.FP32_BYTES * sum(param.shard_numel for param in params)
        - on_disk["optimizer states"],
        "gathered gradients": gradients - on_disk["gradients"] if micro_batches > 1 else 0,
    }


def disk_bytes(params: Sequence[Param], config: Config, optimizer_states: int) -> dict[str, int]:
    """Return the bytes of a rank's states that lie on disk, by kind."""
    shards, gradients = memory.stored_shards(params, config), memory.stored_gradients(params, config)
    states = memory.stored_states(params, config)
    masters = {index for index in states if params[index].has_copy}
    return {
        "shards": memory.shards_bytes([params[index] for index in shards | masters]),
        "optimizer states": optimizer_states * formulas.FP32_BYTES * sum(params[index].shard_numel for index in states),
        "gradients": memory.shards_bytes([params[index] for index in gradients]),
    }


def streamed_bytes(on_disk: dict[str, int]) -> int:
    """Return what an optimizer moves between disk and memory: parameters and states in and out, gradients in."""
    return 2 * (on_disk["shards"] + on_disk["optimizer states"]) + on_disk["gradients"]


def update_bytes(params: Sequence[Param], optimizer_states: int) -> int:
    """Return what an optimizer moves: parameter and states in and out, gradient in."""
    return (3 + 2 * optimizer_states) * formulas.FP32_BYTES * sum(param.shard_numel for param in params)
