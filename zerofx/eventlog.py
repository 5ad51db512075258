"""Write down what an eager step does, as the events that a compiled schedule prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from zerofx import memory
from zerofx.config import Config
from zerofx.events import Event
from zerofx.groups import Group
from zerofx.params import Param, block_of
from zerofx.render import Schedule, Tally, joined, label_of


@dataclass(slots=True)
class Step:
    """A forward and the backwards behind it."""

    tally: Tally
    peak_whole_bytes: int = 0
    peak_total_bytes: int = 0
    events: list[Event] = field(default_factory=list)
    trained: bool = False


class EventLog:
    """The events of the running step and of the last trained one."""

    def __init__(self, config: Config, group: Group, params: tuple[Param, ...]) -> None:
        self._config, self._group, self._params = config, group, params
        self._labels: dict[tuple[int, ...], str] = {}
        self._in_flight: tuple[str, ...] = ()
        self._whole_bytes = memory.kept_bytes(params)
        self._buffer_bytes = 0
        self._blocks: dict[str, None] = {}
        self._step = Step(Tally(group, config))
        self._last: Step | None = None

    def begin_forward(self) -> None:
        """Start a step."""
        if self._step.events and (self._step.trained or self._last is None or not self._last.trained):
            self._last = self._step
        self._blocks = {}
        self._step = Step(Tally(self._group, self._config), self._whole_bytes, self._whole_bytes + self._buffer_bytes)

    def begin_backward(self) -> None:
        """Start a backward of the step."""
        self._step.trained = True
        self._blocks = {}

    def launch(self, what: str, members: tuple[int, ...], *, whole_bytes: int = 0, buffer_bytes: int = 0) -> None:
        """Note the launch of a collective, by kind and number, with the bytes that live from now on."""
        params = [self._params[index] for index in members]
        self._step.tally.add(what.partition(" ")[0], params)
        self._in_flight += (what,)
        self._grow(whole_bytes, buffer_bytes)
        self._add("launch", what, self._label(members), memory.moved_bytes(what, params, self._config))

    def wait(self, what: str, members: tuple[int, ...], *, packed_bytes: int = 0, buffer_bytes: int = 0) -> None:
        """Note the end of a collective, with what it unpacked for a moment, and the buffers that go."""
        self._in_flight = tuple(other for other in self._in_flight if other != what)
        self._grow(0, packed_bytes)
        self._grow(0, -packed_bytes - buffer_bytes)
        self._add("wait", what, self._label(members))

    def release(self, members: Sequence[int], whole_bytes: int) -> None:
        """Note that whole parameters were freed."""
        if members:
            self._grow(-whole_bytes, 0)
            self._add("release", "", self._label(tuple(members)))

    def compute(self, module: str, *, again: bool = False) -> None:
        """Note that a submodule computes, or does so again; what computes between two other events is one event."""
        kind, block = "recompute" if again else "compute", block_of(f"{module}.x") or "(model)"
        begins = not self._blocks or self._step.events[-1].kind != kind
        if begins:
            self._blocks = {}
        if block in self._blocks:
            return
        self._blocks[block] = None
        if begins:
            self._step.events.append(self._event(kind, "", block, 0))
        else:
            self._step.events[-1] = replace(self._step.events[-1], label=joined(self._blocks))

    def schedule(self) -> Schedule | None:
        """Return the last trained step, or the last one where none was trained; None before the first."""
        step = self._last if self._last is not None and self._last.trained and not self._step.trained else self._step
        if not step.events:
            return None
        return Schedule.of_step(
            step.events, step.tally, step.peak_whole_bytes, step.peak_total_bytes, self._params, self._group, self._config
        )

    def _grow(self, whole_bytes: int, buffer_bytes: int) -> None:
        self._whole_bytes += whole_bytes
        self._buffer_bytes += buffer_bytes
        self._step.peak_whole_bytes = max(self._step.peak_whole_bytes, self._whole_bytes)
        self._step.peak_total_bytes = max(self._step.peak_total_bytes, self._whole_bytes + self._buffer_bytes)

    def _add(self, kind: str, what: str, label: str, moved_bytes: int = 0) -> None:
        self._blocks = {}
        self._step.events.append(self._event(kind, what, label, moved_bytes))

    def _event(self, kind: str, what: str, label: str, moved_bytes: int) -> Event:
        phase = "backward" if self._step.trained else "forward"
        return Event(phase, kind, what, label, moved_bytes, self._in_flight, self._whole_bytes)

    def _label(self, members: tuple[int, ...]) -> str:
        if members not in self._labels:
            self._labels[members] = label_of([self._params[index] for index in members])
        return self._labels[members]
