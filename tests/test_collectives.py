"""Buckets arrive whole, whatever travels alone, packed, in pieces or replicated."""

import pytest
import torch
from torch import Tensor

from tests.ranks import Pool
from zerofx.collectives import (
    gather_start,
    gather_wait,
    import_functional,
    new_whole,
    reduce_start,
    reduce_wait,
    refresh_start,
)
from zerofx.groups import TRANSPORTS, Group
from zerofx.params import Param, choose_dim

# In pieces (8 MiB and more), alone, packed with what is too little alone, the same with padding, along dimension 1, replicated.
SHAPES = ((1501, 1500), (1100, 512), (1025, 512), (7, 3), (1, 12), ())


def params_of(world: int) -> list[Param]:
    float32 = torch.float32
    return [Param(i, (f"p{i}",), shape, float32, float32, world, choose_dim(shape, world)) for i, shape in enumerate(SHAPES)]


def shard_of(param: Param, whole: Tensor, rank: int) -> Tensor:
    """This rank's padded shard."""
    if param.dim is None:
        return whole
    padded = whole.new_zeros(param.padded_shape)
    padded[tuple(slice(size) for size in param.shape)] = whole
    return padded.narrow(param.dim, rank * param.chunk, param.chunk).contiguous()


def exchange(rank: int, world: int) -> list[str]:
    import_functional()
    params, group = params_of(world), Group(torch.distributed.group.WORLD.group_name, world, rank, "gloo")
    draws = [
        [torch.randint(-8, 8, param.shape, generator=torch.Generator().manual_seed(10 * param.index + r)).float() for param in params]
        for r in range(world)
    ]
    found = []
    wholes = draws[0]
    shards = [shard_of(param, whole, rank) for param, whole in zip(params, wholes, strict=True)]
    buffers = gather_start(shards, params, group), reduce_start(draws[rank], params, group, None, group.size)
    for started in buffers:
        if len(started) != TRANSPORTS["gloo"].pieces + 3:  # alone, packed, replicated
            found.append(f"{len(started)} buffers")
    gathered, reduced = gather_wait(buffers[0], params, group), reduce_wait(buffers[1], params, group, group.size)
    standing = [new_whole(param, torch.device("cpu")) for param in params]
    refresh_start(standing, shards, params, group).wait()
    for param, whole, back, stood, shard in zip(params, wholes, gathered, standing, reduced, strict=True):
        if not torch.equal(whole, back):
            found.append(f"{param.name} is not gathered")
        if not torch.equal(whole, stood):
            found.append(f"{param.name} is not refreshed")
        mean = sum(draw[param.index] for draw in draws) / world
        if not torch.equal(shard_of(param, mean, rank), shard):
            found.append(f"{param.name} is not reduced")
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_sent_arrives(ranks: Pool, world: int) -> None:
    assert ranks.run(exchange, world) == [[]] * world
