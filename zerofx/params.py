"""Shard arithmetic: how one parameter is cut over the ranks. Pure; no tensors, no communication."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Not worth a shard where some rank would get nothing of it.
_SMALL_NUMEL = 2**16


def choose_dim(shape: tuple[int, ...], world_size: int) -> int | None:
    """Choose the dimension to shard, or None to replicate.

    Dimension 0 if every rank gets rows of it; then the first that divides evenly, else the longest, of which every rank gets some: a
    rank without rows has no infinity norm. Where there is none, a small parameter stays whole, and a large one leaves ranks without.
    """
    longer = [dim for dim, size in enumerate(shape) if size >= world_size]
    if world_size == 1 or math.prod(shape) == 0 or not longer:
        return None
    shared = [dim for dim in longer if (world_size - 1) * -(-shape[dim] // world_size) < shape[dim]]
    if not shared and math.prod(shape) <= _SMALL_NUMEL:
        return None
    candidates = shared or longer
    even = [dim for dim in candidates if shape[dim] % world_size == 0]
    return 0 if 0 in candidates else even[0] if even else max(candidates, key=lambda dim: shape[dim])


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of the model: its names, logical shape, and how it is cut. Equal on all ranks.

    Of one that ``stays``, a whole copy outlives the step, and is gathered again when its shards changed. ``gather_dtype`` is what a
    graph gathers that reads it in that dtype only (None: the compute dtype, which is also that of its gradient).
    """

    index: int
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    world_size: int
    dim: int | None
    stays: bool = False
    gather_dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        """The first qualified name."""
        return self.names[0]

    @property
    def chunk(self) -> int:
        """Rows of one padded shard along the sharded dimension."""
        assert self.dim is not None
        return -(-self.shape[self.dim] // self.world_size)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one rank's shard with padding: the same on every rank."""
        return self.shape if self.dim is None else self._with_rows(self.chunk)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter with the padding of its last shards."""
        return self.shape if self.dim is None else self._with_rows(self.chunk * self.world_size)

    @property
    def shard_numel(self) -> int:
        """Elements of one padded shard."""
        return math.prod(self.shard_shape)

    @property
    def has_copy(self) -> bool:
        """Whether a whole copy beside its shards outlives the step."""
        return self.stays and self.dim is not None

    @property
    def whole_dtype(self) -> torch.dtype:
        """The dtype that is gathered."""
        return self.gather_dtype or self.compute_dtype

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole copy, padding included."""
        return self.bytes_in(self.whole_dtype)

    def bytes_in(self, dtype: torch.dtype | None) -> int:
        """Return the bytes of the whole, padding included, in the dtype that travels; None, or complex: the compute dtype."""
        travels = self.compute_dtype if dtype is None or self.dtype.is_complex else dtype
        return math.prod(self.padded_shape) * travels.itemsize

    @property
    def is_padded(self) -> bool:
        """Whether the shards hold more rows than the parameter."""
        return self.padded_shape != self.shape

    def rows(self, rank: int) -> tuple[int, int]:
        """Return (first row, row count) of a rank's shard along the sharded dimension."""
        assert self.dim is not None
        size = self.shape[self.dim]
        first = min(rank * self.chunk, size)
        return first, min(self.chunk, size - first)

    def _with_rows(self, rows: int) -> tuple[int, ...]:
        assert self.dim is not None
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])


def block_of(name: str) -> str:
    """Return the repeated block that a qualified name belongs to: up to its first number, else its first part.

    >>> block_of("transformer.h.3.mlp.c_fc.weight")
    'transformer.h.3'
    """
    parts = name.split(".")
    for position, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return parts[0] if len(parts) > 1 else ""
