"""The simulator against an example by hand, and what holds for every program."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerofx.errors import VerifyError
from zerofx.simulate import Kind, Task, Timeline, simulate

_QUEUES = ("shard", "replicate")
# Seconds in eighths add up exactly in binary, so that most sums below are exact; where shares divide, rounding is left.
_ROUNDING_S = 1e-9


def _compute(seconds: float, name: str = "compute", **changes: int) -> Task:
    return Task(name, Kind.COMPUTE, seconds, **changes)


def _launch(collective: str, seconds: float, queue: str = "shard", steals_s: float = 0.0, **changes: int) -> Task:
    return Task(f"launch {collective}", Kind.LAUNCH, seconds, collective, queue, steals_s, **changes)


def _wait(collective: str, **changes: int) -> Task:
    return Task(f"wait {collective}", Kind.WAIT, collective=collective, **changes)


def test_six_events_by_hand() -> None:
    timeline = simulate(
        [
            _launch("a", 4.0, whole_bytes=100),  # on the wire from 0 to 4
            _compute(1.0),  # 0 to 1
            _launch("b", 2.0, buffer_bytes=50),  # behind a: 4 to 6
            _wait("a"),  # blocks from 1 to 4
            _compute(1.5, whole_bytes=-100),  # 4 to 5.5
            _wait("b", buffer_bytes=-50),  # blocks from 5.5 to 6
        ]
    )
    assert [(event.start_s, event.end_s) for event in timeline.events] == [(0, 4), (0, 1), (4, 6), (1, 4), (4, 5.5), (5.5, 6)]
    alive = [(event.whole_bytes, event.buffer_bytes) for event in timeline.events]
    assert alive == [
        (100, 0),
        (100, 0),
        (100, 50),
        (100, 50),
        (0, 50),
        (0, 0),
    ]
    assert list(timeline.in_flight()) == [("a",), ("a",), ("a", "b"), ("b",), ("b",), ()]
    assert (timeline.seconds, timeline.compute_s, timeline.stolen_s, timeline.communication_s) == (6, 2.5, 0, 6)
    assert (timeline.exposed_s, timeline.peak_bytes) == (3.5, 150)
    assert {event.task.name: event.seconds for event in timeline.events if event.task.kind is Kind.WAIT} == {"wait a": 3, "wait b": 0.5}


def test_a_transfer_slows_what_computes_beside_it_by_its_share() -> None:
    timeline = simulate([_launch("a", 4.0, steals_s=1.0), _compute(6.0), _wait("a")])
    assert timeline.events[1].end_s == 7  # three quarters of the work of 4 seconds are done by 4, and 3 seconds of work are left
    assert (timeline.stolen_s, timeline.exposed_s, timeline.seconds) == (1, 0, 7)


def test_a_transfer_steals_nothing_while_the_line_waits() -> None:
    timeline = simulate([_launch("a", 4.0, steals_s=4.0), _wait("a"), _compute(1.0)])
    assert (timeline.stolen_s, timeline.exposed_s, timeline.seconds) == (0, 4, 5)


def test_two_queues_run_at_once_and_steal_together() -> None:
    launches = [_launch("a", 4.0, "shard", steals_s=1.0), _launch("b", 4.0, "replicate", steals_s=2.0)]
    timeline = simulate([*launches, _compute(1.5), _wait("a"), _wait("b")])
    assert timeline.events[2].end_s == 4.5  # a quarter of the speed until 4, then half a second of work is left
    assert timeline.seconds == 4.5


@pytest.mark.parametrize(
    ("tasks", "why"),
    [
        ([_wait("a")], "not in flight"),
        ([_launch("a", 1.0), _launch("a", 1.0), _wait("a")], "in flight already"),
        ([_launch("a", 1.0), _wait("a"), _wait("a")], "not in flight"),
        ([_launch("a", 1.0), _compute(1.0)], "nothing waits"),
    ],
)
def test_launches_and_waits_that_do_not_pair_are_refused(tasks: list[Task], why: str) -> None:
    with pytest.raises(VerifyError, match=why):
        simulate(tasks)


def test_an_empty_program_takes_no_time() -> None:
    assert simulate([]) == Timeline((), 0.0, 0.0, 0.0, 0.0, 0.0, 0)


_SECONDS = st.integers(0, 32).map(lambda eighths: eighths / 8)


@st.composite
def _programs(draw: st.DrawFn, queues: tuple[str, ...] = _QUEUES, most_share: int = 4) -> list[Task]:
    """Programs that end with every collective waited for; transfers steal up to so many quarters of their length."""
    tasks, flying = list[Task](), list[str]()
    for number in range(draw(st.integers(0, 20))):
        match draw(st.sampled_from(Kind)):
            case Kind.COMPUTE:
                tasks.append(_compute(draw(_SECONDS)))
            case Kind.LAUNCH:
                seconds = draw(_SECONDS)
                steals = seconds * draw(st.integers(0, most_share)) / 4
                size = draw(st.integers(1, 9))
                tasks.append(_launch(str(number), seconds, draw(st.sampled_from(queues)), steals, buffer_bytes=size))
                flying.append(str(number))
            case Kind.WAIT if flying:
                tasks.append(_wait(flying.pop(draw(st.integers(0, len(flying) - 1)))))
    return [*tasks, *map(_wait, flying)]


@given(_programs())
def test_never_below_what_computes_or_what_a_queue_transfers(tasks: list[Task]) -> None:
    timeline = simulate(tasks)
    queues = [sum(task.seconds for task in tasks if task.kind is Kind.LAUNCH and task.queue == queue) for queue in _QUEUES]
    assert timeline.seconds >= max(timeline.compute_s, *queues) - _ROUNDING_S
    assert timeline.communication_s == sum(queues)
    assert timeline.compute_s == sum(task.seconds for task in tasks if task.kind is Kind.COMPUTE)


@given(_programs())
def test_the_step_is_computing_and_what_is_stolen_and_what_is_exposed(tasks: list[Task]) -> None:
    timeline = simulate(tasks)
    assert timeline.seconds == pytest.approx(timeline.compute_s + timeline.stolen_s + timeline.exposed_s, abs=_ROUNDING_S)
    assert timeline.exposed_s == pytest.approx(sum(event.seconds for event in timeline.events if event.task.kind is Kind.WAIT))
    line = [event for event in timeline.events if event.task.kind is not Kind.LAUNCH]
    assert all(first.end_s == second.start_s for first, second in pairwise(line))


@given(_programs())
def test_a_queue_transfers_one_at_a_time_in_the_order_of_launches(tasks: list[Task]) -> None:
    for queue in _QUEUES:
        events = [event for event in simulate(tasks).events if event.task.kind is Kind.LAUNCH and event.task.queue == queue]
        assert all(first.end_s <= second.start_s for first, second in pairwise(events))


def _faster(tasks: list[Task], factor: float, steals_factor: float) -> list[Task]:
    return [
        replace(task, seconds=task.seconds * factor, steals_s=task.steals_s * steals_factor) if task.kind is Kind.LAUNCH else task
        for task in tasks
    ]


@given(_programs(most_share=0), st.integers(0, 16).map(lambda sixteenths: sixteenths / 16))
def test_more_bandwidth_is_never_slower(tasks: list[Task], factor: float) -> None:
    assert simulate(_faster(tasks, factor, 0.0)).seconds <= simulate(tasks).seconds + _ROUNDING_S


@given(_programs(("shard",)), st.integers(0, 16).map(lambda sixteenths: sixteenths / 16))
def test_more_bandwidth_is_never_slower_where_one_queue_steals(tasks: list[Task], factor: float) -> None:
    before = simulate(tasks).seconds
    assert simulate(_faster(tasks, factor, factor)).seconds <= before + _ROUNDING_S
    # the same work of the processor for each transfer, on a faster wire; it cannot need more than the whole of the processor
    least = max((task.steals_s / task.seconds for task in tasks if task.kind is Kind.LAUNCH and task.seconds), default=0.0)
    assert simulate(_faster(tasks, max(factor, least), 1.0)).seconds <= before + _ROUNDING_S


@given(_programs(("shard",)))
def test_on_one_queue_what_is_stolen_delays_the_step_by_as_much_wherever_it_runs(tasks: list[Task]) -> None:
    net = [replace(task, seconds=task.seconds - task.steals_s, steals_s=0.0) if task.kind is Kind.LAUNCH else task for task in tasks]
    stolen_s = sum(task.steals_s for task in tasks)
    assert simulate(tasks).seconds == pytest.approx(simulate(net).seconds + stolen_s, abs=_ROUNDING_S)


@given(_programs())
def test_deterministic(tasks: list[Task]) -> None:
    assert simulate(tasks) == simulate(list(tasks))
