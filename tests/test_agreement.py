"""Ranks as threads over one store: whatever each wants to run, all run the same communication in the same order, or all raise."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofx.agreement import Agreement, Unit
from zerofx.divergence import BACKWARD, EVALUATION, TRAINING
from zerofx.errors import RankMismatchError
from zerofx.groups import Group
from zerofx.params import Param
from zerofx.rendezvous import Rendezvous

PARAMS = tuple(Param(index, (f"h.{index}.weight",), (4, 4), torch.float32, torch.float32, 2, 0) for index in range(4))
UNITS = tuple(Unit((("gather", (index,)),)) for index in range(4))


class StoreOnly:
    """A process group of which only the store is used."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store

    def get_group_store(self) -> dist.Store:
        return self.store


class Rank:
    """One rank's agreement, and what it ran: each launch, and its own units."""

    def __init__(self, rank: int, world: int, store: dist.Store, timeout_s: float = 20.0) -> None:
        group = Group("", world, rank, "")
        self.launched: list[tuple[str, tuple[int, ...]]] = []
        self.own: list[Unit] = []
        connect = lambda: Rendezvous(StoreOnly(store), group, timeout_s)  # noqa: E731
        self.agreement = Agreement("Model", rank, PARAMS, timeout_s, connect, self.take_part, in_forward=True)

    def take_part(self, kind: str, members: tuple[int, ...]) -> None:
        self.launched.append((kind, members))

    def run(self, unit: Unit, *, is_last: bool = False) -> None:
        def run() -> None:
            self.launched.extend(unit.launches)
            self.own.append(unit)

        self.agreement.turn(unit, run, is_last=is_last)

    def phase(self, kind: str, units: Sequence[Unit], *, is_whole: bool = False) -> None:
        self.agreement.begin(kind)
        for unit in units:
            self.run(unit, is_last=is_whole)
        self.agreement.end()


def on_ranks(world: int, play: Callable[[Rank, int], Any], timeout_s: float = 20.0) -> list[Any]:
    """Run a part for each rank in a thread of its own; return the ranks' results, exceptions included, in rank order."""
    store, results = dist.HashStore(), [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = play(Rank(rank, world, store, timeout_s), rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return results


PROGRAMS = st.lists(st.sampled_from(UNITS), max_size=6)


@settings(max_examples=25)
@given(st.integers(2, 3).flatmap(lambda world: st.lists(st.tuples(*[PROGRAMS] * world), min_size=1, max_size=5)))
def test_all_ranks_launch_the_same_and_each_runs_all_of_its_own(phases: list[tuple[list[Unit], ...]]) -> None:
    world = len(phases[0])

    def play(mine: Rank, rank: int) -> Rank:
        for programs in phases:
            mine.phase(TRAINING, programs[rank], is_whole=len(programs[rank]) == 1)
        return mine

    ranks = on_ranks(world, play)
    for rank, mine in enumerate(ranks):
        assert isinstance(mine, Rank), mine
        assert mine.launched == ranks[0].launched
        assert mine.own == [unit for programs in phases for unit in programs[rank]]


def test_steady_phases_need_two_meetings_and_a_whole_one_needs_one() -> None:
    def play(mine: Rank, rank: int) -> list[tuple[int, int]]:
        counts = []
        for units, is_whole in [(UNITS, False)] * 2 + [((UNITS[0], UNITS[2 + rank]), False)] * 3 + [(UNITS[:1], True)] * 3:
            before = mine.agreement.rendezvous._count, len(mine.launched)
            mine.phase(TRAINING, units, is_whole=is_whole)
            counts.append((mine.agreement.rendezvous._count - before[0], len(mine.launched) - before[1]))
        return counts

    # First each unit and the end is agreed on, then only the start and the end. What no rank needs is dropped after one time; what
    # each rank has instead of the other's stays. Programs known as a whole take one meeting.
    assert on_ranks(2, play) == [[(5, 4), (2, 4), (2, 4), (2, 3), (2, 3), (2, 3), (1, 1), (1, 1)]] * 2


def test_ranks_in_different_phases_raise_the_same_error_and_go_on() -> None:
    def play(mine: Rank, rank: int) -> list[str]:
        mine.phase(TRAINING, UNITS[:1])
        with pytest.raises(RankMismatchError) as caught:
            mine.phase((BACKWARD, EVALUATION)[rank], UNITS[rank : rank + 1])
        mine.phase(TRAINING, UNITS[:2])
        return [str(caught.value), caught.value.where]

    first, second = on_ranks(2, play)
    assert first == second
    assert "rank 0 is in backward 1 after forward 1, rank 1 is in forward without gradients 2" in first[0]
    assert "rank 0 before the gather of h.0.weight, rank 1 before the gather of h.1.weight" in first[1]


def test_rank_that_comes_too_late_raises_what_the_others_raised() -> None:
    def play(mine: Rank, rank: int) -> list[str]:
        mine.phase(TRAINING, UNITS[:1])
        if rank == 1:
            time.sleep(3.0)
        with pytest.raises(RankMismatchError) as caught:
            mine.phase(TRAINING, UNITS[:1])
        mine.phase(TRAINING, UNITS[:1])
        return [str(caught.value), *map(str, mine.launched)]

    first, second, third = on_ranks(3, play, timeout_s=2.0)
    assert first == second == third
    assert "rank 1 did not come to training forward 2 within 2 s" in first[0]
    assert len(first) == 3  # nothing was launched in the forward that failed


def test_rank_that_compiles_is_waited_for() -> None:
    def play(mine: Rank, rank: int) -> int:
        mine.agreement.begin(TRAINING)
        if rank == 1:
            with mine.agreement.compiling():
                time.sleep(1.5)
        mine.run(UNITS[0])
        mine.agreement.end()
        return len(mine.launched)

    assert on_ranks(2, play, timeout_s=0.5) == [1, 1]


def test_failed_rank_does_not_wait_and_the_others_raise() -> None:
    def play(mine: Rank, rank: int) -> str:
        for _ in range(2):
            mine.phase(TRAINING, UNITS)  # from the second time on in the expected order, without meetings
        said = ""
        mine.agreement.begin(TRAINING)
        try:
            for number, unit in enumerate(UNITS):
                if rank == 1 and number == 2:
                    raise LookupError("nothing found")
                mine.run(unit)
            mine.agreement.end()
        except (LookupError, RankMismatchError) as error:
            mine.agreement.fail(error)
            said = str(error)
        mine.phase(TRAINING, UNITS)
        return f"{len(mine.launched)} {said}"

    first, second = on_ranks(2, play)
    assert first.startswith("16 rank 1 raised LookupError: nothing found")
    assert second == "16 nothing found"


def test_ranks_that_meet_over_different_models_say_so() -> None:
    def play(mine: Rank, rank: int) -> str:
        mine.agreement._model = ("Generator", "Critic")[rank]
        with pytest.raises(RankMismatchError, match="rank 0 runs Generator, rank 1 runs Critic") as caught:
            mine.phase(TRAINING, UNITS[:1])
        return str(caught.value)

    first, second = on_ranks(2, play)
    assert first == second
