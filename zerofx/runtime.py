"""The state of one sharded model while it trains, whatever runs its forward."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerofx import _torch, collectives, groups, layout
from zerofx.agreement import Agreement, Unit
from zerofx.config import Config
from zerofx.disk import Disk
from zerofx.divergence import EVALUATION, KEEPING, TRAINING
from zerofx.errors import ShardingError, ZerofxError
from zerofx.gradients import Gradients
from zerofx.groups import Group
from zerofx.membership import Membership, Modules
from zerofx.module import meets_shard
from zerofx.offload import Offload
from zerofx.params import Param
from zerofx.render import Schedule
from zerofx.rendezvous import Rendezvous
from zerofx.stored import Stored
from zerofx.streaming import Streaming
from zerofx.vacancies import Vacancies
from zerofx.wholes import Versions, WholeCopies

Forward = Callable[..., Any]


class Runtime(ABC):
    """Owns the shards of one model and runs its forward.

    Inside a forward, ``read`` gives whole parameters; outside, modules show their DTensor shards. Subclasses are the mechanisms:
    compiled graphs (``backend``), hooks on submodules (``hooks``).
    """

    def __init__(
        self,
        config: Config,
        mesh: DeviceMesh,
        group: Group,
        params: tuple[Param, ...],
        tensors: list[nn.Parameter],
        modules: Modules,
    ) -> None:
        self.config, self.mesh, self.group, self.params = config, mesh, group, params
        self.tensors, self._modules = tensors, modules
        self.membership = Membership(modules, params, tensors)
        self.saving: Future[None] | None = None
        self.in_forward = False
        self._reads: list[tuple[int, Tensor, int]] = []
        self.geometry = [
            (param.index, list(param.shape), -1 if param.dim is None else param.dim, param.compute_dtype, group.size, group.name)
            for param in params
        ]
        self.shards: list[Tensor] = []
        self._shards_again: list[Tensor] = []  # while a backward computes parts of its forward again
        self.device = _torch.local_tensor(tensors[0]).device
        self.vacancies = Vacancies(modules, is_open=any(tensor.is_meta for tensor in tensors))
        self.versions = Versions(tensors)
        self.wholes = WholeCopies(config, group, params, tensors, self.versions)
        self.agreement = self._new_agreement()
        self.gradients = Gradients(config, group, params, tensors, self.agreement)
        self._padded = [layout.with_room(param, tensor, group) for param, tensor in zip(params, tensors, strict=True)]
        self.disk = self.new_disk()
        self.stored: Stored | None = None
        if self.disk is not None:
            self.stored = Stored(self.disk, config, params, tensors, self._padded)
            self._streaming = Streaming(self.disk, self.stored, config, params, tensors)

    def __getstate__(self) -> tuple[Any, ...]:
        """A copy starts anew: graphs, communication in flight and gathered gradients stay behind."""
        return self.config, self.mesh, self.params, self.tensors, self._modules

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        config, mesh, params, tensors, modules = state
        self.__init__(config, mesh, groups.group_of(mesh), params, tensors, modules)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        copied = object.__new__(type(self))
        memo.update({id(self): copied, id(self.mesh): self.mesh, id(self.config): self.config})
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    @property
    def inside(self) -> bool:
        """Whether modules show whole parameters: in a forward, and where a backward computes parts of one again, uncompiled."""
        return self.in_forward or (not torch.compiler.is_compiling() and _torch.is_recomputing())

    @property
    def root(self) -> nn.Module:
        """The model."""
        return self._modules[0][1]

    # ---------------------------------------------------------------- forward

    def forward(self, plain: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of the root module, or another of its methods. Called inside another such call, run it plainly."""
        if self.in_forward:
            return plain(module, *args, **kwargs)
        self.vacancies.check()
        if _torch.local_tensor(self.tensors[0]).device != self.device:
            self.__setstate__(self.__getstate__())  # what belongs to the shards must be where they are now
        self.agreement.begin(EVALUATION if not self._trains() else KEEPING if self.gradients.keeps_whole else TRAINING)
        try:
            result = self._forward(plain, module, args, kwargs)
            self.agreement.end()
            return result
        except BaseException as error:
            self.agreement.fail(error)
            raise

    def _forward(self, plain: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.disk is not None and self.stored is not None:
            self.disk.settle(waits=False)  # here all ranks learn of it
            self.stored.prepare()
        self.membership.check()
        self.gradients.forget()
        self._shards_again = []  # of a backward that raised
        self.shards = self._enter()
        self._refresh()
        self.in_forward = True
        try:
            if self.config.param_dtype is not None and self.config.cast_forward_inputs:
                args, kwargs = _cast((args, kwargs), self.config.param_dtype)
            result = self.run(plain, module, args, kwargs)
            self._check_reads()
            return result if self.config.output_dtype is None else _cast(result, self.config.output_dtype)
        except RuntimeError as error:
            if meets_shard(error):
                raise ShardingError(
                    "the forward meets a shard where it expects a whole parameter",
                    where=f"the {plain.__name__} of {type(module).__name__}",
                    why="reading module.name gives the whole parameter; parameters(), lists of parameters and other methods give shards",
                    remedy="read each parameter by its name, from its module, inside forward",
                ) from error
            raise
        finally:
            self.in_forward = False
            self.shards = []
            self._reads = []
            self.agreement.guard(self.wholes.arrivals.finish)
            if self.disk is not None:
                self.disk.tensors.evict_all()

    def new_disk(self) -> Disk | None:
        """Return the files for what is offloaded, None where nothing is."""
        offload = self.config.offload
        return Disk(offload, self.group) if isinstance(offload, Offload) and offload.keeps_states else None

    @abstractmethod
    def run(self, plain: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the root's own forward, or another of its methods, by this mechanism."""

    @abstractmethod
    def schedule(self) -> Schedule | None:
        """Return what the last training step ran (or forward, where none was trained); None before the first."""

    @property
    def waited_s(self) -> float | None:
        """What forwards and backwards have spent waiting for communication so far, None where nobody measures it."""
        return None

    def read(self, index: int) -> Tensor:
        """Return the whole parameter."""
        shards = self.shards if self.in_forward else self._enter_again()
        value: Tensor = _EagerUnshard.apply(self, index, shards[index])  # type: ignore[no-untyped-call]
        return self.noted(index, value)

    def value(self, index: int, shard: Tensor) -> Tensor:
        """Return a parameter's whole value, outside of autograd: its whole copy, or the shard that is the whole, or gathered."""
        param, copy = self.params[index], self.wholes.copies[index]
        if copy is not None:
            self.wholes.arrive(index)
            return copy.detach()
        return shard.detach().to(param.compute_dtype) if param.dim is None else self.gather(param, shard)

    def gather(self, param: Param, shard: Tensor) -> Tensor:
        """Gather a sharded parameter that has no whole copy."""
        return self.agreement.turn(Unit((("gather", (param.index,)),)), lambda: self._gather([param], [shard])[0])

    def _gather(self, params: Sequence[Param], shards: Sequence[Tensor]) -> list[Tensor]:
        """Gather now, outside a compiled graph."""
        with nullcontext() if self.stored is None else self.stored.resident([param.index for param in params]):
            return collectives.gather_wait(collectives.gather_start(shards, params, self.group), params, self.group)

    def _refresh(self) -> None:
        """Launch the gathers of the whole copies that are stale."""
        if stale := self.wholes.stale():
            if self.stored is not None:
                self.stored.load(index for bucket in stale for index in self.wholes.buckets[bucket])
            unit = Unit(tuple(("refresh", self.wholes.buckets[bucket]) for bucket in stale))
            self.agreement.turn(unit, lambda: self.wholes.refresh(stale, self.shards))

    def take_part(self, kind: str, members: tuple[int, ...]) -> None:
        """Take part in communication that other ranks need and this one does not, behind all that this one has begun."""
        self.wholes.arrivals.launch_all()
        with torch.no_grad():
            if kind == "reduce":
                self.gradients.take_part(members)
            elif kind == "gather":
                self._gather([self.params[index] for index in members], [self.local_shard(index) for index in members])
            else:
                bucket = self.wholes.buckets.index(members)
                self.wholes.refresh([bucket], self.local_shards())
                self.wholes.arrivals.wait(bucket)

    def _new_agreement(self) -> Agreement:
        mesh, group, timeout_s = self.mesh, self.group, self.config.timeout_s
        connect: Callable[[], Rendezvous] | None = None
        if timeout_s is not None and group.has_peers:
            connect = functools.partial(_rendezvous, mesh, group, timeout_s)
        model, in_forward = type(self.root).__name__, self.config.stage == 3
        return Agreement(model, group.rank, self.params, timeout_s or 0.0, connect, self.take_part, in_forward=in_forward)

    def noted(self, index: int, value: Tensor) -> Tensor:
        """Remember a whole parameter that the forward was given, to notice a write into it."""
        if self.in_forward and not value.is_inference():
            self._reads.append((index, value, value._version))
        return value

    def _check_reads(self) -> None:
        for index, value, version in self._reads:
            if value._version != version:
                raise in_place_error(self.params[index])

    def collect(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Turn the padded gradient shards that one forward's backward left into DTensors."""
        return self.gradients.collect(grads)

    def computes_in_fp16(self) -> bool:
        """Whether a forward that starts now computes in float16, so that its loss is scaled: by precision, or within autocast."""
        device = _torch.local_tensor(self.tensors[0]).device.type
        by_autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16
        return by_autocast or self.config.param_dtype is torch.float16

    def _trains(self) -> bool:
        """Whether a backward may follow a forward that starts now."""
        return torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    def _enter(self) -> list[Tensor]:
        if self._trains():
            return list(_EnterForward.apply(self, *self.tensors))  # type: ignore[no-untyped-call]
        return self.local_shards()

    def _enter_again(self) -> list[Tensor]:
        """Return the shards for what the running backward computes again; not kept any longer, as their graph keeps this runtime."""
        if not self._shards_again:
            self._shards_again = self._enter()
            _torch.at_end_of_backward(self._shards_again.clear)
        return self._shards_again

    def local_shards(self) -> list[Tensor]:
        """Return each parameter's padded local shard, as a fresh alias."""
        return [self.local_shard(index) for index in range(len(self.params))]

    def local_shard(self, index: int) -> Tensor:
        """Return one parameter's padded local shard, as a fresh alias."""
        local, padded = _torch.local_tensor(self.tensors[index]), self._padded[index]
        if padded is None:
            return local.detach()
        if local.untyped_storage()._cdata != padded.untyped_storage()._cdata:
            layout.pad_into(padded, local)  # its storage was replaced (a copy, a move): copy what it now holds
        return padded.detach()

    # ---------------------------------------------------------------- reading and loading

    def shard_like(self, index: int, value: Tensor) -> Tensor:
        """Return this rank's shard of a whole tensor as a DTensor; leave a DTensor, or a wrong shape, as it is."""
        param = self.params[index]
        if isinstance(value, DTensor) or tuple(value.shape) != param.shape:
            return value
        local = layout.cut(value.detach(), param, self.group).to(_torch.local_tensor(self.tensors[index]).device)
        return self.gradients.dtensor(index, local.contiguous(), None)


def _rendezvous(mesh: DeviceMesh, group: Group, timeout_s: float) -> Rendezvous:
    return Rendezvous(mesh.get_group(), group, timeout_s)


def in_place_error(param: Param) -> ShardingError:
    """Build the error for a forward that writes into a parameter."""
    return ShardingError(
        f"the forward changes {param.name} in place",
        where=f"{param.name}, in a forward",
        why="a forward reads a whole copy, and what is written into that would never reach the shards",
        remedy="change the parameter outside of forward, under torch.no_grad(), or compute a changed value without writing",
    )


def second_derivative_error(where: str) -> ZerofxError:
    """Build the error for a backward that should itself be differentiated."""
    return ZerofxError(
        "a backward with create_graph=True is not supported",
        where=where,
        why="a second backward would read parameters that were released, or miss what the reduced gradients depend on",
        remedy="take second derivatives of a model that zerofx has not sharded",
    )


class _EnterForward(torch.autograd.Function):
    """Hand the local shards of all parameters to one forward; its backward runs once, when all gradients are there."""

    @staticmethod
    def forward(ctx: Any, runtime: Runtime, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.runtime = runtime
        ctx.versions = [runtime.versions.of(index) for index in range(len(tensors))]
        ctx.computes_in_fp16 = runtime.computes_in_fp16()
        ctx.set_materialize_grads(False)
        shards = runtime.local_shards()
        ctx.mark_non_differentiable(*(shard for shard, tensor in zip(shards, tensors, strict=True) if not tensor.requires_grad))
        return tuple(shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        runtime: Runtime = ctx.runtime
        if torch.is_grad_enabled():
            raise second_derivative_error("the backward, at the gradients of the parameters")
        found = runtime.collect(grads)
        if ctx.computes_in_fp16:
            runtime.gradients.spread_overflow(found)
        for param, grad, version in zip(runtime.params, found, ctx.versions, strict=True):
            if grad is not None and runtime.versions.of(param.index) != version:
                raise ShardingError(
                    f"{param.name} has been modified by an inplace operation between a forward and its backward",
                    where=f"the backward, gradient of {param.name}",
                    why="its gradient would mix old and new values, so the backward gives none",
                    remedy="run the backward before the optimizer's step, or the forward again after it",
                )
        return None, *found


class _EagerUnshard(torch.autograd.Function):
    """The whole parameter in a frame that is not compiled: slower, never wrong."""

    @staticmethod
    def forward(ctx: Any, runtime: Runtime, index: int, shard: Tensor) -> Tensor:
        ctx.runtime, ctx.index = runtime, index
        return runtime.value(index, shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor | None]:
        gradients, index = ctx.runtime.gradients, ctx.index
        total = gradients.to_reduce(index, grad)
        return None, None, None if total is None else gradients.reduce(index, total)


@contextmanager
def no_sync(runtime: Runtime) -> Iterator[None]:
    """Within, backwards of stages 0 and 1 gather up whole gradients without communication."""
    before, runtime.gradients.synchronize = runtime.gradients.synchronize, False
    try:
        yield
    finally:
        runtime.gradients.synchronize = before


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors of nested inputs or outputs."""
    return _torch.apply_to_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
