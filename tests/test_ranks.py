"""The harness itself: a hang, a death and an exception of a rank are failures that say what happened; the pool goes on afterwards."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import Pool, RanksFailed
from tests.reference import whole


def sum_of_ranks(rank: int, world: int, offset: int) -> float:
    tensor = torch.tensor([float(rank + offset)])
    dist.all_reduce(tensor)
    return tensor.item()


def wait_for_nobody(rank: int, world: int) -> None:
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)
    else:
        time.sleep(60)


def raise_everywhere(rank: int, world: int) -> None:
    raise LookupError(f"rank {rank} found nothing")


def raise_on_last_rank(rank: int, world: int) -> None:
    if rank == world - 1:
        raise LookupError("the last rank found nothing")
    dist.all_reduce(torch.ones(1))


def die(rank: int, world: int) -> None:
    os._exit(3)


def warn(rank: int, world: int) -> None:
    warnings.warn("not in the list of exceptions", UserWarning, stacklevel=1)


def change_environment(rank: int, world: int) -> tuple[str | None, int]:
    before = os.environ.get("OF_ONE_CALL")
    os.environ["OF_ONE_CALL"] = "1"
    return before, torch.get_num_threads()


def gradients_of_peers(rank: int, world: int) -> list[torch.Tensor]:
    """The gradient of one linear layer by DDP and by FSDP2: two implementations that share only the process group."""
    found = []
    for wrap in (DistributedDataParallel, fully_shard):
        torch.manual_seed(0)
        model = wrap(torch.nn.Linear(4, 6))
        model(torch.ones(2, 4) * (rank + 1)).sum().backward()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        found.append(whole(gradient))
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_values_come_back_by_rank(ranks: Pool, world: int) -> None:
    assert ranks.run(sum_of_ranks, world, 10) == [sum(rank + 10 for rank in range(world))] * world


def test_peers_agree_in_groups_of_changing_size(ranks: Pool) -> None:
    for world in (2, 4, 3, 2):
        for from_ddp, from_fsdp in ranks.run(gradients_of_peers, world):
            mean = sum(2.0 * (rank + 1) for rank in range(world)) / world
            torch.testing.assert_close(from_ddp, torch.full((6, 4), mean), rtol=0, atol=0)
            torch.testing.assert_close(from_fsdp, torch.full((6, 4), mean), rtol=0, atol=0)


def test_hang_is_a_failure_that_shows_where(ranks: Pool) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="did not return within 2 s") as caught:
        ranks.run(wait_for_nobody, 2, timeout_s=2.0)
    assert time.monotonic() - started < 10
    assert [outcome.failure.type_name for outcome in caught.value.outcomes if outcome.failure] == ["Hang", "Hang"]
    assert "in wait_for_nobody" in str(caught.value)
    assert ranks.run(sum_of_ranks, 2, 0) == [1.0, 1.0]


def test_exception_of_every_rank_is_reported(ranks: Pool) -> None:
    failures = [outcome.failure for outcome in ranks.outcomes(raise_everywhere, 3)]
    assert [failure and failure.type_name for failure in failures] == ["LookupError"] * 3
    assert [failure and failure.text for failure in failures] == [f"rank {rank} found nothing" for rank in range(3)]


def test_exception_of_one_rank_wakes_the_others(ranks: Pool) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="the last rank found nothing"):
        ranks.run(raise_on_last_rank, 2, timeout_s=60.0)
    assert time.monotonic() - started < 30


def test_death_is_a_failure_with_its_exit_code(ranks: Pool) -> None:
    with pytest.raises(RanksFailed, match="died with exit code 3"):
        ranks.run(die, 1)
    assert ranks.run(sum_of_ranks, 1, 5) == [5.0]


def test_warning_is_an_error(ranks: Pool) -> None:
    with pytest.raises(RanksFailed, match="UserWarning: not in the list of exceptions"):
        ranks.run(warn, 1)


def test_environment_of_a_call_ends_with_it(ranks: Pool) -> None:
    assert ranks.run(change_environment, 1) == ranks.run(change_environment, 1) == [(None, 1)]
