"""Steps that ranks take together through their store: answers, errors and deadlines that all of them see."""

import os
import socket
import time
from typing import Any

from tests.ranks import Failure, Pool
from tests.test_bad_input import assert_four_parts, failure_of
from zerofx.consensus import Consensus
from zerofx.groups import Group


def group(rank: int, world: int) -> Group:
    return Group("test", world, rank, "gloo")


def take_steps(rank: int, world: int) -> list[Any]:
    steps = Consensus("steps", group(rank, world), 60.0)
    found: list[Any] = [steps.step("sum", lambda: ("kept", rank), lambda given: [sum(given) + place for place in range(world)])]
    payload = bytes(range(256)) * 40_000  # more than the store takes in one piece would fail here
    found.append(steps.step("large", lambda: (None, payload), lambda given: [len(one) for one in given]))
    found.append(failure_of(lambda: steps.step("bad rank", lambda: (None, 1 // (rank - 1)), lambda given: given)))
    found.append(failure_of(lambda: steps.step("bad lead", lambda: (None, 1), lambda given: [1 // 0])))
    found.append(steps.step("after", lambda: (None, rank), lambda given: given))
    return found


def test_answers_and_errors_reach_all_ranks(ranks: Pool) -> None:
    for rank, found in enumerate(ranks.run(take_steps, 3)):
        total, large, bad_rank, bad_lead, after = found
        assert total == ("kept", 3 + rank)
        assert large == (None, 256 * 40_000)
        assert_four_parts(bad_rank, "CheckpointError", "ZeroDivisionError", "rank 1")
        assert_four_parts(bad_lead, "CheckpointError", "ZeroDivisionError", "rank 0")
        assert after == (None, rank)


def come_late(rank: int, world: int) -> tuple[list[Failure], Any]:
    """Rank 1 comes when the others have given up; the step after that all take."""
    import torch.distributed as dist

    steps = Consensus("late", group(rank, world), 0.5)
    if rank == 1:
        dist.barrier()
    if rank == 0:
        time.sleep(0.1)  # the others give up before it unless they let it answer
    failure = failure_of(lambda: steps.step("late", lambda: (None, rank), lambda given: given))
    if rank != 1:
        dist.barrier()
    dist.barrier()
    patient = Consensus("late", group(rank, world), 60.0)
    return [failure], patient.step("together", lambda: (None, rank), lambda given: given)


def test_a_rank_that_comes_late(ranks: Pool) -> None:
    started = time.monotonic()
    for rank, (failures, answer) in enumerate(ranks.run(come_late, 3)):
        assert_four_parts(failures[0], "RankMismatchError", "late", "ranks 0, 2 did not" if rank == 1 else "rank 1 did not")
        assert answer == (None, rank)
    assert time.monotonic() - started < 60


def lose_the_store(rank: int, world: int, port: int) -> Failure:
    """Rank 0, which keeps the store, dies while the other waits for it."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    steps = Consensus("lost", group(rank, world), 60.0)
    steps.step("before", lambda: (None, rank), lambda given: given)
    if rank == 0:
        os._exit(1)
    return failure_of(lambda: steps.step("after", lambda: (None, rank), lambda given: given))


def test_the_store_is_gone(ranks: Pool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, other = ranks.outcomes(lose_the_store, 2, port, group=False)
    assert first.failure is not None
    assert first.failure.type_name == "Died"
    assert_four_parts(other.value, "RankLostError", "after", "rank 1", "store")
