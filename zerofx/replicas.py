"""Whether values that a group of ranks stores in parts are what they must be for that: the same on all of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerofx import collectives
from zerofx.errors import ShardingError
from zerofx.groups import Group


class Replicas:
    """Compares the values of one graph between the ranks of a group, each until it was the same once: when the graph first runs."""

    def __init__(self, group: Group, modules: Sequence[str]) -> None:
        self._group = group
        self._modules = {} if group.backend == "fake" else dict(enumerate(modules))

    def check(self, number: int, value: Tensor) -> None:
        """Compare a value, by the bits. Raises ShardingError, on all ranks of the group, where it differs."""
        if number not in self._modules:
            return
        module = self._modules[number]
        started = collectives.whole_start(collectives.own_part(value, self._group), self._group)
        whole = collectives.whole_wait(started, value.shape, value.dtype, self._group)
        differs = torch.tensor(float(not whole.view(torch.uint8).equal(value.view(torch.uint8))), device=value.device)
        if collectives.total_over_ranks(differs, self._group):
            raise ShardingError(
                f"the input of {module} is not the same on all ranks of partition_activations",
                where=f"{module}, the first forward",
                why="each rank stores a part of it for the backward, which would put it together from different values",
                remedy="pass the mesh dimension whose ranks compute the same activations (tensor parallelism), or leave it out",
            )
        del self._modules[number]  # what was refused is looked at again, should the caller go on
