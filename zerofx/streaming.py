"""Optimizer steps on what lies in files: parameters are updated window by window, and only one window is resident.

A step of torch's optimizers walks through ``param_groups`` and treats each parameter by itself. So it is given, in the place of the
optimizer, one that shares everything with it but has its groups in parts: before it goes on to the next part, the last is
written and leaves memory.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerofx import _torch, memory
from zerofx.config import Config
from zerofx.disk import Disk
from zerofx.errors import ConfigError
from zerofx.heap import Heap
from zerofx.mapped import MappedFile, pages_bytes
from zerofx.params import Param
from zerofx.stored import Stored

ParamGroup = dict[str, Any]

_WHERE = "the step of an optimizer, with offload"


class Streaming:
    """Lets every optimizer of one model step window by window through its state, shards and gradients in files.

    State goes into files from an optimizer's first step on; so do the shards that have a whole copy beside them.
    """

    def __init__(
        self,
        disk: Disk,
        stored: Stored,
        config: Config,
        params: Sequence[Param],
        tensors: Sequence[nn.Parameter],
    ) -> None:
        self._stored = stored
        self._disk, self._settings, self._mapped = disk, disk.settings, disk.tensors
        masters = {param.index for param in params if param.has_copy and disk.settings.optimizer is not None}
        self._shards = masters | memory.stored_shards(params, config)
        self._own = {id(tensor): place for place, tensor in enumerate(tensors)}
        self._heap = Heap()
        self._stepped: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        this = weakref.ref(self)

        @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            found, is_compiled = this(), _torch.compiles_what_is_called()
            return None if found is None else found._before(optimizer, args, kwargs, is_compiled)

        @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
        def after(optimizer: Optimizer, *_: Any) -> None:
            if (found := this()) is not None:
                found._after(optimizer)

        for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
            weakref.finalize(self, handle.remove)

    def _own_of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return an optimizer's parameters of this model, in its order."""
        return [tensor for group in optimizer.param_groups for tensor in group["params"] if id(tensor) in self._own]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any, is_compiled: bool) -> tuple[Any, Any] | None:
        own = self._own_of(optimizer)
        if not own:
            return None
        if isinstance(optimizer, LBFGS):
            raise ConfigError(
                "the state of LBFGS is not offloaded",
                where=_WHERE,
                why="it is one of all parameters together, and a step needs all of it",
                remedy="leave offload out, or take an optimizer with a state for each parameter",
            )
        if is_compiled or not _is_separable(optimizer):
            self._set_aside(optimizer, {})
            self._load(optimizer, own)
            return None
        stepping, *rest = args
        return (_sharing(stepping, self._parts(optimizer, stepping.param_groups)), *rest), kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, optimizer: Optimizer) -> None:
        own = self._own_of(optimizer)
        if not own:
            return
        self._mapped.evict(self._locals(optimizer, own))
        self._disk.sync()

    def _parts(self, optimizer: Optimizer, groups: Iterable[ParamGroup]) -> Iterator[ParamGroup]:
        """Yield the groups of a step in parts, one window each."""
        own = [tensor for tensor in self._own_of(optimizer) if tensor.grad is not None]
        sizes = self._sizes_of_new(optimizer, own)
        file = self._set_aside(optimizer, sizes)
        for tensor in own:
            sizes[tensor] = sizes.get(tensor, 0) + sum(map(_bytes, self._resident(optimizer, tensor)))
        places = {id(tensor): place for place, tensor in enumerate(own)}
        for group in groups:
            members = [tensor for tensor in group["params"] if tensor.grad is not None]
            for window in windows([sizes.get(tensor, 0) for tensor in members], self._settings.window_bytes):
                part = [members[place] for place in window]
                stepped = [tensor for tensor in part if id(tensor) in places]
                if stepped:
                    self._load(optimizer, stepped)
                    self._read_ahead(optimizer, own[places[id(stepped[-1])] + 1 :], sizes)
                try:
                    yield {**group, "params": part}
                finally:
                    self._leave(optimizer, stepped, file)

    def _load(self, optimizer: Optimizer, tensors: Sequence[Tensor]) -> None:
        with self._disk.failing():
            self._mapped.load((_local(value) for tensor in tensors for value in self._large(optimizer, tensor)), to_write=True)
            self._mapped.load((_local(tensor.grad) for tensor in tensors if tensor.grad is not None), to_write=False)

    def _read_ahead(self, optimizer: Optimizer, coming: Sequence[nn.Parameter], sizes: Mapping[Tensor, int]) -> None:
        """Let the system read the next window while this one is updated."""
        following = next(windows((sizes[tensor] for tensor in coming), self._settings.window_bytes), range(0))
        self._mapped.read_ahead(self._locals(optimizer, coming[: len(following)]))

    def _leave(self, optimizer: Optimizer, stepped: Sequence[nn.Parameter], file: MappedFile | None) -> None:
        """Put what a window has made into the file, and take the window out of memory."""
        for tensor in stepped:
            for value in self._large(optimizer, tensor):
                if file is not None and _local(value) not in self._mapped and file.left_bytes >= pages_bytes(_bytes(value)):
                    self._move(value, file)
        self._mapped.evict(self._locals(optimizer, stepped))
        self._stepped.setdefault(optimizer, set()).update(map(id, stepped))

    def _set_aside(self, optimizer: Optimizer, new: Mapping[Tensor, int]) -> MappedFile | None:
        """Set aside a file for what a step will make, and for state that lies in memory, which is moved: on all ranks, or on none."""
        waiting = [
            value for tensor in self._own_of(optimizer) for value in self._large(optimizer, tensor) if _local(value) not in self._mapped
        ]
        total = sum(pages_bytes(_bytes(value)) for value in waiting) + sum(new.values())
        if not total:
            self._disk.settle()
            return None

        file = self._disk.set_aside("optimizer" if self._keeps_state else "parameters", total, _WHERE)
        assert file is not None
        for value in waiting:
            self._move(value, file)
            self._mapped.evict([_local(value)])
        return file

    def _sizes_of_new(self, optimizer: Optimizer, own: Iterable[nn.Parameter]) -> dict[Tensor, int]:
        """Return the bytes of files that a step will need for parameters that it has not seen, from one on zeros of their shape."""
        if not self._keeps_state:
            return {}
        seen, found = self._stepped.get(optimizer, set()), dict[Tensor, int]()
        unseen = {id(tensor) for tensor in own if id(tensor) not in seen and not optimizer.state.get(tensor)}
        for group in optimizer.param_groups:
            known: dict[Any, int] = {}
            for tensor in group["params"]:
                if id(tensor) in unseen:
                    kind = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.placements
                    if kind not in known:
                        known[kind] = self._trial(optimizer, group, tensor)
                    found[tensor] = known[kind]
        return found

    def _trial(self, optimizer: Optimizer, group: ParamGroup, tensor: Tensor) -> int:
        zero = torch.zeros_like(tensor)
        zero.grad = torch.zeros_like(zero)
        trial = _sharing(optimizer, [{**group, "params": [zero]}], state=defaultdict(dict))
        _torch.step_without_hooks(trial)
        return sum(pages_bytes(_bytes(value)) for value in self._large(trial, zero))

    def _large(self, optimizer: Optimizer, tensor: Tensor) -> list[Tensor]:
        """Return what belongs into files of a parameter: the tensors of its state, and a shard that is not read in place."""
        shard = [tensor] if self._own.get(id(tensor)) in self._shards else []
        state = [
            value
            for value in optimizer.state.get(tensor, {}).values()
            if isinstance(value, Tensor) and value.ndim and not value.requires_grad and _is_alone(_local(value))
        ]
        return [value for value in shard + state * self._keeps_state if _bytes(value) >= self._settings.min_bytes]

    @property
    def _keeps_state(self) -> bool:
        return self._settings.optimizer is not None

    def _resident(self, optimizer: Optimizer, tensor: Tensor) -> list[Tensor]:
        """Return what a step reads of a parameter from files: what belongs there, and the gradient."""
        grad = [] if tensor.grad is None or _local(tensor.grad) not in self._mapped else [tensor.grad]
        return [*self._large(optimizer, tensor), *grad]

    def _locals(self, optimizer: Optimizer, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [_local(value) for tensor in tensors for value in self._resident(optimizer, tensor)]

    def _move(self, value: Tensor, file: MappedFile) -> None:
        if (place := self._own.get(id(value))) is not None:
            self._stored.move(place, file)
            return
        self._mapped.move(_local(value), file)
        self._heap.freed(_bytes(value))


def windows(sizes_bytes: Iterable[int], most_bytes: int) -> Iterator[range]:
    """Cut a sequence into runs of at most so many bytes; what has more is a run alone."""
    start, end, total = 0, 0, 0
    for place, nbytes in enumerate(sizes_bytes):
        if place > start and total + nbytes > most_bytes:
            yield range(start, place)
            start, total = place, 0
        total, end = total + nbytes, place + 1
    if start < end:
        yield range(start, end)


def _is_separable(optimizer: Optimizer) -> bool:
    """Whether a step treats each parameter by itself: torch's do, of others nothing is known."""
    return type(optimizer).step.__module__.startswith("torch.optim.")


def _sharing(optimizer: Optimizer, groups: Iterable[ParamGroup], **other: Any) -> Optimizer:
    """Return an optimizer of the same class that shares all with another one but what is given."""
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer), param_groups=groups, **other)
    return made


def _local(value: Tensor) -> Tensor:
    return _torch.local_tensor(value) if isinstance(value, DTensor) else value


def _is_alone(local: Tensor) -> bool:
    """Whether a tensor is all of its memory: a view of what another optimizer keeps in one piece must stay one."""
    return local.untyped_storage().nbytes() <= local.nbytes


def _bytes(value: Tensor) -> int:
    """Return the bytes that a rank has of a tensor at most, so that all ranks do the same where shards are uneven."""
    shape = list(value.shape)
    if isinstance(value, DTensor) and isinstance(placement := value.placements[0], Shard):
        shape[placement.dim] = -(-shape[placement.dim] // value.device_mesh.size())
    return math.prod(shape) * value.element_size()
