"""FSDP2 as documented, tuned for CPU, and with zerofx's collectives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

# The interfaces that set_custom_all_gather and set_custom_reduce_scatter take; no public module exports them.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.utils.checkpoint import checkpoint

_AHEAD = 2  # blocks to prefetch, as zerofx does


@dataclass(frozen=True, slots=True)
class Variant:
    """How FSDP2 is used. ``pieces`` above zero: with zerofx's collectives, each gather in that many pieces."""

    asynchronous: bool = False
    compiled: bool = False
    checkpointed: bool = False
    pieces: int = 0


def shard(model: nn.Module, blocks: nn.ModuleList, precision: torch.dtype | None, variant: Variant) -> None:
    """Shard each block and the root, in place."""
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=precision)
    for place, block in enumerate(blocks):
        if variant.compiled:
            blocks[place] = torch.compile(block)  # type: ignore[assignment]
        if variant.checkpointed:
            blocks[place] = Checkpointed(blocks[place])
        fully_shard(blocks[place], mp_policy=policy)
    root = fully_shard(model, mp_policy=policy)
    sharded = [block for block in blocks if isinstance(block, FSDPModule)]
    if variant.asynchronous:
        _prefetch(root, sharded)
    if variant.pieces:
        for module in (root, *sharded):
            module.set_custom_all_gather(GatherInPieces(variant.pieces))
            module.set_custom_reduce_scatter(ExchangeAndSum())


class Checkpointed(nn.Module):
    """A block that keeps only its input, and is computed again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


def _prefetch(root: FSDPModule, blocks: Sequence[FSDPModule]) -> None:
    """Gather asynchronously, two blocks ahead: without CUDA streams nothing overlaps by itself."""
    for module in (root, *blocks):
        module._set_unshard_async_op(True)  # the only switch for it
    for order, tell in ((blocks, FSDPModule.set_modules_to_forward_prefetch), (blocks[::-1], FSDPModule.set_modules_to_backward_prefetch)):
        for place, module in enumerate((root, *order)):
            tell(module, list(order[place : place + _AHEAD]))


class _Works(dist.Work):
    """Several collectives in flight as one. FSDP2 waits only for subclasses of ``Work``."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return all(work.wait() for work in self._works)


class GatherInPieces(AllGather):
    """All-gather in several asynchronous collectives: at two ranks, one large gloo all-gather leaves the wire half idle."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
        rows = output_tensor.view(group.size(), -1)
        edges = [input_tensor.numel() * piece // self.pieces for piece in range(self.pieces + 1)]
        spans = [span for span in itertools.pairwise(edges) if span[0] < span[1]]
        works = _Works(
            [
                dist.all_gather([row[start:stop] for row in rows], input_tensor[start:stop], group=group, async_op=True)
                for start, stop in spans
            ]
        )
        if async_op:
            return works
        works.wait()
        return None


class ExchangeAndSum(ReduceScatter):
    """Reduce-scatter by an exchange and a local sum: gloo's own is an all-reduce inside, which sends twice the bytes.

    FSDP2 leaves no room to do it asynchronously: it reads the result at once.
    """

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        total = received.view(group.size(), -1).sum(0, dtype=torch.float32)
        output_tensor.copy_(total / group.size() if op == dist.ReduceOp.AVG else total)
        return None
