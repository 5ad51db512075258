"""The solver against exhaustive search, plain rules and its own reasons."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.exhaustive import Exhaustive, random_problem, with_deadlines
from zerofx.errors import MemoryLimitError, VerifyError
from zerofx.placement import Gather, Launch, Line, Placement, Problem, Reduction, Why, solve, tasks, tightest
from zerofx.placement.replay import hoisted, replay
from zerofx.placement.room import Room, pack
from zerofx.placement.solver import plain
from zerofx.simulate import simulate

_SPARE_BYTES = (0, 0, 1, 2, 4, 8, 30)
_PS_ROUNDING_S = 1e-10  # the solver counts whole picoseconds, at most 20 to a path here


def _problems(count: int) -> list[Problem]:
    """Random problems, each with a limit from the smallest that works to one that hardly binds."""
    found = list[Problem]()
    for seed in range(count):
        problem = random_problem(seed)
        if seed % 4 == 3:
            problem = with_deadlines(problem, seed)
        found.append(replace(problem, limit_bytes=tightest(Line(problem)).limit_bytes + _SPARE_BYTES[seed % len(_SPARE_BYTES)]))
    return found


def _layers(layers: int, ratio: float, limit_layers: float | None) -> Problem:
    """Return forward and backward of equal layers; gathering a layer takes ``ratio`` of its forward's time, reducing it too."""
    compute_s, gathers, reductions, size, slots = list[float](), list[Gather](), list[Reduction](), 1000, 7
    for _ in range(layers):
        gathers.append(Gather(ratio, size, len(compute_s), len(compute_s) + slots))
        compute_s += [1 / slots] * slots
    for _ in range(layers):
        gathers.append(Gather(ratio, size, len(compute_s), len(compute_s) + slots))
        compute_s += [2 / slots] * slots
        reductions.append(Reduction(ratio, size * 3 // 2, len(compute_s)))
        compute_s.append(0.0)
    limit = None if limit_layers is None else int(limit_layers * size)
    return Problem(tuple(compute_s), (0,) * len(compute_s), tuple(gathers), tuple(reductions), limit)


def _exposed_s(problem: Problem, launches: Sequence[Launch], waits: Sequence[int]) -> float:
    return simulate(tasks(problem, launches, waits)).exposed_s


def _check(problem: Problem, found: Placement) -> None:
    """Assert that all that a problem asks for is kept."""
    line = Line(problem)
    assert problem.limit_bytes is None or found.timeline.peak_bytes <= problem.limit_bytes
    for kind, windows in (("gather", line.gather_windows), ("reduce", line.reduce_windows)):
        launches = [choice for choice in found.launches if choice.kind == kind]
        assert [choice.number for choice in launches] == list(range(len(windows)))
        assert all(first <= choice.slot <= last for choice, (first, last) in zip(launches, windows, strict=True))
    slots = {choice.number: choice.slot for choice in found.launches if choice.kind == "reduce"}
    for choice, reduction in zip(found.waits, problem.reductions, strict=True):
        assert slots[choice.number] < choice.slot <= (line.slots if reduction.wait_by is None else reduction.wait_by)
    for choices in (found.launches, found.waits):
        assert all(first.slot <= second.slot for first, second in pairwise(choices))


def _gap(seconds: float, best_s: float, compute_s: float) -> float:
    """Return the share by which exposed time is above that of the best."""
    if seconds == best_s:
        return 0.0
    return (seconds - best_s) / (best_s - compute_s) if best_s > compute_s else math.inf


def test_near_the_best_of_all_on_200_problems_and_within_their_limits() -> None:
    gaps = list[float]()
    for problem in _problems(200):
        found = solve(problem)
        _check(problem, found)
        assert problem.limit_bytes is not None
        # found within picoseconds of what is to be beaten, or beaten by more
        best_s = min(found.timeline.seconds, Exhaustive(problem, problem.limit_bytes, found.timeline.seconds - _PS_ROUNDING_S).run())
        gaps.append(_gap(found.timeline.seconds, best_s, sum(problem.compute_s)))
    mean = sum(gaps) / len(gaps)
    print(f"exposed time above the best: mean {mean:.3%}, worst {max(gaps):.3%}, {sum(gap > 0 for gap in gaps)} of {len(gaps)} above it")
    assert max(gaps) <= 0.05


def test_exhaustive_search_finds_what_the_solver_finds_without_its_bound() -> None:
    for problem in _problems(30):
        assert problem.limit_bytes is not None
        assert Exhaustive(problem, problem.limit_bytes).run() == pytest.approx(solve(problem).timeline.seconds, rel=0.05)


@pytest.mark.parametrize("problems", [_problems(200), [_layers(24, ratio, limit) for ratio in (0.3, 1.0, 1.5) for limit in (2.5, 4, 20)]])
def test_never_worse_than_plain_rules(problems: list[Problem]) -> None:
    for problem in problems:
        line, limit_bytes, exposed_s = Line(problem), problem.limit_bytes, solve(problem).timeline.exposed_s
        assert limit_bytes is not None
        packed = pack(line, limit_bytes)
        assert packed is not None
        rules = plain(line, Room(line, limit_bytes, packed), packed)
        assert len(rules) == 3
        for launches in rules:
            at_once = [launch.slot + 1 for launch in launches if launch.kind == "reduce"]
            for waits in (at_once, replay(line, limit_bytes, launches).waits):
                assert simulate(tasks(problem, launches, waits)).peak_bytes <= limit_bytes
                assert exposed_s <= _exposed_s(problem, launches, waits) + _PS_ROUNDING_S


def test_the_smallest_limit_is_the_smallest() -> None:
    for problem in _problems(60):
        least = tightest(Line(problem))
        smallest = least.limit_bytes
        assert least.whole_bytes + least.buffer_bytes == smallest
        assert Exhaustive(problem, smallest).run() < math.inf
        assert Exhaustive(problem, smallest - 1).run() == math.inf
        with pytest.raises(MemoryLimitError, match=f"the smallest that works is {smallest} bytes") as caught:
            solve(replace(problem, limit_bytes=smallest - 1))
        assert caught.value.smallest_bytes == smallest


def test_reasons_are_true() -> None:
    seen = set[Why]()
    for problem in _problems(200):
        found = solve(problem)
        line, last = Line(problem), -1
        launches = [Launch(choice.kind, choice.number, choice.slot) for choice in found.launches]
        waits = [choice.slot for choice in found.waits]
        for choice, launch in zip(found.launches, launches, strict=True):
            before, last = last, launch.slot
            earlier = sorted(
                (replace(launch, slot=launch.slot - 1) if other == launch else other for other in launches), key=lambda launch: launch.slot
            )
            match choice.why:
                case Why.FIRST | Why.READY | Why.WINDOW:
                    assert launch.slot == line.window(launch)[0]
                    assert (choice.why is Why.READY) == (launch.kind == "reduce")
                    assert choice.why is not Why.FIRST or launch.slot == 0
                case Why.MEMORY:
                    assert problem.limit_bytes is not None
                    assert choice.reason == f"memory limit at event {launch.slot - 1}"
                    assert simulate(tasks(problem, earlier, waits)).peak_bytes > problem.limit_bytes
                case Why.ORDER:
                    assert before == launch.slot
        for choice in found.waits:
            if choice.why is Why.END:
                assert choice.slot == line.slots
        seen.update(choice.why for choice in (*found.launches, *found.waits))
    assert seen == set(Why)


def test_more_memory_is_never_slower() -> None:
    exposed_s = [solve(_layers(24, 1.1, limit)).timeline.exposed_s for limit in (2.5, 3, 4, 6, 10, 20, 40, None)]
    assert all(more <= less + _PS_ROUNDING_S for less, more in pairwise(exposed_s)), exposed_s
    assert exposed_s[-1] < exposed_s[0]


def test_what_is_first_stays_exposed_and_what_is_last_too() -> None:
    found = solve(_layers(12, 0.3, None))
    assert found.timeline.exposed_s == pytest.approx(0.3 + 0.3)
    assert found.launches[0].why is Why.FIRST


def test_launching_earlier_in_the_same_order_is_never_slower_and_keeps_the_limit() -> None:
    for problem in _problems(100):
        line, limit_bytes = Line(problem), problem.limit_bytes
        assert limit_bytes is not None
        packed = pack(line, limit_bytes)
        assert packed is not None
        for launches in plain(line, Room(line, limit_bytes, packed), packed):
            earlier = hoisted(line, limit_bytes, launches)
            assert [(launch.kind, launch.number) for launch in earlier] == [(launch.kind, launch.number) for launch in launches]
            assert all(new.slot <= old.slot for new, old in zip(earlier, launches, strict=True))
            new, old = (replay(line, limit_bytes, each) for each in (earlier, launches))
            assert simulate(tasks(problem, earlier, new.waits)).peak_bytes <= limit_bytes
            assert _exposed_s(problem, earlier, new.waits) <= _exposed_s(problem, launches, old.waits) + _PS_ROUNDING_S


def test_what_a_transfer_steals_changes_no_choice() -> None:
    for problem in _problems(30):
        stolen = [
            tuple(replace(transfer, seconds=transfer.seconds + 0.5, steals_s=0.5) for transfer in transfers)
            for transfers in (problem.gathers, problem.reductions)
        ]
        plain_found, found = solve(problem), solve(replace(problem, gathers=stolen[0], reductions=stolen[1]))
        assert (found.launches, found.waits) == (plain_found.launches, plain_found.waits)
        transfers = len(problem.gathers) + len(problem.reductions)
        assert found.timeline.seconds == pytest.approx(plain_found.timeline.seconds + 0.5 * transfers)


def test_equal_problems_have_equal_placements() -> None:
    assert all(solve(problem) == solve(replace(problem)) for problem in _problems(30))


def test_a_line_of_126_layers_is_placed_in_seconds_and_longer_ones_in_proportion() -> None:
    seconds = dict[int, float]()
    for layers in (48, 126, 192):
        problem = _layers(layers, 1.0, 4)
        begin = time.process_time()
        found = solve(problem)
        seconds[layers] = time.process_time() - begin
        _check(problem, found)
    assert len(problem.compute_s) > 2000
    assert seconds[126] < 5
    assert seconds[192] < 2 * 4 * seconds[48]  # in proportion it would be 4 times; twice that for what else runs here


@pytest.mark.parametrize(
    ("gathers", "reductions", "where"),
    [
        ((Gather(1.0, 1, 4, 5),), (), "gather 0"),
        ((Gather(1.0, 1, 1, 2, earliest=2),), (), "gather 0"),
        ((Gather(1.0, 1, 2, 3, earliest=2), Gather(1.0, 1, 1, 2)), (), "gather 0"),
        ((), (Reduction(1.0, 1, 3, 2),), "reduction 0"),
        ((), (Reduction(1.0, 1, 1, wait_by=1),), "reduction 0"),
        ((), (Reduction(1.0, 1, 3), Reduction(1.0, 1, 1)), "reduction 0"),
    ],
)
def test_a_problem_that_contradicts_itself_is_refused(gathers: tuple[Gather, ...], reductions: tuple[Reduction, ...], where: str) -> None:
    with pytest.raises(VerifyError, match=where):
        Problem((1.0,) * 4, (0,) * 4, gathers, reductions)
