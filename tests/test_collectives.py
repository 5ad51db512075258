"""Buckets arrive whole, whatever travels alone, packed, in pieces or replicated."""

import pytest
import torch
from torch import Tensor

from tests.ranks import Pool
from zerofx.collectives import TRANSPORTS, Group, gather_start, gather_wait, import_functional, reduce_start, reduce_wait
from zerofx.params import Param, choose_dim

# In pieces (8 MiB and more), alone, packed with padding, along dimension 1, replicated.
SHAPES = ((1501, 1500), (600, 100), (7, 3), (1, 12), ())


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
    gathered = gather_wait(gather_start([shard_of(p, w, rank) for p, w in zip(params, wholes, strict=True)], params, group), params, group)
    buffers = reduce_start(draws[rank], params, group, None)
    if world > 1 and len(buffers) != TRANSPORTS["gloo"].pieces + 3:  # alone, packed, replicated
        found.append(f"{len(buffers)} buffers")
    reduced = reduce_wait(buffers, params, group)
    for param, whole, back, shard in zip(params, wholes, gathered, reduced, strict=True):
        if not torch.equal(whole, back):
            found.append(f"{param.name} is not gathered")
        mean = sum(draw[param.index] for draw in draws) / world
        if not torch.equal(shard_of(param, mean, rank), shard):
            found.append(f"{param.name} is not reduced")
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_sent_arrives(ranks: Pool, world: int) -> None:
    assert ranks.run(exchange, world) == [[]] * world
