"""Sequences of operations in which equal layers follow each other, and the same sequences with more of these layers. Pure.

A line of four groups of layers (the first and the last may be special, the second and third must agree) says what a line of any
number of groups is: the third is repeated. The groups need not be cut where modules begin: any place does, if it is the same one in
each period.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

GROUPS = 4


class Irregular(Exception):
    """The layers of a line do not repeat, or in a way that is not understood."""


class Item(NamedTuple):
    """One operation, input or result.

    ``key`` is all that must be equal in equal layers. ``groups`` are the groups of layers that it names (by a parameter, or its module):
    they go up by one from a layer to the next. ``refs`` are the places of the items that it reads, or lies in.
    """

    key: Hashable
    groups: tuple[int, ...] = ()
    refs: tuple[int, ...] = ()


class Copy(NamedTuple):
    """A place in a longer line: the item that stands there, by how many groups it is shifted, and the places of what it reads."""

    item: int
    shift: int
    refs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """Inputs, the operations of a forward, those of its backward (layers in reverse), and results, in this order.

    Results are what the forward gives (as many as ``outputs``), then at most a gradient for each input, the last inputs left out.
    """

    items: Sequence[Item]
    inputs: int
    forward: int
    backward: int
    outputs: int

    def runs(self) -> tuple[tuple[int, int], ...]:
        """Return where each of the four kinds begins and ends."""
        first, second = self.inputs, self.inputs + self.forward
        third = second + self.backward
        return (0, first), (first, second), (second, third), (third, len(self.items))


class _Read(NamedTuple):
    """What the repeated group reads: an item, how many groups ahead of its own (None: one for all), and what its last copy reads."""

    item: int
    ahead: int | None
    last: int


class _Zone(Enum):
    """Where an item stands: with the first group, the second, the third (which repeats), or the last. What is no layer's is at an end."""

    HEAD = 0
    FIRST = 1
    SECOND = 2
    TAIL = 3


@dataclass(frozen=True, slots=True)
class _Run:
    """A kind of items: where it begins and ends, where its zones are cut, and the distance from an item to the same one a group later."""

    start: int
    stop: int
    cuts: tuple[int, ...] = ()
    step: int = 0

    @staticmethod
    def of(start: int, stop: int, cuts: tuple[int, ...], *, reverse: bool = False) -> _Run:
        """Cut a run into zones; the two in the middle must be equally long."""
        period = cuts[1] - cuts[0]
        if period <= 0 or cuts[2] - cuts[1] != period:
            raise Irregular("the middle layers differ in length")
        return _Run(start, stop, cuts, -period if reverse else period)

    def zone(self, place: int) -> _Zone:
        """Return the zone of a place; a backward goes through them in reverse."""
        number = bisect_right(self.cuts, place)
        return _Zone(3 - number if self.step < 0 else number)

    def added(self, place: int, shift: int, extra: int) -> int:
        """Return how many places of its run come in front of a shifted item beside those that do so already."""
        return shift * self.step if self.step >= 0 else (extra - shift) * -self.step


def lengthened(line: Line, extra: int) -> list[Copy]:
    """Return a line with so many more groups of layers, as copies of its items. Raises Irregular where it does not tell."""
    return _Lengthening(line, extra).copies()


def gives(line: Line, extra: int, whole: Line) -> bool:
    """Whether a line with so many more groups is another line. Raises Irregular where it does not tell."""
    copies = lengthened(line, extra)
    return len(copies) == len(whole.items) and all(
        line.items[copy.item].key == item.key
        and copy.refs == item.refs
        and tuple(group + copy.shift for group in line.items[copy.item].groups) == item.groups
        for copy, item in zip(copies, whole.items, strict=True)
    )


class _Lengthening:
    """Shifts are counted in groups: items of the first two stay, those of the last are shifted by all that come between."""

    def __init__(self, line: Line, extra: int) -> None:
        self._items, self._extra = line.items, extra
        self._runs = _runs(line)
        self._run_of = [run for run in self._runs for _ in range(run.start, run.stop)]
        self._zones = [run.zone(place) for run in self._runs for place in range(run.start, run.stop)]
        self._before: dict[int, int] = {}
        added = 0
        for run in self._runs:
            self._before[run.start] = added
            added += extra * abs(run.step)
        self._fixed = {_Zone.HEAD: 0, _Zone.FIRST: 0, _Zone.SECOND: extra, _Zone.TAIL: extra}

    def copies(self) -> list[Copy]:
        """Return all items in order, the third group once for each shift."""
        rules = self._rules()
        return [Copy(item, shift, tuple(self._refs(item, shift, rules))) for run in self._runs for item, shift in self._order(run)]

    def _order(self, run: _Run) -> Iterator[tuple[int, int]]:
        repeated = [place for place in range(run.start, run.stop) if self._zones[place] is _Zone.SECOND]
        shifts = range(self._extra + 1) if run.step >= 0 else range(self._extra, -1, -1)
        written = False
        for place in range(run.start, run.stop):
            if self._zones[place] is not _Zone.SECOND:
                yield place, self._fixed[self._zones[place]]
            elif not written:
                written = True
                for shift in shifts:
                    yield from ((item, shift) for item in repeated)

    def _rules(self) -> Mapping[int, Sequence[_Read]]:
        """Compare the two middle groups; return for each item of the second of them what it reads in each of its copies."""
        rules: dict[int, Sequence[_Read]] = {}
        for place, zone in enumerate(self._zones):
            if zone is not _Zone.FIRST:
                continue
            later = place + self._run_of[place].step
            here, there = self._items[place], self._items[later]
            if here.key != there.key or len(here.refs) != len(there.refs) or there.groups != tuple(group + 1 for group in here.groups):
                raise Irregular(f"layers differ: {here} and {there}")
            rules[later] = [self._rule(*refs) for refs in zip(here.refs, there.refs, strict=True)]
        return rules

    def _rule(self, here: int, there: int) -> _Read:
        """Return the rule for what the first of two middle groups reads here, and the second there."""
        zones = self._zones[here], self._zones[there]
        if here == there and zones[0] in (_Zone.HEAD, _Zone.TAIL):
            return _Read(here, None, here)
        if zones == (_Zone.SECOND, _Zone.TAIL):
            return _Read(here, 1, there)
        moves = there == here + self._run_of[here].step and self._run_of[here] is self._run_of[there]
        if zones == (_Zone.HEAD, _Zone.FIRST) or (moves and zones[0] in (_Zone.FIRST, _Zone.SECOND)):
            return _Read(there, 0, there)
        raise Irregular(f"layers read items {here} and {there}")

    def _refs(self, place: int, shift: int, rules: Mapping[int, Sequence[_Read]]) -> Iterator[int]:
        zone, refs = self._zones[place], self._items[place].refs
        if zone is _Zone.SECOND:
            for rule in rules[place]:
                if rule.ahead is None or (rule.ahead and shift == self._extra):
                    yield self._at(rule.last, self._fixed[self._zones[rule.last]])
                else:
                    yield self._at(rule.item, shift + rule.ahead)
            return
        # the first group in the middle lies next to the head, and the second next to the tail: which other is meant is not known
        unknown = {_Zone.HEAD: _Zone.SECOND, _Zone.TAIL: _Zone.FIRST}.get(zone)
        for ref in refs:
            if self._zones[ref] is unknown:
                raise Irregular(f"item {place} reads a layer in the middle: item {ref}")
            # the first group reads the second of its backward, as the nearest copy
            yield self._at(ref, 0 if zone is _Zone.FIRST and self._zones[ref] is _Zone.SECOND else self._fixed[self._zones[ref]])

    def _at(self, place: int, shift: int) -> int:
        run = self._run_of[place]
        return self._before[run.start] + place + run.added(place, shift, self._extra)


def _runs(line: Line) -> tuple[_Run, ...]:
    """Cut a line: inputs and forward where a group's parameter first stands and is read, the backward where its forward is."""
    inputs, forward, backward, results = line.runs()
    belongs = {place: item.groups[0] for place, item in enumerate(line.items[: line.inputs]) if item.groups}
    first = _first(range(*inputs), lambda place: [belongs[place]] if place in belongs else [])
    found = [_Run.of(*inputs, (first[1], first[2], first[3]))]
    read = _first(range(*forward), lambda place: [belongs[ref] for ref in line.items[place].refs if ref in belongs])
    found.append(_Run.of(*forward, (read[1], read[2], read[3])))
    if line.backward:
        starts = (read[0], *found[1].cuts)

        def groups(place: int) -> Iterator[int]:
            for ref in line.items[place].refs:
                if ref in belongs:
                    yield belongs[ref]
                elif starts[0] <= ref < forward[1]:
                    yield bisect_right(starts, ref) - 1

        back = _first(range(*backward), groups)
        found.append(_Run.of(*backward, (back[2], back[1], back[0]), reverse=True))
    else:
        found.append(_Run(*backward))
    grads = results[0] + line.outputs
    found.append(_Run.of(*results, tuple(grads + cut for cut in found[0].cuts)) if results[1] > grads else _Run(*results))
    return tuple(found)


def _first(places: Iterable[int], groups: Callable[[int], Iterable[int]]) -> dict[int, int]:
    """Return the first place of each group. Raises Irregular where a group has none."""
    found: dict[int, int] = {}
    for place in places:
        for group in groups(place):
            found.setdefault(group, place)
    if found.keys() != set(range(GROUPS)):
        raise Irregular("a layer takes no part")
    return found
