"""Torch's own modes, for parameters whose memory comes and goes: it is there before anything reaches for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zerofx import _torch
from zerofx.storages import Storages

# In-place operators that read nothing of what they write.
_OVERWRITES = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
        *("copy_", "fill_", "zero_"),
    )
)
# These read nothing; torch makes other views only of memory that is there.
_ALIASES = frozenset((torch.ops.aten.alias, torch.ops.aten.detach, torch.ops.aten.view))
# What reaches a tensor's memory without an operator.
_ADDRESSES: frozenset[Any] = frozenset(
    (
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor._typed_storage,
        Tensor.const_data_ptr,  # type: ignore[attr-defined]
        Tensor.data_ptr,
        Tensor.is_shared,
        Tensor.numpy,
        Tensor.share_memory_,
        Tensor.storage,
        Tensor.tolist,
        Tensor.untyped_storage,
        Tensor.__cuda_array_interface__.__get__,
    )
)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class Operators(TorchDispatchMode):
    """Has the memory of a parameter there before any operator that works on it."""

    def __init__(self, storages: Storages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "overloadpacket", None) not in _ALIASES:
            with _torch.without_modes():
                self._prepare(func, args, kwargs)
        return func(*args, **kwargs)

    def _prepare(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        used = [storage for tensor in tensors if (storage := self._storages.find(tensor)) is not None]
        if used:
            overwrites = len(used) == 1 and func.overloadpacket in _OVERWRITES and self._storages.is_all(args[0])
            self._storages.use(used, gather=not overwrites)


class Addresses(TorchFunctionMode):
    """Keeps the memory of a parameter whose address is handed out, and sees one move to other memory."""

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self._storages = storages

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        storage = self._storages.find(args[0]) if args and isinstance(args[0], Tensor) else None
        if storage is not None and func in _ADDRESSES:
            with _torch.without_modes():
                self._storages.pin(storage)
        elif storage is not None and func is Tensor.__deepcopy__:  # copies the storage, and how large that is it asks unseen
            with _torch.without_modes():
                self._storages.use([storage], gather=True)
        result = func(*args, **(kwargs or {}))
        if storage is not None and func == _SET_DATA:
            with _torch.without_modes():
                self._storages.add(args[0])
        return result
