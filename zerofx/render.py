"""The schedule as people read it: one line an event, equal layers folded."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch.fx import Node

from zerofx import memory, pictures
from zerofx.config import Config
from zerofx.cost import compute_s
from zerofx.errors import ConfigError
from zerofx.events import Event, fold
from zerofx.groups import Group
from zerofx.machine import Hardware
from zerofx.origins import module_of
from zerofx.params import Param, block_of
from zerofx.program import Mark, Phase, Program, arguments, is_view
from zerofx.simulate import Timeline
from zerofx.work import bytes_of, flops

_COLLECTIVES = {"gather": "all_gather", "reduce": "reduce_scatter", "refresh": "all_gather"}
# Activations, which each backward needs: gathered, or written and read.
RESTORE, DISK = "restore", "disk"
_MIB = 2**20


class Tally:
    """What each rank sends in a step, in bytes and in buckets, by kind of collective.

    ``refresh_bytes`` of what is gathered move only when an optimizer changed the shards. ``restore`` are gathers of activations;
    ``disk`` are bytes of activations that it writes, and reads again.
    """

    def __init__(self, group: Group, config: Config) -> None:
        self._group, self._config = group, config
        self.traffic_bytes = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0)
        self.collective_counts = dict.fromkeys(self.traffic_bytes, 0)
        self.refresh_bytes = 0

    def add_restore(self, value_bytes: int, group: Group | None) -> None:
        """Count one activation of so many bytes that is gathered from a group, or was in a file."""
        kind, size = (DISK, value_bytes) if group is None else (RESTORE, value_bytes * (group.size - 1) // group.size)
        self.traffic_bytes[kind] = self.traffic_bytes.get(kind, 0) + size
        self.collective_counts[kind] = self.collective_counts.get(kind, 0) + 1

    def add(self, kind: str, params: Sequence[Param]) -> None:
        """Count one bucket: a gather, a refresh or a reduce."""
        ranks = self._group.size
        sharded = memory.moved_bytes(kind, [param for param in params if param.dim is not None], self._config)
        replicated = memory.moved_bytes(kind, [param for param in params if param.dim is None], self._config)
        if sharded:
            self.traffic_bytes[_COLLECTIVES[kind]] += sharded * (ranks - 1) // ranks
            self.refresh_bytes += sharded * (ranks - 1) // ranks if kind == "refresh" else 0
            self.collective_counts[_COLLECTIVES[kind]] += 1
        if replicated and kind == "reduce" and ranks > 1:
            self.traffic_bytes["all_reduce"] += 2 * replicated * (ranks - 1) // ranks
            self.collective_counts["all_reduce"] += 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one step of a model runs, in order, on each rank. Equal on all ranks; ``str`` is the printed form.

    Compiled for known hardware, it also has the predicted ``timeline`` of that step and the bytes alive at each of its events.
    """

    events: tuple[Event, ...]
    stage: int
    world_size: int
    backend: str
    parameter_count: int
    parameter_bytes: int
    peak_whole_bytes: int
    peak_total_bytes: int
    memory_limit_bytes: int | None
    traffic_bytes: dict[str, int]
    collective_counts: dict[str, int]
    refresh_bytes: int = 0
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    alive_bytes: tuple[int, ...] = field(default=(), repr=False, compare=False)

    @staticmethod
    def of(
        programs: Sequence[Program], params: tuple[Param, ...], group: Group, config: Config, refresh_buckets: tuple[tuple[int, ...], ...]
    ) -> Schedule:
        """Read the schedule off scheduled programs, in the order in which they run."""
        events: list[Event] = []
        tally = Tally(group, config)
        for members in refresh_buckets:
            tally.add("refresh", [params[index] for index in members])
        whole = total = max(memory.standing_bytes(program) for program in programs)
        for program in programs:
            events.extend(_events(program))
            for _, mark in program.marked("gather_start", "reduce_start"):
                tally.add(mark.kind.removesuffix("_start"), [program.params[index] for index in mark.params])
            for node, mark in program.marked("restore_start"):
                tally.add_restore(bytes_of(node), program.stashed[mark.bucket].group)
            for state in memory.live(program):
                whole, total = max(whole, state.whole_bytes), max(total, state.total_bytes)
        return Schedule.of_step(events, tally, whole, total, params, group, config)

    @staticmethod
    def of_step(
        events: Sequence[Event],
        tally: Tally,
        peak_whole_bytes: int,
        peak_total_bytes: int,
        params: tuple[Param, ...],
        group: Group,
        config: Config,
    ) -> Schedule:
        """Put the events of a step beside the facts of its model."""
        return Schedule(
            tuple(events),
            config.stage,
            group.size,
            config.backend,
            sum(math.prod(param.shape) for param in params),
            sum(math.prod(param.shape) * param.compute_dtype.itemsize for param in params),
            peak_whole_bytes,
            peak_total_bytes,
            config.memory_limit_bytes,
            tally.traffic_bytes,
            tally.collective_counts,
            tally.refresh_bytes,
        )

    def __str__(self) -> str:
        return "\n".join(self._lines(folded=True))

    def _lines(self, *, folded: bool) -> Iterator[str]:
        limit = "" if self.memory_limit_bytes is None else f", limit {_mib(self.memory_limit_bytes)} MiB"
        yield (
            f"ZeRO stage {self.stage}, {self.world_size} ranks, {self.backend}: "
            f"{self.parameter_count:,} parameters, {_mib(self.parameter_bytes)} MiB whole{limit}"
        )
        yield ""
        phase = ""
        for event, repeats, period in fold(self.events) if folded else ((event, 1, 1) for event in self.events):
            if event is None:
                yield f"  ... {repeats} more times the {period} lines above, one layer on each time"
                continue
            if event.phase != phase:
                phase = event.phase
                yield f"{phase:<50}{'MiB':>9}  {'whole MiB':>9}  {'why here':<24}  in flight"
            yield _line(event)
        yield ""
        yield from self._totals()

    def _totals(self) -> Iterator[str]:
        for kind, count in self.collective_counts.items():
            if count:
                unit = "activations" if kind in (RESTORE, DISK) else "buckets"
                moved = "written and read" if kind == DISK else "sent"
                yield f"{kind}: {count} {unit}, {_mib(self.traffic_bytes[kind])} MiB {moved} by each rank per step"
        yield f"peak of whole parameters: {_mib(self.peak_whole_bytes)} MiB; with communication buffers: {_mib(self.peak_total_bytes)} MiB"

    def diff(self, other: Schedule) -> str:
        """Return a unified diff of the printed schedules, every event shown: what this one does, and what the other does instead."""
        here, there = (f"{schedule.backend}, stage {schedule.stage}" for schedule in (self, other))
        lines = difflib.unified_diff([*self._lines(folded=False)], [*other._lines(folded=False)], here, there, n=2, lineterm="")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return all fields and events as JSON text, but for the timeline."""
        return json.dumps(asdict(replace(self, timeline=None, alive_bytes=())), indent=1)

    def to_perfetto(self, path: str | Path) -> None:
        """Write the predicted step as a trace for Perfetto. Raises ConfigError where no hardware was given."""
        Path(path).write_text(pictures.perfetto(self._times(), self.alive_bytes))

    def to_svg(self, path: str | Path) -> None:
        """Draw the predicted step, with the bytes alive under it. Raises ConfigError where no hardware was given."""
        title = f"stage {self.stage}, {self.world_size} ranks, {self.backend}"
        Path(path).write_text(pictures.svg(self._times(), self.alive_bytes, title))

    def _times(self) -> Timeline:
        if self.timeline is None:
            raise ConfigError(
                "this schedule has no times to draw",
                where="Schedule.to_perfetto or Schedule.to_svg",
                why="a step takes its time on some hardware, and none was given",
                remedy='compile with zerofx.compile(model, hardware="this_machine") or a preset, or draw a zerofx.plan',
            )
        return self.timeline


def _line(event: Event) -> str:
    head = f"{event.kind:<8} {event.what}"
    subject = f"{head:<19} {event.label}"
    moved = _mib(event.moved_bytes) if event.moved_bytes else ""
    return f"  {subject:<48}{moved:>9}  {_mib(event.whole_bytes):>9}  {event.why:<24}  {' '.join(event.in_flight)}".rstrip()


def _mib(size: int) -> str:
    return f"{size / _MIB:.2f}"


def _events(program: Program) -> Iterator[Event]:
    """Walk a scheduled program: launches and waits are events; so is the compute between two of them, and what it releases."""
    phase = program.phase.value
    alive = {state.node: state.whole_bytes for state in memory.live(program)}
    whole = memory.kept_bytes(program.params) + sum(
        program.params[mark.params[0]].whole_bytes for node, mark in program.marked("gather") if node.op == "placeholder"
    )
    in_flight: list[str] = []
    again: dict[str, list[Node]] = {}  # computed a second time, by block
    compute: dict[str, None] = {}
    released: list[Node] = []
    kept: list[Node] = []  # gradients that go to disk

    def flush() -> Iterator[Event]:
        if kept:
            members = tuple(index for node in kept for index in node.meta["zerofx"].params)
            nbytes = memory.shards_bytes([program.params[index] for index in members])
            yield Event(phase, "store", "", _label(program, Mark("store", members)), nbytes, tuple(in_flight), whole, kept[0].name)
        for block, nodes in again.items():
            yield Event(phase, "recompute", "", block, 0, tuple(in_flight), whole, why=_cost(nodes, program.config.machine))
        if compute:
            yield Event(phase, "compute", "", joined(compute), 0, tuple(in_flight), whole)
        if released:
            members = tuple(index for node in released for index in node.meta["zerofx"].params)
            label = _label(program, Mark("release", members))
            yield Event(phase, "release", "", label, 0, tuple(in_flight), alive[released[-1]], released[0].name)

    for node in program.graph.nodes:
        mark = node.meta.get("zerofx")
        if mark is not None and mark.kind == "evict":
            continue
        if mark is None or mark.kind not in _KINDS:
            if node.op == "call_function" and not _is_item(node) and not is_view(node):
                block = block_of(f"{module_of(node)}.x") or "(model)"
                if mark is not None and mark.kind == "recompute" and program.phase is Phase.BACKWARD:
                    again.setdefault(block, []).append(node)
                else:
                    compute[block] = None
            continue
        if mark.kind in ("release", "store"):
            (released if mark.kind == "release" else kept).append(node)
            continue
        yield from flush()
        whole = alive[released[-1]] if released else whole
        again, compute, released, kept = {}, {}, [], []
        what = f"{_form(program, mark)} {mark.bucket}"
        starts = _starts(mark)
        if starts:
            in_flight.append(what)
        elif what in in_flight:
            in_flight.remove(what)
        whole = alive.get(node, whole)
        kind = "launch" if starts else "keep" if mark.kind == "stash" else "wait"
        yield Event(
            phase, kind, what, _label(program, mark), _moved_bytes(program, node, mark), tuple(in_flight), whole, node.name, mark.why
        )
    yield from flush()


_STASHING = ("stash", "restore_start", "restore_wait")
_STORING = ("read_ahead", "load", "store")
_KINDS = ("gather_start", "gather_wait", "release", "reduce_start", "reduce_wait", "refresh_wait", *_STASHING, *_STORING)


def _moved_bytes(program: Program, node: Node, mark: Mark) -> int:
    """Return the bytes of what a launch moves, and of what is kept of a stashed value."""
    if mark.kind in ("stash", "restore_start"):
        in_file = program.stashed[mark.bucket].group is None
        return bytes_of(arguments(node)[0] if in_file and mark.kind == "stash" else node)
    params = [program.params[index] for index in mark.params]
    if mark.kind == "read_ahead":
        return memory.shards_bytes(params)
    return memory.moved_bytes(mark.kind, params, program.config) if _starts(mark) else 0


def _form(program: Program, mark: Mark) -> str:
    """Name what an event is about: a collective, what is loaded, or the form of what is kept."""
    if mark.kind == "stash":
        return "file" if program.stashed[mark.bucket].group is None else "part"
    return "load" if mark.kind == "read_ahead" else mark.kind.partition("_")[0]


def _starts(mark: Mark) -> bool:
    return mark.kind.endswith("_start") or mark.kind == "read_ahead"


def _cost(nodes: Sequence[Node], hardware: Hardware | None) -> str:
    """Say what computing some nodes again costs: floating-point operations, and seconds where the hardware is known."""
    count = float(sum(flops(node) for node in nodes))
    unit = next((unit for unit, size in _UNITS.items() if count >= size), "FLOP")
    seconds = "" if hardware is None else f", {1e3 * compute_s(nodes, hardware):.3g} ms"
    return f"{count / _UNITS.get(unit, 1):.3g} {unit}{seconds}"


_UNITS = {"TFLOP": 1e12, "GFLOP": 1e9, "MFLOP": 1e6, "kFLOP": 1e3}


def _is_item(node: Node) -> bool:
    source = node.args[0] if node.args else None
    return isinstance(source, Node) and getattr(source.meta.get("zerofx"), "kind", "") in ("gather_wait", "reduce_wait")


def label_of(params: Sequence[Param]) -> str:
    """Name a bucket by its blocks, or by its parameter where it has one."""
    if len(params) == 1:
        return params[0].name
    return joined(dict.fromkeys(block_of(param.name) or "(model)" for param in params))


def _label(program: Program, mark: Mark) -> str:
    if mark.kind in _STASHING:
        return program.stashed[mark.bucket].module
    return label_of([program.params[index] for index in mark.params])


def joined(blocks: Iterable[str]) -> str:
    """Join names; a run of more than two neighbouring layers becomes ``h.0 .. h.11``."""
    runs: list[list[str]] = []
    for name in blocks:
        if runs and _adjoins(runs[-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(f"{run[0]} .. {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _adjoins(run: list[str], name: str) -> bool:
    stem, _, number = name.rpartition(".")
    last_stem, _, last = run[-1].rpartition(".")
    if stem != last_stem or not number.isdigit() or not last.isdigit():
        return False
    step = int(number) - int(last)
    return abs(step) == 1 and (len(run) == 1 or step == int(last) - int(run[-2].rpartition(".")[2]))
