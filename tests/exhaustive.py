"""The best placement of a small problem, by trying all of them; and random small problems."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

from zerofx.placement import Gather, Problem, Reduction


@dataclass
class Exhaustive:
    """Every number of waits and every order of launches at every slot, within the limit; transfers of a problem steal nothing.

    ``best_s`` is the least total; paths that cannot get below it are cut, so ``bound_s``, if given, only saves time. It shares no
    code with the solver, and none of its arguments why a choice may be left out.
    """

    problem: Problem
    limit_bytes: int
    bound_s: float = math.inf
    best_s: float = math.inf
    _seen: set[tuple[object, ...]] = field(default_factory=set)

    def run(self) -> float:
        """Return the least total in seconds, and infinity where nothing fits or nothing is below the bound."""
        self._slot(0, 0.0, 0.0, (), 0, ())
        return self.best_s

    def _slot(self, slot: int, now: float, free: float, whole_ends: tuple[float, ...], reductions: int, flying: tuple[float, ...]) -> None:
        problem = self.problem
        if slot == len(problem.compute_s):
            self.best_s = min(self.best_s, max((now, *flying)))
            return
        left = [transfer.seconds for transfer in (*problem.gathers[len(whole_ends) :], *problem.reductions[reductions:])]
        state = (slot, now, free, whole_ends, reductions, flying)
        if max(now + sum(problem.compute_s[slot:]), free + sum(left)) >= min(self.best_s, self.bound_s) or state in self._seen:
            return
        self._seen.add(state)
        oldest = reductions - len(flying)
        for waited in range(len(flying) + 1):
            by = [reduction.wait_by for reduction in problem.reductions[oldest + waited : reductions]]
            if all(wait_by is None or wait_by > slot for wait_by in by):
                self._launches(slot, max((now, *flying[:waited])), free, whole_ends, reductions, flying[waited:])

    def _launches(
        self, slot: int, now: float, free: float, whole_ends: tuple[float, ...], reductions: int, flying: tuple[float, ...]
    ) -> None:
        problem, gathers = self.problem, len(whole_ends)
        whole = sum(gather.size_bytes for gather in problem.gathers[:gathers] if gather.release > slot)
        buffers = sum(reduction.size_bytes for reduction in problem.reductions[reductions - len(flying) : reductions])
        if problem.standing_bytes[slot] + whole + buffers > self.limit_bytes:
            return
        start = max(now, free)
        if gathers < len(problem.gathers) and problem.gathers[gathers].earliest <= slot:
            end = start + problem.gathers[gathers].seconds
            self._launches(slot, now, end, (*whole_ends, end), reductions, flying)
        if reductions < len(problem.reductions) and problem.reductions[reductions].ready <= slot:
            end = start + problem.reductions[reductions].seconds
            self._launches(slot, now, end, whole_ends, reductions + 1, (*flying, end))
        due = [gather.use for gather in problem.gathers[gathers:]] + [_last(reduction) for reduction in problem.reductions[reductions:]]
        if min(due, default=slot + 1) <= slot:
            return
        used = [end for end, gather in zip(whole_ends, problem.gathers, strict=False) if gather.use == slot]
        self._slot(slot + 1, max((now, *used)) + problem.compute_s[slot], free, whole_ends, reductions, flying)


def _last(reduction: Reduction) -> int:
    return reduction.ready if reduction.latest is None else reduction.latest


def random_problem(seed: int) -> Problem:
    """Return a problem without a limit: up to 8 collectives of both kinds on up to 12 slots."""
    rng = random.Random(seed)
    slots, count = rng.randint(4, 12), rng.randint(1, 8)
    gathers = rng.randint(0, count)
    lengths = (0.5, 1.0, 1.37, 2.0, 3.0, 4.0, 5.48)  # some that never add up to the same time, and some that do
    found = list[Gather]()
    for use in sorted(rng.randrange(slots) for _ in range(gathers)):
        release, earliest = rng.randint(use + 1, min(slots + 1, use + 4)), rng.choice((0, 0, 0, max(0, use - 2)))
        found.append(Gather(rng.choice(lengths), rng.randint(1, 6), use, release, earliest))
    reductions = list[Reduction]()
    for ready in sorted(rng.randrange(slots) for _ in range(count - gathers)):
        reductions.append(Reduction(rng.choice(lengths), rng.randint(1, 6), ready, min(slots - 1, ready + rng.choice((0, 0, 1, 3)))))
    compute_s = tuple(rng.choice((0.0, 0.5, 1.0, 2.0, 3.0, 5.0)) for _ in range(slots))
    standing_bytes = tuple(rng.choice((0, 0, 1, 2)) for _ in range(slots))
    return Problem(compute_s, standing_bytes, tuple(found), tuple(reductions))


def with_deadlines(problem: Problem, seed: int) -> Problem:
    """Return the problem with a slot by which some reductions must be waited for."""
    rng, slots, reductions = random.Random(seed), len(problem.compute_s), list[Reduction]()
    for reduction in problem.reductions:
        wait_by = min(slots, _last(reduction) + rng.randint(1, 3))
        reductions.append(replace(reduction, wait_by=rng.choice((None, wait_by))))
    return replace(problem, reductions=tuple(reductions))
