"""How buckets of parameters travel between the ranks of a group.

``*_start`` and ``*_wait`` are pure functions of tensors. Called eagerly they communicate; recorded by ``lower`` they
become nodes of the graph. So an uncompiled frame and a compiled one move the same bytes and add in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerofx import _torch
from zerofx.groups import Group
from zerofx.params import Param

_NARROW = (torch.bfloat16, torch.float16)
# What stays between the regions of a compiler: the buffer that a collective fills, and what copies the parameters out of it.
AS_THEY_ARE = (torch.ops.aten.new_empty.default, torch.ops.aten.split_with_sizes_copy.default)


def chunks(params: Sequence[Param], group: Group) -> list[list[int]]:
    """Split a bucket into collectives: positions of ``params``, large ones alone, the rest packed together.

    Only parameters of the same dtypes share a collective, and never a replicated one with a sharded one.
    """
    transport = group.transport
    alone: list[int] = []
    packed: dict[tuple[bool, *tuple[torch.dtype, ...]], list[int]] = {}
    for position, param in enumerate(params):
        if param.dim == 0 and param.whole_bytes >= transport.alone_bytes:
            alone.append(position)
        else:
            packed.setdefault(_kind(param), []).append(position)
    for position in sorted(alone, key=lambda position: params[position].whole_bytes):
        pack = packed.get(_kind(params[position]), [])
        size = sum(params[packed_position].whole_bytes for packed_position in pack)
        if 0 < size < transport.least_bytes and params[position].whole_bytes < transport.split_bytes:
            pack.append(position)
            alone.remove(position)
    return [*([position] for position in alone), *packed.values()]


def _kind(param: Param) -> tuple[bool, *tuple[torch.dtype, ...]]:
    return param.dim is None, param.whole_dtype, param.compute_dtype, param.dtype


def is_alone(chunk: Sequence[int], params: Sequence[Param]) -> bool:
    """Whether the collectives of a chunk carry one parameter only: nothing to pack."""
    return len(chunk) == 1 and params[chunk[0]].dim == 0


def arrives_whole(chunk: Sequence[int], params: Sequence[Param], group: Group) -> bool:
    """Whether a chunk's gather writes a parameter as it lies in memory: nothing to copy out of a buffer."""
    return is_alone(chunk, params) and pieces(chunk, params, group) == 1


def pieces(chunk: Sequence[int], params: Sequence[Param], group: Group) -> int:
    """Return how many collectives a chunk is cut into."""
    first = params[chunk[0]]
    is_cut = is_alone(chunk, params) and first.whole_bytes >= group.transport.split_bytes
    return min(group.transport.pieces, first.chunk) if is_cut else 1


def gather_start(shards: Sequence[Tensor], params: Sequence[Param], group: Group) -> list[Tensor]:
    """Launch the all-gather of padded shards; return one buffer per collective, valid after ``gather_wait``."""
    buffers = []
    for chunk in chunks(params, group):
        cast = [shards[position].to(params[position].whole_dtype) for position in chunk]
        packed = cast[0] if is_alone(chunk, params) else _cat([shard.reshape(-1) for shard in cast], 0)
        if params[chunk[0]].dim is None:
            buffers.append(packed)
            continue
        for piece in packed.tensor_split(pieces(chunk, params, group)):
            out = piece.new_empty((piece.shape[0] * group.size, *piece.shape[1:]))
            buffers.append(_all_gather(piece, out, group))
    return buffers


def gather_wait(buffers: Sequence[Tensor], params: Sequence[Param], group: Group) -> list[Tensor]:
    """Wait for ``gather_start`` and return the whole parameters, in the order of ``params``."""
    wholes: dict[int, Tensor] = {}
    left = iter(buffers)
    for chunk in chunks(params, group):
        first = params[chunk[0]]
        arrived = [next(left)] if first.dim is None else _wait(left, pieces(chunk, params, group), group, first.dtype)
        if is_alone(chunk, params):
            if len(arrived) > 1:
                arrived = [torch.cat([piece.unflatten(0, (group.size, -1)) for piece in arrived], 1).flatten(0, 1)]
            wholes[chunk[0]] = _without_padding(arrived[0], first)
            continue
        sizes = [params[position].shard_numel for position in chunk]
        rows = arrived[0].view(1 if first.dim is None else group.size, -1)
        # all at once: a compiler would let what reads a parameter read it from the buffer, and keep that as long
        parts = torch.ops.aten.split_with_sizes_copy.default(rows, sizes, 1) if rows.shape[0] > 1 else rows.split(sizes, 1)
        for position, part in zip(chunk, parts, strict=True):
            wholes[position] = _join(part, params[position])
    return [wholes[position] for position in range(len(params))]


def _all_gather(shard: Tensor, out: Tensor, group: Group) -> Tensor:
    # The form that allocates its result is a coalesced gather inside; on gloo it corrupts the heap now and then when several
    # are in flight under load (torch 2.13: 3 crashes in about 14 stress runs without zerofx, none in 11 of this form).
    gathered: Tensor = torch.ops._c10d_functional.all_gather_into_tensor_out(_as_real(shard), group.size, group.name, out=_as_real(out))
    return gathered


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _without_padding(padded: Tensor, param: Param) -> Tensor:
    return padded.narrow(param.dim, 0, param.shape[param.dim]) if param.dim is not None and param.is_padded else padded


def _join(part: Tensor, param: Param) -> Tensor:
    """Turn one row per rank into the whole parameter."""
    if param.dim is None:
        return part.reshape(param.shape)
    by_rank = part.reshape(param.world_size, *param.shard_shape)
    # a view along any other dimension than 0 would have strides that the model does not expect
    return _without_padding(by_rank.movedim(0, param.dim).reshape(param.padded_shape), param).contiguous()


def _with_padding(grad: Tensor, param: Param) -> Tensor:
    assert param.dim is not None
    missing = param.padded_shape[param.dim] - param.shape[param.dim]
    return torch.nn.functional.pad(grad, [0, 0] * (len(param.shape) - 1 - param.dim) + [0, missing]) if missing else grad


def _cut(grad: Tensor, param: Param) -> Tensor:
    """Turn a padded gradient into one row per rank."""
    assert param.dim is not None
    by_rank: Tensor = grad.unflatten(param.dim, (param.world_size, param.chunk)).movedim(param.dim, 0)
    return by_rank.reshape(param.world_size, -1)


def reduce_start(grads: Sequence[Tensor], params: Sequence[Param], group: Group, dtype: torch.dtype | None, divisor: int) -> list[Tensor]:
    """Launch the reduction of whole gradients in ``dtype`` (None: their own); return one buffer per collective."""
    buffers = []
    for chunk in chunks(params, group):
        cast = [grads[position] if dtype is None or grads[position].is_complex() else grads[position].to(dtype) for position in chunk]
        if params[chunk[0]].dim is None:
            packed = _cat([grad.reshape(-1) for grad in cast], 0)
            if packed.dtype in _NARROW and divisor > 1:
                packed = packed / divisor  # the sum of all ranks may not fit
            buffers.append(torch.ops._c10d_functional.all_reduce(_as_real(packed), "sum", group.name) if group.size > 1 else packed)
            continue
        padded = [_with_padding(grad, params[position]) for grad, position in zip(cast, chunk, strict=True)]
        if is_alone(chunk, params):
            by_rank = padded[0].unflatten(0, (group.size, -1))
            for piece in by_rank.tensor_split(pieces(chunk, params, group), dim=1):
                buffers.append(_reduce_scatter(piece.reshape(-1, *piece.shape[2:]).contiguous(), group))
        else:
            packed = _cat([_cut(grad, params[position]) for grad, position in zip(padded, chunk, strict=True)], 1).contiguous()
            buffers.append(_reduce_scatter(packed, group))
    return buffers


def _reduce_scatter(packed: Tensor, group: Group) -> Tensor:
    """Launch the reduction of one part for each rank, in rank order."""
    packed = _as_real(packed)
    if group.transport.reduce == "reduce_scatter":
        scattered: Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(packed, "sum", group.size, group.name)
        return scattered
    split = [packed.shape[0] // group.size] * group.size
    exchanged: Tensor = torch.ops._c10d_functional.all_to_all_single(packed, split, split, group.name)
    return exchanged


def _as_real(tensor: Tensor) -> Tensor:
    """Let complex numbers travel as pairs: not every collective of every backend carries them."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _wait(buffers: Iterator[Tensor], count: int, group: Group, dtype: torch.dtype) -> list[Tensor]:
    """Wait for the next buffers, of parameters of ``dtype``; a single rank has nothing to wait for."""
    taken = list(itertools.islice(buffers, count))
    if group.size == 1:
        return taken
    arrived = [torch.ops._c10d_functional.wait_tensor(buffer) for buffer in taken]
    return [torch.view_as_complex(buffer) for buffer in arrived] if dtype.is_complex else arrived


def _total(arrived: Tensor, group: Group) -> Tensor:
    """Return the sum over the ranks of what ``_reduce_scatter`` brought."""
    if group.transport.reduce == "reduce_scatter":
        return arrived
    # narrow types add in fp32: one rounding, whatever the number of ranks
    total: Tensor = arrived.unflatten(0, (group.size, -1)).sum(0, dtype=torch.float32 if arrived.dtype in _NARROW else arrived.dtype)
    return total


def reduce_wait(buffers: Sequence[Tensor], params: Sequence[Param], group: Group, divisor: int) -> list[Tensor]:
    """Wait for ``reduce_start`` and return this rank's padded gradient shards: the sum over the ranks, divided."""
    shards: dict[int, Tensor] = {}
    # each sum stands between its wait and the next: a small region, equal wherever such a parameter arrives
    left = iter(buffers)
    for chunk in chunks(params, group):
        first = params[chunk[0]]
        if first.dim is None:
            (total,) = _wait(left, 1, group, first.dtype)
        else:
            arrived = _wait(left, pieces(chunk, params, group), group, first.dtype)
            total = _cat([_total(piece, group) for piece in arrived], 0)
        is_divided = divisor == 1 or (first.dim is None and total.dtype in _NARROW)
        reduced = total.to(first.dtype) if is_divided else total.to(first.dtype) / divisor
        sizes = [params[position].shard_numel for position in chunk]
        parts = [reduced] if len(chunk) == 1 else reduced.view(-1).split(sizes)
        for position, part in zip(chunk, parts, strict=True):
            shards[position] = part.view(params[position].shard_shape)
    return [shards[position] for position in range(len(params))]


def own_part(value: Tensor, group: Group) -> Tensor:
    """Return a copy of this rank's part of a contiguous tensor, whose elements divide among the ranks, in one dimension."""
    return value.view(group.size, -1)[group.rank].clone()


def whole_start(part: Tensor, group: Group) -> Tensor:
    """Launch the gather of what ``own_part`` gave each rank."""
    return _all_gather(part, part.new_empty(part.numel() * group.size), group)


def whole_wait(buffer: Tensor, shape: Sequence[int], dtype: torch.dtype, group: Group) -> Tensor:
    """Wait for ``whole_start`` and return the value that all ranks had."""
    return _wait(iter([buffer]), 1, group, dtype)[0].view(shape)


def total_over_ranks(value: Tensor, group: Group) -> Tensor:
    """Return the sum of a small tensor over the ranks, outside of any program."""
    total: Tensor = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(value, "sum", group.name))
    return total


@dataclass(slots=True)
class Refresh:
    """The gather of updated parameters into their persistent whole copies (stages 1 and 2), in flight."""

    params: tuple[Param, ...]
    wholes: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    group: Group

    def wait(self) -> None:
        """Finish: after this the whole copies hold the parameters of all ranks."""
        left = iter(self.buffers)
        for chunk in chunks(self.params, self.group):
            if arrives_whole(chunk, self.params, self.group):
                _wait(left, 1, self.group, self.params[chunk[0]].dtype)
                continue
            parts = [self.params[position] for position in chunk]
            buffers = list(itertools.islice(left, pieces(chunk, self.params, self.group)))
            for position, whole in zip(chunk, gather_wait(buffers, parts, self.group), strict=True):
                self.wholes[position].copy_(whole)
        torch.autograd.graph.increment_version(list(self.wholes))


def refresh_start(wholes: Sequence[Tensor], shards: Sequence[Tensor], params: Sequence[Param], group: Group) -> Refresh:
    """Launch the gather of padded shards into padded whole copies; some arrive in place, without a copy."""
    buffers = []
    for chunk in chunks(params, group):
        if arrives_whole(chunk, params, group):
            param = params[chunk[0]]
            cast, whole = shards[chunk[0]].to(param.compute_dtype), wholes[chunk[0]]
            padded = whole.as_strided(param.padded_shape, whole.stride())
            buffers.append(_all_gather(cast, padded, group))
        else:
            parts = [params[position] for position in chunk]
            buffers.extend(gather_start([shards[position] for position in chunk], parts, group))
    return Refresh(tuple(params), tuple(wholes), tuple(buffers), group)


def new_whole(param: Param, device: torch.device) -> Tensor:
    """Allocate a persistent whole copy, contiguous, with room behind it where the padding of the last shards may arrive in place."""
    room = torch.empty(param.padded_shape if param.dim == 0 else param.shape, dtype=param.compute_dtype, device=device)
    return room.narrow(0, 0, param.shape[0]) if param.dim == 0 else room


def import_functional() -> None:
    """Register the fake kernels that tracing needs."""
    _torch.import_collectives()
