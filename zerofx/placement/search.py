"""Search for launch slots: walk the line once and keep, at each slot, the few partial schedules that promise most. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import NamedTuple

from zerofx.placement.bounds import Bounds
from zerofx.placement.problem import Collective, Launch, Line
from zerofx.placement.room import Room

# Prefetch that fills the limit may starve reductions that come later, which no bound foresees. So schedules whose prefetch leaves
# them these shares of the room are kept beside the others, until it shows.
_SHARES = (0.25, 0.5, 0.75)


class _Trail(NamedTuple):
    """The last launch, and those before it."""

    before: _Trail | None
    kind: Collective
    slot: int


class _State(NamedTuple):
    """A partial schedule: the line is at ``now``, the queue free at ``free``, so many gathers and reductions are launched.

    ``whole_ends`` are the ends of the last gathers, those behind ``now``, and ``reduce_ends`` of the reductions not yet waited for.
    No schedule that begins so ends before ``bound``. Times in picoseconds.
    """

    bound: int = 0
    now: int = 0
    free: int = 0
    gathers: int = 0
    reductions: int = 0
    whole_ends: tuple[int, ...] = ()
    reduce_ends: tuple[int, ...] = ()
    trail: _Trail | None = None

    def dominates(self, other: _State) -> bool:
        """Whether all is at least as early; both have launched and waited for the same."""
        return (
            self.now <= other.now
            and self.free <= other.free
            and len(self.whole_ends) <= len(other.whole_ends)
            and all(map(int.__le__, reversed(self.whole_ends), reversed(other.whole_ends)))
            and all(map(int.__le__, self.reduce_ends, other.reduce_ends))
        )


class Search:
    """A beam of partial schedules along a line: ``width`` of them for each opinion on how far to prefetch.

    It leaves out what something else is as good as: a gather that would start behind the next slot may launch there, one that is
    used here goes first, a reduction that has ended is waited for, and one that has not only to make room. Steps grow in
    proportion to the slots.
    """

    def __init__(self, line: Line, room: Room, width: int) -> None:
        self._line, self._room, self._bounds, self._width = line, room, Bounds(line), width
        self._most = [[len(line.gather_ps)] * (line.slots + 1), *(room.ahead(share) for share in _SHARES)]

    def launches(self) -> list[Launch]:
        """Return the launches of the best schedule found, in order."""
        beam = [_State()]
        for slot in range(self._line.slots):
            found: dict[tuple[int, int, int], list[_State]] = {}
            for state in beam:
                for following in self._following(state, slot):
                    rivals = found.setdefault((following.gathers, following.reductions, len(following.reduce_ends)), [])
                    if not any(rival.dominates(following) for rival in rivals):
                        rivals[:] = [rival for rival in rivals if not following.dominates(rival)]
                        rivals.append(following)
            beam = self._best([state for rivals in found.values() for state in rivals], slot + 1)
        return _read(min(beam, key=lambda state: max(state.now, *state.reduce_ends, 0)).trail)

    def _best(self, states: list[_State], slot: int) -> list[_State]:
        states.sort(key=self._rank)
        kept = set[int]()
        for most in self._most:
            kept.update(islice((place for place, state in enumerate(states) if state.gathers <= most[slot]), self._width))
        return [states[place] for place in sorted(kept)]

    def _rank(self, state: _State) -> tuple[int, ...]:
        """Order by what no end undercuts, then by when the queue, and then the line, are done if nothing more holds them up."""
        done = self._bounds.transferred(max(state.now, state.free), state.gathers, state.reductions)
        return state.bound, done, state.now, -state.gathers, -state.reductions, len(state.reduce_ends)

    def _following(self, state: _State, slot: int) -> Iterator[_State]:
        """Yield the schedules that continue one by what happens at a slot and the computing behind it."""
        line, ends, first = self._line, state.reduce_ends, state.reductions - len(state.reduce_ends)
        due, now, ended, found = max(state.gathers, line.due[slot]), state.now, 0, False
        while ended < len(ends) and (ends[ended] <= now or line.wait_by[first + ended] <= slot):
            now, ended = max(now, ends[ended]), ended + 1
        for waited in range(ended, len(ends) + 1):
            room = self._room.left_bytes(slot, due) - line.reduced[state.reductions] + line.reduced[first + waited]
            if room < 0:
                continue
            opened = state._replace(now=max([now, *ends[ended:waited]]), reduce_ends=ends[waited:])
            for _ in range(state.gathers, due):
                opened = self._launch(opened, "gather", slot)
            after = self._after(opened, slot)
            # a wait for what has not ended is worth it only where the launches need its bytes
            below = line.problem.reductions[first + waited - 1].size_bytes if waited > ended else room + 1
            choices = list(self._choices(opened, slot, after, room, below))
            for choice in choices:
                if choice is not None:
                    found = True
                    yield self._close(choice, slot, after, state)
            if found and None not in choices:
                break  # all fits: more room brings no more launches

    def _after(self, state: _State, slot: int) -> int:
        """Return when the line comes to the next slot: it waits for what is used here, and computes."""
        first = state.gathers - len(state.whole_ends)
        used = [state.whole_ends[number - first] for number in self._line.used[slot] if number >= first]
        return max([state.now, *used]) + self._line.compute_ps[slot]

    def _choices(self, state: _State, slot: int, after: int, room: int, below: int) -> Iterator[_State | None]:
        """Yield each sequence of further launches at a slot that leaves less than ``below`` of the room, and None for what did not fit."""
        line, gathers, reductions = self._line, state.gathers, state.reductions
        finishes = self._room.finishes(slot + 1, gathers, reductions)
        if finishes and room < below:
            yield state
        ready = reductions < len(line.reduce_ps) and line.reduce_windows[reductions][0] <= slot
        if ready:
            yield from self._launched(state, "reduce", slot, after, room - line.problem.reductions[reductions].size_bytes, below)
        # a gather that starts no sooner here than from the next slot goes here only to be ahead of a reduction
        soon = max(state.now, state.free) < after or (ready and not finishes)
        if soon and gathers < len(line.gather_ps) and line.gather_windows[gathers][0] <= slot:
            yield from self._launched(state, "gather", slot, after, room - line.problem.gathers[gathers].size_bytes, below)

    def _launched(self, state: _State, kind: Collective, slot: int, after: int, room: int, below: int) -> Iterator[_State | None]:
        if room < 0:
            yield None
        else:
            yield from self._choices(self._launch(state, kind, slot), slot, after, room, below)

    def _launch(self, state: _State, kind: Collective, slot: int) -> _State:
        start, trail = max(state.now, state.free), _Trail(state.trail, kind, slot)
        if kind == "gather":
            end = start + self._line.gather_ps[state.gathers]
            return state._replace(free=end, gathers=state.gathers + 1, whole_ends=(*state.whole_ends, end), trail=trail)
        end = start + self._line.reduce_ps[state.reductions]
        return state._replace(free=end, reductions=state.reductions + 1, reduce_ends=(*state.reduce_ends, end), trail=trail)

    def _close(self, state: _State, slot: int, after: int, before: _State) -> _State:
        """Move on to the next slot: forget the gathers that have ended by then, and bound the end."""
        first = state.gathers - len(state.whole_ends)
        bound = self._bounds.end(slot + 1, after, state.free, state.gathers, state.reductions)
        new = (self._bounds.computed(state.whole_ends[number - first], number) for number in range(before.gathers, state.gathers))
        ended = 0
        while ended < len(state.whole_ends) and state.whole_ends[ended] <= after:
            ended += 1
        return state._replace(bound=max([before.bound, bound, *new]), now=after, whole_ends=state.whole_ends[ended:])


def _read(trail: _Trail | None) -> list[Launch]:
    steps = list[_Trail]()
    while trail is not None:
        steps.append(trail)
        trail = trail.before
    numbers = {"gather": count(), "reduce": count()}
    return [Launch(step.kind, next(numbers[step.kind]), step.slot) for step in reversed(steps)]
