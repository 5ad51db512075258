"""The recorded order of submodules, and what lies ahead on it."""

import pytest
from torch import nn

from zerofx.trace import Route, Trace

A, B, C = nn.Identity(), nn.Identity(), nn.Identity()


def run(trace: Trace, *modules: nn.Module) -> tuple[list[bool], bool]:
    """One pass: whether each step followed the record, and whether the whole pass did."""
    trace.step = 0
    return [trace.advance(module) for module in modules], trace.end()


def test_the_first_pass_is_recorded_and_later_ones_follow() -> None:
    trace = Trace()
    assert run(trace, A, B, A) == ([True] * 3, True)
    assert trace.is_complete
    assert run(trace, A, B, A) == ([True] * 3, True)
    assert trace.order == [A, B, A]


def test_another_order_is_recorded_from_where_it_differs() -> None:
    trace = Trace()
    run(trace, A, B, C)
    assert run(trace, A, C, B) == ([True, False, True], True)
    assert trace.order == [A, C, B]
    assert run(trace, A, C, B) == ([True] * 3, True)


def test_fewer_and_more_steps_are_told() -> None:
    trace = Trace()
    run(trace, A, B)
    assert run(trace, A) == ([True], False)
    assert trace.order == [A]
    assert run(trace, A, B) == ([True, False], True)


@pytest.mark.parametrize(("index", "step", "expected"), [(0, 0, 0), (0, 1, 50), (1, 1, 0), (2, 0, 30), (1, 3, None), (9, 0, None)])
def test_distance_counts_the_elements_fetched_until_the_next_use(index: int, step: int, expected: int | None) -> None:
    # steps need parameters 0; 1; 2; 0
    assert Route([(0,), (1,), (2,), (0,)], [10, 20, 30]).distance(index, step) == expected
