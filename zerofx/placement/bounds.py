"""When a step cannot end before, from what is still to compute and to transfer. Pure; picoseconds."""

from __future__ import annotations

from itertools import accumulate

from zerofx.placement.problem import Line

_NEVER = -(10**30)


class Bounds:
    """Sums over what is left of a line, so that a bound costs the same anywhere on it."""

    def __init__(self, line: Line) -> None:
        self._computing = _left(line.compute_ps)
        self._gathering, self._reducing = _left(line.gather_ps), _left(line.reduce_ps)
        self._uses = [self._computing[gather.use] for gather in line.problem.gathers]
        self._gather_tail, self._reduce_tail = [_NEVER], [_NEVER]
        for number in reversed(range(len(line.gather_ps))):
            self._gather_tail.append(line.gather_ps[number] + max(self._uses[number], self._gather_tail[-1]))
        for number in reversed(range(len(line.reduce_ps))):
            ready = line.reduce_windows[number][0]
            self._reduce_tail.append(max(self._reducing[number] - self._computing[ready], self._reduce_tail[-1]))
        self._gather_tail.reverse()
        self._reduce_tail.reverse()

    def transferred(self, start: int, gathers: int, reductions: int) -> int:
        """Return when all is transferred at the earliest, if the queue goes on after so many from a time on."""
        return start + self._gathering[gathers] + self._reducing[reductions]

    def computed(self, end: int, number: int) -> int:
        """Return when all is computed at the earliest, if a gather ends at a time: it is needed by what its use begins."""
        return end + self._uses[number]

    def end(self, slot: int, now: int, free: int, gathers: int, reductions: int) -> int:
        """Return when the step ends at the earliest, if the line comes to a slot at ``now`` and the queue is free at ``free``."""
        start, computed = max(now, free), now + self._computing[slot]
        return max(
            computed,
            self.transferred(start, gathers, reductions),
            start + self._gather_tail[gathers],
            # a reduction comes after the computing in front of it
            computed + self._reduce_tail[reductions],
        )


def _left(times: list[int]) -> list[int]:
    return list(accumulate(reversed(times), initial=0))[::-1]
