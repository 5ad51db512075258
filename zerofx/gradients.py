"""Gradients of one sharded model: reduced over the ranks, or gathered up whole under ``no_sync``."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement

from zerofx import _torch, collectives
from zerofx.agreement import Agreement, Unit
from zerofx.config import Config
from zerofx.groups import Group
from zerofx.params import Param
from zerofx.program import Sync


class Gradients:
    """Turns what backwards leave on this rank into DTensors of the parameters' logical shape."""

    def __init__(self, config: Config, group: Group, params: tuple[Param, ...], tensors: list[nn.Parameter], agreement: Agreement) -> None:
        self._config, self._group, self._params, self._tensors, self._agreement = config, group, params, tensors, agreement
        self.synchronize = True
        self._kept: dict[int, Tensor] = {}
        self._others: dict[int, Tensor] = {}  # shards of gradients that only other ranks computed
        self._specs = [_spec(tensor) for tensor in tensors]

    @property
    def keeps_whole(self) -> bool:
        """Whether a backward now only gathers up whole gradients: stages 0 and 1 under ``no_sync``."""
        return not self.synchronize and self._config.stage <= 1 and self._group.size > 1

    def forget(self) -> None:
        """Drop what a backward that raised left behind."""
        self._kept.clear()
        self._others.clear()

    def sync(self, indices: Sequence[int]) -> Sync:
        """Return what a backward that gives gradients for these parameters does with them."""
        if self.keeps_whole:
            return Sync.KEEP
        return Sync.REDUCE_KEPT if any(self._has_pending(index) for index in indices) else Sync.REDUCE

    def keep(self, index: int, grad: Tensor) -> None:
        """Gather up a whole gradient of this backward."""
        kept = self._kept.get(index)
        self._kept[index] = owned(grad) if kept is None else kept + grad

    def to_reduce(self, index: int, grad: Tensor) -> Tensor | None:
        """Return what a whole gradient that is complete adds to the reduction: itself and what was kept; None where it is kept too."""
        if self.keeps_whole:
            self.keep(index, grad)
            return None
        pending = self.take_pending(index)
        return grad if pending is None else (pending + grad).to(self._config.sent_dtype(grad.dtype))

    def take_pending(self, index: int) -> Tensor | None:
        """Take the whole gradient that earlier backwards under ``no_sync`` left in ``.grad``."""
        if not self._has_pending(index):
            return None
        tensor = self._tensors[index]
        assert tensor.grad is not None
        pending = _torch.local_tensor(tensor.grad)
        tensor.grad = None
        return pending

    def has_leftovers(self, indices: Sequence[int]) -> bool:
        """Whether backwards under ``no_sync`` left gradients for other parameters than these."""
        return self._config.stage <= 1 and any(self._has_pending(index) for index in {*range(len(self._tensors))}.difference(indices))

    def _has_pending(self, index: int) -> bool:
        grad = self._tensors[index].grad
        return isinstance(grad, DTensor) and grad.placements[0].is_partial()

    def collect(self, locals_: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Turn the padded gradient shards of one forward into DTensors of the parameters' logical shape."""
        if not self.keeps_whole:
            locals_ = self._with_leftovers(locals_)
            locals_ = self._with_others(locals_, self._agreement.end())
        found: list[Tensor | None] = []
        taken = set()
        for index, local in enumerate(locals_):
            placement: Placement | None = None
            grad = self._kept.pop(index, None)
            if grad is not None:
                placement = Partial("avg" if self._config.reduce == "mean" else "sum")
            elif local is not None:
                grad = self._unpad(index, owned(local))
            else:
                found.append(None)
                continue
            # A graph computes equal gradients once; each adds up in memory of its own.
            memory = grad.untyped_storage()._cdata, grad.storage_offset()
            grad = grad.clone() if memory in taken else grad
            taken.add(memory)
            if placement is not None:
                self._take_reduced(index, grad)
            found.append(self.dtensor(index, grad, placement))
        return found

    def _take_reduced(self, index: int, whole: Tensor) -> None:
        """Put what an earlier backward reduced into a whole gradient that gathers up: autograd would add the two by communicating.

        As much as the reduction will give back, on the rank that has it, so that other ranks need not do the same. Of what every rank
        has, only zeros can be taken: what ``zero_grad(set_to_none=False)`` leaves.
        """
        tensor, param = self._tensors[index], self._params[index]
        if not isinstance(tensor.grad, DTensor) or tensor.grad.placements != self._specs[index].placements:
            return
        reduced = _torch.local_tensor(tensor.grad)
        if param.dim is not None:
            start, count = param.rows(self._group.rank)
            whole.narrow(param.dim, start, count).add_(reduced, alpha=self._config.divisor(self._group.size))
        elif reduced.any():
            return
        tensor.grad = None

    def _with_leftovers(self, locals_: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Reduce what earlier backwards under ``no_sync`` left for parameters that this one did not use."""
        result = list(locals_)
        for index in range(len(result)):
            if result[index] is None and (pending := self.take_pending(index)) is not None:
                result[index] = self.reduce(index, pending)
        return result

    def reduce(self, index: int, grad: Tensor) -> Tensor:
        """Reduce one whole gradient over the ranks, outside a compiled graph; return this rank's padded shard."""
        if self._group.size == 1:
            return grad.to(self._params[index].dtype)
        return self._agreement.turn(Unit((("reduce", (index,)),)), lambda: self._reduce([grad], [self._params[index]])[0])

    def _reduce(self, grads: Sequence[Tensor], params: Sequence[Param]) -> list[Tensor]:
        divisor = self._config.divisor(self._group.size)
        buffers = collectives.reduce_start(grads, params, self._group, self._config.reduce_dtype, divisor)
        return collectives.reduce_wait(buffers, params, self._group, divisor)

    def take_part(self, members: Sequence[int]) -> None:
        """Take part in the reduction of gradients that only other ranks have, and keep this rank's shards of the averages."""
        params = [self._params[index] for index in members]
        nothing = [
            torch.zeros(param.shape, dtype=param.compute_dtype, device=_torch.local_tensor(self._tensors[param.index]).device)
            for param in params
        ]
        for index, shard in zip(members, self._reduce(nothing, params), strict=True):
            earlier = self._others.get(index)
            self._others[index] = shard if earlier is None else earlier + shard

    def _with_others(self, locals_: Sequence[Tensor | None], needless: Container[int]) -> list[Tensor | None]:
        """Add what other ranks computed and this one did not; what no rank computed stays None."""
        result = list(locals_)
        for index, shard in self._others.items():
            if index in needless:
                continue
            local = result[index]
            result[index] = shard if local is None else local + shard
        self._others.clear()
        return result

    def spread_overflow(self, grads: Sequence[Tensor | None]) -> None:
        """Make an overflow in any rank's shards show in the replicated gradients too, which every rank holds.

        A GradScaler whose first gradient is replicated looks at this rank's gradients only, and would skip on some ranks but not on
        others: what it takes for the same on all ranks has to be so.
        """
        trained = [param.dim is None for param, tensor in zip(self._params, self._tensors, strict=True) if tensor.requires_grad]
        if self.keeps_whole or all(trained) or not any(trained):
            return
        here = [(param, _torch.local_tensor(grad)) for param, grad in zip(self._params, grads, strict=True) if grad is not None]
        shards = [local for param, local in here if param.dim is not None and local.numel()]
        zeros = [(norm * 0).float() for norm in torch._foreach_norm(shards, torch.inf)] if shards else []  # NaN where one is not finite
        none = torch.zeros((), device=_torch.local_tensor(self._tensors[0]).device)
        overflow = collectives.total_over_ranks(torch.stack([none, *zeros]).sum(), self._group)
        for param, local in here:
            if param.dim is None and local.is_floating_point():
                local.add_(overflow)

    def _unpad(self, index: int, padded: Tensor) -> Tensor:
        param = self._params[index]
        if not param.is_padded or param.dim is None:
            return padded
        return padded.narrow(param.dim, 0, param.rows(self._group.rank)[1])

    def dtensor(self, index: int, local: Tensor, placement: Placement | None) -> Tensor:
        """Wrap this rank's part of a parameter's whole; ``placement`` None: cut as the parameter is."""
        spec = self._specs[index]
        if placement is not None:
            spec = _torch.DTensorSpec(spec.mesh, (placement,), tensor_meta=spec.tensor_meta)
        return DTensor(local, spec, requires_grad=False)


def _spec(tensor: Tensor) -> Any:
    assert isinstance(tensor, DTensor)
    return tensor._spec


def owned(grad: Tensor) -> Tensor:
    """Return a gradient that nobody else holds, dense in memory: what users accumulate into and optimizers change in place."""
    return grad if grad.is_contiguous() and not _torch.is_shared(grad) else grad.clone(memory_format=torch.contiguous_format)
