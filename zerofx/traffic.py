"""Count what really moves: the collectives that one rank issues, compiled code included, in bytes sent."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

# Private, but the documented way to see every operator that runs; nothing public replaces it.
from torch.utils._python_dispatch import TorchDispatchMode

# Kind of each collective, and which argument holds what this rank contributes. The functional ones are what compiled code
# runs, the c10d ones what ``torch.distributed`` runs. ``all_to_all`` is a reduce-scatter without its local sum (gloo's lowering).
_COLLECTIVES: dict[str, tuple[str, int]] = {
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("reduce_scatter", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
    "_c10d_functional::isend": ("send", 0),
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::allgather_": ("all_gather", 1),
    "c10d::allgather_coalesced_": ("all_gather", 1),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("reduce_scatter", 1),
    "c10d::alltoall_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::send": ("send", 0),
}


def sent_share(kind: str, world_size: int) -> float:
    """Return the bytes that a rank sends per byte it contributes to a collective, with the best algorithm known."""
    if kind == "all_gather":
        return world_size - 1
    if kind == "reduce_scatter":
        return (world_size - 1) / world_size
    return 2 * (world_size - 1) / world_size if kind == "all_reduce" else 1


class TrafficCounter(TorchDispatchMode):
    """Count the bytes this rank sends, and the bytes of whole parameters alive, while the mode is active.

    ``sent_bytes`` goes by kind of collective. ``whole_bytes`` are alive now and ``whole_peak_bytes`` were at most: the storages
    that all-gathers wrote, each from its launch until it is freed, and those that ``watch`` was told of.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.world_size = world_size
        self.sent_bytes: dict[str, int] = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
        self.launches: dict[str, int] = {}
        self.whole_bytes = 0
        self.whole_peak_bytes = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled code compiled under this mode; the collectives it runs are seen all the same."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        # DTensor takes its own operators apart first; the collectives inside come back here as plain tensors.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", None)
        if packet is not None and (found := _COLLECTIVES.get(packet._qualified_op_name)) is not None:
            kind, position = found
            self._count(kind, args[position], result if packet._qualified_op_name.startswith("_c10d_functional") else args[0])
        return result

    def _count(self, kind: str, contributed: Any, written: Any) -> None:
        size_bytes = sum(tensor.nbytes for tensor in _tensors(contributed))
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + round(size_bytes * sent_share(kind, self.world_size))
        self.launches[kind] = self.launches.get(kind, 0) + 1
        if kind == "all_gather":
            for tensor in _tensors(written):
                self.watch(tensor)

    def watch(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, once, among the whole parameters until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size_bytes = storage.nbytes()

        def release(_: object) -> None:
            del self._alive[key]
            self.whole_bytes -= size_bytes

        self._alive[key] = weakref.ref(storage, release)
        self.whole_bytes += size_bytes
        self.whole_peak_bytes = max(self.whole_peak_bytes, self.whole_bytes)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
