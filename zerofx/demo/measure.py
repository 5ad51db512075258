"""Measure what one rank holds and sends in a step of training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerofx.module import binding_of
from zerofx.traffic import TrafficCounter


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes on one rank in the last step: model states as their tensors hold them, whole parameters, and what was sent."""

    parameters: int
    gradients: int
    optimizer: int
    whole_peak: int
    has_masters: bool
    largest_parameter: int
    sent: dict[str, int]


def kept_wholes(model: nn.Module) -> list[Tensor]:
    """Return the whole copies that a rank keeps beside its shards, at stages 1 and 2."""
    binding = binding_of(model)
    assert binding is not None
    return [whole for whole in binding.runtime.wholes.copies if whole is not None]


def watch_wholes(model: nn.Module, counter: TrafficCounter) -> None:
    """Let a counter know the parameters that are whole all the time."""
    for tensor in [*kept_wholes(model), *model.parameters()]:
        if not isinstance(tensor, DTensor):
            counter.watch(tensor)
        elif tensor.placements[0].is_replicate():
            counter.watch(tensor.to_local().detach())


def measure(model: nn.Module, optimizer: torch.optim.Optimizer, counter: TrafficCounter) -> Measured:
    """Add up what one rank holds between an optimizer's step and the next forward."""
    shards_bytes = storage_bytes(model.parameters())
    wholes_bytes = storage_bytes(kept_wholes(model))
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return Measured(
        parameters=wholes_bytes or shards_bytes,
        gradients=storage_bytes(tensor.grad for tensor in model.parameters() if tensor.grad is not None),
        # Beside whole copies the shards are the optimizer's master weights.
        optimizer=storage_bytes(state) + (shards_bytes if wholes_bytes else 0),
        whole_peak=counter.whole_peak_bytes,
        has_masters=wholes_bytes > 0,
        largest_parameter=max(tensor.numel() * tensor.element_size() for tensor in model.parameters()),
        sent=counter.sent_bytes,
    )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct local storages of tensors."""
    storages = [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
