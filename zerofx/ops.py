"""The marker ops that carry meaning through tracing, and the events that passes put in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from zerofx import collectives
from zerofx.groups import Group
from zerofx.params import Param


def _describe(index: int, shape: Sequence[int], dim: int, dtype: torch.dtype, master: torch.dtype, world_size: int) -> Param:
    return Param(index, (f"#{index}",), tuple(shape), master, dtype, world_size, None if dim < 0 else dim)


@torch.library.custom_op("zerofx::unshard", mutates_args=())
def unshard(
    shard: Tensor, whole: Tensor | None, index: int, shape: Sequence[int], dim: int, dtype: torch.dtype, world_size: int, group: str
) -> Tensor:
    """Mark the reading of parameter ``index``: its whole value in ``dtype`` from a padded shard, or from its whole copy.

    Executed, it gathers; traced, it is the node that the passes expand. ``dim`` is -1 for a replicated parameter.
    """
    if whole is not None:
        return whole.clone()
    param = _describe(index, shape, dim, dtype, shard.dtype, world_size)
    peers = Group(group, world_size, -1, "nccl" if shard.is_cuda else "gloo")
    return collectives.gather_wait(collectives.gather_start([shard], [param], peers), [param], peers)[0].clone()


@unshard.register_fake
def _(
    shard: Tensor, whole: Tensor | None, index: int, shape: Sequence[int], dim: int, dtype: torch.dtype, world_size: int, group: str
) -> Tensor:
    return shard.new_empty(shape, dtype=dtype)


@torch.library.custom_op("zerofx::reduce_grad", mutates_args=())
def reduce_grad(grad: Tensor, index: int, shape: Sequence[int], dim: int, dtype: torch.dtype, world_size: int, group: str) -> Tensor:
    """Mark the gradient of parameter ``index``: whole on this rank, to be averaged over ranks into a padded shard of ``dtype``."""
    param = _describe(index, shape, dim, grad.dtype, dtype, world_size)
    peers = Group(group, world_size, -1, "nccl" if grad.is_cuda else "gloo")
    started = collectives.reduce_start([grad], [param], peers, None, world_size)
    return collectives.reduce_wait(started, [param], peers, world_size)[0].clone()


@reduce_grad.register_fake
def _(grad: Tensor, index: int, shape: Sequence[int], dim: int, dtype: torch.dtype, world_size: int, group: str) -> Tensor:
    return grad.new_empty(_describe(index, shape, dim, grad.dtype, dtype, world_size).shard_shape, dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, _, index, shape, dim, _, world_size, group = inputs
    ctx.geometry = (index, list(shape), dim, shard.dtype, world_size, group)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.zerofx.reduce_grad(grad, *ctx.geometry), None, None, None, None, None, None, None


unshard.register_autograd(_backward, setup_context=_setup_context)

UNSHARD = torch.ops.zerofx.unshard.default
REDUCE_GRAD = torch.ops.zerofx.reduce_grad.default


def _event(name: str) -> NoReturn:
    raise RuntimeError(f"{name} is an event of a program under compilation; `lower` replaces it before anything runs")


# Events. They exist between the passes only; each node that calls one carries a Mark.


def gather_start(shards: Sequence[Tensor]) -> Any:
    """Launch one bucket's all-gather."""
    _event("gather_start")


def gather_wait(token: Any) -> Any:
    """Wait for one bucket's all-gather; the result is indexed by position in the bucket."""
    _event("gather_wait")


def release(whole: Tensor) -> None:
    """End the life of a whole parameter: nothing uses it after this."""
    _event("release")


def reduce_start(grads: Sequence[Tensor]) -> Any:
    """Launch one bucket's gradient reduction."""
    _event("reduce_start")


def reduce_wait(token: Any) -> Any:
    """Wait for one bucket's gradient reduction; the result is indexed by position in the bucket."""
    _event("reduce_wait")


def stash(value: Tensor) -> Tensor:
    """Put a value into the form in which it is kept for the backward."""
    _event("stash")


def restore_start(kept: Tensor) -> Any:
    """Launch what brings a stashed value back."""
    _event("restore_start")


def restore_wait(token: Any) -> Tensor:
    """Wait for a stashed value."""
    _event("restore_wait")


# Steps that run beside the compiled regions, called by the lowered graph.


def refresh_wait(arrivals: Any, bucket: int) -> None:
    """Wait until the whole copies of one bucket hold the updated parameters (stages 1 and 2); nothing pending, nothing done."""
    arrivals.wait(bucket)


def add_pending(grad: Tensor, pending: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add what backwards under ``no_sync`` gathered up on this rank, in the parameter's dtype, to this backward's gradient."""
    return (grad if pending is None else pending + grad).to(dtype)


def read_ahead(stored: Any, members: tuple[int, ...]) -> None:
    """Let the system read shards from disk beside what goes on."""
    stored.read_ahead(members)


def load(stored: Any, members: tuple[int, ...]) -> None:
    """Wait until shards that lie on disk are in memory."""
    stored.load(members)


def evict(stored: Any, members: tuple[int, ...]) -> None:
    """Take shards that lie on disk out of memory."""
    stored.evict(members)


def store(stored: Any, gradient: Tensor, index: int) -> Tensor:
    """Put a reduced gradient on disk."""
    result: Tensor = stored.store(index, gradient)
    return result


def check_replicas(replicas: Any, value: Tensor, number: int) -> None:
    """Check, once, that a value that each rank of a group keeps a part of is the same on all of them."""
    replicas.check(number, value)


def spill_write(spill: Any, value: Tensor, number: int) -> Tensor:
    """Write an activation to its file, and return what stands for it."""
    ticket: Tensor = spill.write(number, value)
    return ticket


def spill_start(spill: Any, ticket: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Begin to read an activation back."""
    return spill.start(ticket, shape, dtype)


def spill_wait(reading: Any, spill: Any) -> Tensor:
    """Return an activation when it is read."""
    value: Tensor = spill.wait(reading)
    return value
