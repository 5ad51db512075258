"""The state of one sharded model while it trains: the only stateful object on the compiled path."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from zerofx import _torch, collectives
from zerofx.collectives import Group, Refresh
from zerofx.config import Config
from zerofx.errors import ShardingError, ZerofxError
from zerofx.params import Param, block_of
from zerofx.program import Sync

Modules = tuple[tuple[str, nn.Module], ...]
MakeForward = Callable[["Runtime", Callable[..., Any]], Callable[..., Any]]


class Arrivals:
    """Refreshes of whole copies in flight, by bucket; a lowered graph waits for each where it first reads it."""

    def __init__(self) -> None:
        self._pending: dict[int, Refresh] = {}

    def launch(self, bucket: int, refresh: Refresh) -> None:
        self._pending[bucket] = refresh

    def wait(self, bucket: int) -> None:
        refresh = self._pending.pop(bucket, None)
        if refresh is not None:
            refresh.wait()

    def finish(self) -> None:
        """Wait for whatever the forward did not read."""
        for bucket in list(self._pending):
            self.wait(bucket)


class Runtime:
    """Owns the shards of one model and runs its forward.

    Inside a forward, ``read`` gives whole parameters; outside, modules show their DTensor shards.
    """

    def __init__(
        self,
        config: Config,
        mesh: DeviceMesh,
        group: Group,
        params: tuple[Param, ...],
        tensors: list[nn.Parameter],
        modules: Modules,
        make_forward: MakeForward,
    ) -> None:
        self.config, self.mesh, self.group, self.params = config, mesh, group, params
        self.tensors, self._modules, self._make_forward = tensors, modules, make_forward
        self._members: list[dict[str, int]] = []
        self.inside = False
        self.synchronize = True
        self.compilations: list[Any] = []  # every graph compiled so far
        self.executed: list[Any] = []  # those that the current forward runs, in order
        self.last_step: list[Any] = []  # those of the last forward, the last trained one where there is one
        self.arrivals = Arrivals()
        self.geometry = [
            (param.index, list(param.shape), -1 if param.dim is None else param.dim, param.compute_dtype, group.size, group.name)
            for param in params
        ]
        self.shards: list[Tensor] = []
        self.wholes: list[Tensor | None] = self._new_wholes()
        self.refresh_buckets = self._refresh_buckets()
        self._run_forward: Callable[..., Any] | None = None
        self._versions = [-1] * len(params)
        self._kept: dict[int, Tensor] = {}
        self._specs = [_spec(tensor) for tensor in tensors]
        self._padded = [_padded(param, tensor, group) for param, tensor in zip(params, tensors, strict=True)]

    def __getstate__(self) -> tuple[Any, ...]:
        """A copy compiles anew: graphs, communication in flight and gathered gradients stay behind."""
        return self.config, self.mesh, self.params, self.tensors, self._modules, self._make_forward

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        config, mesh, params, tensors, modules, make_forward = state
        self.__init__(config, mesh, collectives.group_of(mesh), params, tensors, modules, make_forward)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        copied = object.__new__(Runtime)
        memo.update({id(self): copied, id(self.mesh): self.mesh, id(self.config): self.config})
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    # ---------------------------------------------------------------- forward

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the compiled forward of the root module. Called inside another forward of the same model, run it plainly."""
        plain = type(module)._zerofx_key[0].forward  # type: ignore[attr-defined]
        if self.inside:
            return plain(module, *args, **kwargs)
        if self._run_forward is None:
            self._run_forward = self._make_forward(self, plain)
        self._check_parameters()
        self.shards = self._enter()
        self._refresh_stale()
        self.executed = []
        self.inside = True
        try:
            return self._run_forward(module, *args, **kwargs)
        except _torch.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, ZerofxError):
                raise error.inner_exception from None
            raise
        finally:
            self.inside = False
            self.shards = []
            self.arrivals.finish()
            if any(ran.backward for ran in self.executed) or not any(ran.backward for ran in self.last_step):
                self.last_step = self.executed

    def read(self, index: int) -> Tensor:
        """Return the whole parameter: a marker op under tracing, else the value itself."""
        shard, whole = self.shards[index], self.wholes[index]
        if torch.compiler.is_compiling():
            marked: Tensor = torch.ops.zerofx.unshard(shard, whole, *self.geometry[index])
            return marked
        value: Tensor = _EagerUnshard.apply(self, index, shard)  # type: ignore[no-untyped-call]
        return value

    def _enter(self) -> list[Tensor]:
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and any(tensor.requires_grad for tensor in self.tensors):
            return list(_EnterForward.apply(self, *self.tensors))  # type: ignore[no-untyped-call]
        return self.local_shards()

    def local_shards(self) -> list[Tensor]:
        """Return each parameter's padded local shard, as a fresh alias."""
        found = []
        for tensor, padded in zip(self.tensors, self._padded, strict=True):
            local = _torch.local_tensor(tensor)
            if padded is None:
                found.append(local.detach())
                continue
            if local.untyped_storage().data_ptr() != padded.untyped_storage().data_ptr():
                _pad_into(padded, local)  # its storage was replaced (a copy, a move): copy what it now holds
            found.append(padded.detach())
        return found

    def watch(self) -> None:
        """From now on, members of the model's modules must stay what they are."""
        self._members = [_members(module) for _, module in self._modules]

    def _check_parameters(self) -> None:
        """Check that every module holds the parameters and submodules that it was compiled with."""
        if not self._members:
            self.watch()  # a copy, whose modules were not complete when it was made
        for (path, module), members in zip(self._modules, self._members, strict=True):
            now = _members(module)
            if now == members:
                continue
            changed = [name for name in {**members, **now} if members.get(name) != now.get(name)]
            raise ShardingError(
                f"{'.'.join(filter(None, (path, changed[0])))} was re-assigned after zerofx.compile",
                where=f"{path or type(module).__name__}, at the start of a forward",
                why="the model computes with the shards that it was compiled with; what is new is not sharded, and would be ignored",
                remedy="copy into the parameter (load_state_dict, or p.copy_() under no_grad), or assign before zerofx.compile",
            )

    # ---------------------------------------------------------------- whole copies (stages 1 and 2)

    def _new_wholes(self) -> list[Tensor | None]:
        if self.config.stage not in (1, 2):
            return [None] * len(self.params)
        return [
            None if param.dim is None else collectives.new_whole(param, _torch.local_tensor(tensor).device)
            for param, tensor in zip(self.params, self.tensors, strict=True)
        ]

    def _refresh_buckets(self) -> tuple[tuple[int, ...], ...]:
        """Bucket the whole copies by block, in registration order: the same for every graph of the model."""
        buckets: list[list[Param]] = []
        for param, whole in zip(self.params, self.wholes, strict=True):
            if whole is None:
                continue
            size = sum(other.whole_bytes for other in buckets[-1]) if buckets else 0
            joins = buckets and (size < self.config.bucket_min_bytes or block_of(buckets[-1][0].name) == block_of(param.name))
            if not joins or size + param.whole_bytes > self.config.bucket_max_bytes:
                buckets.append([])
            buckets[-1].append(param)
        return tuple(tuple(param.index for param in bucket) for bucket in buckets)

    def _refresh_stale(self) -> None:
        """Launch the gathers of buckets whose shards changed since their last gather, in layer order."""
        for bucket, members in enumerate(self.refresh_buckets):
            versions = [_version(self.tensors[index]) for index in members]
            if versions == [self._versions[index] for index in members]:
                continue
            params = [self.params[index] for index in members]
            wholes = [whole for index in members if (whole := self.wholes[index]) is not None]
            with torch.no_grad():
                shards = [self.shards[index].detach() for index in members]
                self.arrivals.launch(bucket, collectives.refresh_start(wholes, shards, params, self.group))
            for index, version in zip(members, versions, strict=True):
                self._versions[index] = version

    def arrive(self, index: int) -> None:
        """Wait for the whole copy of one parameter, outside a compiled graph."""
        for bucket, members in enumerate(self.refresh_buckets):
            if index in members:
                self.arrivals.wait(bucket)

    # ---------------------------------------------------------------- backward

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether a backward now only gathers up whole gradients: stages 0 and 1 under ``no_sync``."""
        return not self.synchronize and self.config.stage <= 1 and self.group.size > 1

    def sync(self, indices: Sequence[int]) -> Sync:
        """Return what a backward that gives gradients for these parameters does with them."""
        if self.keeps_whole_gradients:
            return Sync.KEEP
        return Sync.REDUCE_KEPT if any(self._has_pending(index) for index in indices) else Sync.REDUCE

    def keep(self, index: int, grad: Tensor) -> None:
        """Gather up a whole gradient of this backward."""
        kept = self._kept.get(index)
        self._kept[index] = grad if kept is None else kept + grad

    def take_pending(self, index: int) -> Tensor | None:
        """Take the whole gradient that earlier backwards under ``no_sync`` left in ``.grad``."""
        if not self._has_pending(index):
            return None
        tensor = self.tensors[index]
        assert tensor.grad is not None
        pending = _torch.local_tensor(tensor.grad)
        tensor.grad = None
        return pending

    def _has_pending(self, index: int) -> bool:
        grad = self.tensors[index].grad
        return isinstance(grad, DTensor) and grad.placements[0].is_partial()

    def gradients(self, locals_: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Turn the padded gradient shards of one forward into DTensors of the parameters' logical shape."""
        if not self.keeps_whole_gradients:
            locals_ = self._with_leftovers(locals_)
        found: list[Tensor | None] = []
        seen: set[int] = set()
        for index, local in enumerate(locals_):
            kept = self._kept.pop(index, None)
            if kept is not None:
                found.append(self._dtensor(index, kept, Partial("avg")))
            elif local is None:
                found.append(None)
            else:
                if local.data_ptr() in seen and local.numel():
                    local = local.clone()  # two parameters with one gradient tensor: an optimizer works in place
                seen.add(local.data_ptr())
                found.append(self._dtensor(index, self._unpad(index, local), None))
        return found

    def _with_leftovers(self, locals_: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Reduce what earlier backwards under ``no_sync`` left for parameters that this one did not use."""
        result = list(locals_)
        for index in range(len(result)):
            if result[index] is None and (pending := self.take_pending(index)) is not None:
                result[index] = self.reduce(index, pending)
        return result

    def reduce(self, index: int, grad: Tensor) -> Tensor:
        """Average one whole gradient over the ranks, outside a compiled graph; return this rank's padded shard."""
        if self.group.size == 1:
            return grad.to(self.params[index].dtype)
        params = [self.params[index]]
        buffers = collectives.reduce_start([grad], params, self.group, self.config.reduce_dtype)
        return collectives.reduce_wait(buffers, params, self.group)[0]

    def _unpad(self, index: int, padded: Tensor) -> Tensor:
        param = self.params[index]
        if not param.is_padded or param.dim is None:
            return padded
        return padded.narrow(param.dim, 0, param.rows(self.group.rank)[1])

    def _dtensor(self, index: int, local: Tensor, placement: Placement | None) -> Tensor:
        spec = self._specs[index]
        if placement is not None:
            spec = _torch.DTensorSpec(spec.mesh, (placement,), tensor_meta=spec.tensor_meta)
        return DTensor(local, spec, requires_grad=False)

    # ---------------------------------------------------------------- reading and loading

    def whole(self, index: int) -> Tensor:
        """Gather one parameter in its master dtype: a fresh tensor, whole, on every rank."""
        tensor = self.tensors[index].detach()
        assert isinstance(tensor, DTensor)
        return tensor.full_tensor().clone()

    def shard_like(self, index: int, value: Tensor) -> Tensor:
        """Return this rank's shard of a whole tensor as a DTensor; leave a DTensor, or a wrong shape, as it is."""
        param = self.params[index]
        if isinstance(value, DTensor) or tuple(value.shape) != param.shape:
            return value
        local = value.detach()
        if param.dim is not None:
            local = local.narrow(param.dim, *param.rows(self.group.rank))
        local = local.to(_torch.local_tensor(self.tensors[index]).device)
        return self._dtensor(index, local.contiguous(), None)


class _EnterForward(torch.autograd.Function):
    """Hand the local shards of all parameters to one forward; its backward runs once, when all gradients are there."""

    @staticmethod
    def forward(ctx: Any, runtime: Runtime, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.runtime = runtime
        ctx.set_materialize_grads(False)
        shards = runtime.local_shards()
        ctx.mark_non_differentiable(*(shard for shard, tensor in zip(shards, tensors, strict=True) if not tensor.requires_grad))
        return tuple(shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.runtime.gradients(grads)


class _EagerUnshard(torch.autograd.Function):
    """The whole parameter in a frame that is not compiled: slower, never wrong."""

    @staticmethod
    def forward(ctx: Any, runtime: Runtime, index: int, shard: Tensor) -> Tensor:
        ctx.runtime, ctx.index = runtime, index
        param, whole = runtime.params[index], runtime.wholes[index]
        if whole is not None:
            runtime.arrive(index)
            return whole.detach()
        if param.dim is None:
            return shard.detach().to(param.compute_dtype)
        return collectives.gather_wait(collectives.gather_start([shard], [param], runtime.group), [param], runtime.group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor | None]:
        runtime, index = ctx.runtime, ctx.index
        if runtime.keeps_whole_gradients:
            runtime.keep(index, grad)
            return None, None, None
        pending = runtime.take_pending(index)
        return None, None, runtime.reduce(index, grad if pending is None else pending + grad)


@contextmanager
def no_sync(runtime: Runtime) -> Iterator[None]:
    """Within, backwards of stages 0 and 1 gather up whole gradients without communication."""
    before, runtime.synchronize = runtime.synchronize, False
    try:
        yield
    finally:
        runtime.synchronize = before


def placement_of(param: Param) -> Placement:
    """Return the DTensor placement of a parameter."""
    return Replicate() if param.dim is None else Shard(param.dim)


def _members(module: nn.Module) -> dict[str, int]:
    """Return the identity of each parameter and submodule of a module."""
    return {name: id(member) for members in (module._parameters, module._modules) for name, member in members.items()}


def _version(tensor: Tensor) -> int:
    """Count the in-place changes: optimizers change the DTensor, whose local tensor does not notice; loaders may change the local."""
    return tensor._version + _torch.local_tensor(tensor)._version


def _spec(tensor: Tensor) -> Any:
    assert isinstance(tensor, DTensor)
    return tensor._spec


def _padded(param: Param, tensor: Tensor, group: Group) -> Tensor | None:
    """Move an uneven shard into storage with room for its padding, so that every rank sends the same size; None if even."""
    if not param.is_padded:
        return None
    local = _torch.local_tensor(tensor)
    padded = local.new_zeros(param.shard_shape)
    _pad_into(padded, local)
    assert param.dim is not None
    _torch.set_local_tensor(tensor, padded.narrow(param.dim, 0, param.rows(group.rank)[1]))
    return padded


def _pad_into(padded: Tensor, local: Tensor) -> None:
    with torch.no_grad():
        view = padded.detach()
        for dim, size in enumerate(local.shape):
            view = view.narrow(dim, 0, size)
        view.copy_(local.detach())
