"""Build a model of which no rank ever holds more than its shards and the parameter that is being worked on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook

from zerofx import _torch, groups, layout, sharding
from zerofx.checks import check_memory, mesh_of
from zerofx.config import offload_from
from zerofx.errors import ConfigError, ShardingError, ZerofxError
from zerofx.groups import Group
from zerofx.modes import Addresses, Operators
from zerofx.module import binding_of
from zerofx.offload import Offload
from zerofx.storages import Held, Storages, checksum
from zerofx.stored import ATTRIBUTE
from zerofx.vacancies import give_memory


@contextmanager
def init(
    model: nn.Module | None = None, *, mesh: DeviceMesh | None = None, offload: Offload | Mapping[str, Any] | str | None = None
) -> Iterator[None]:
    """Build modules inside, each parameter sharded as it is built; after it they hold DTensors, for ``zerofx.compile``.

    Constructors and initialisations see ordinary whole parameters, one at a time, and draw the numbers that they would draw
    without this context. All ranks run the same code, and draw rank 0's numbers. An operator on another parameter than the last one
    gathers it, unless it overwrites it. ``model``: one that exists already, compiled or not, whose parameters are filled inside, as after
    ``zerofx.compile`` on the meta device. ``mesh``: as for ``zerofx.compile``; by default the model's, or all ranks. ``offload``: as for
    ``zerofx.compile``; shards that go to disk do so as soon as the next parameter is worked on.

    Whole until the end are parameters that share their storage or are not contiguous, those whose address was taken (``numpy()``,
    ``data_ptr()``), and copies of modules (``copy.deepcopy``) until they become part of another.

    Raises ConfigError for a bad mesh, for files that cannot be, or inside another ``zerofx.init``; OffloadError where a disk is full;
    at the end RankMismatchError where the ranks built different values, ShardingError where something beside the modules still holds a
    parameter or a view of it. All on every rank.
    """
    if any(isinstance(mode, Operators) for mode in _torch.dispatch_modes()):
        raise ConfigError(
            "zerofx.init is entered twice",
            where="zerofx.init, inside another zerofx.init",
            why="each would free the memory that the other works on",
            remedy="enter it once, around the construction of the whole model",
        )
    if not isinstance(model, nn.Module | None):
        raise ShardingError(
            f"{type(model).__name__} is not a torch.nn.Module",
            where="the first argument of zerofx.init",
            why="it is the model whose parameters are filled inside",
            remedy="pass a mesh by its name, zerofx.init(mesh=mesh), and nothing for a model that is built inside",
        )
    mesh = mesh if model is None else mesh_of(model, mesh, "zerofx.init")
    mesh, group = groups.resolve_mesh(mesh, groups.device_type(), where="zerofx.init")
    settings = offload_from(offload, "zerofx.init(offload=...)")
    _check_together(settings, mesh, group)
    site = _Site(mesh, group, settings)
    if model is not None:
        site.enter(model)
    try:
        with _rank_0_draws(mesh, group), site.watching():
            yield
    except BaseException as error:
        site.abandon()
        if isinstance(error, Exception):  # an interrupt waits for nobody
            failed = ShardingError(
                f"{type(error).__name__} inside zerofx.init", where="zerofx.init", why=str(error), remedy="see that rank"
            )
            groups.exchange((failed, []), mesh, group)
        raise
    site.finish()


def _check_together(settings: Offload | None, mesh: DeviceMesh, group: Group) -> None:
    """Check on all ranks what one of them may lack: the directory of its files."""
    local: ZerofxError | None = None
    try:
        if settings is not None:
            settings.check(mesh.device_type)
    except ConfigError as error:
        local = error
    remedy = "pass the same offload on every rank"
    groups.agree(local, [f"offload={settings}"], mesh, group, doing="build", where="zerofx.init", remedy=remedy)


class _Site:
    """Where modules are built: their storages, and what the modules will hold in the end."""

    def __init__(self, mesh: DeviceMesh, group: Group, offload: Offload | None) -> None:
        self._mesh, self._group = mesh, group
        self._storages = Storages(mesh, group, offload)
        self._modules: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._compiled: dict[nn.Parameter, nn.Parameter] = {}  # whole stand-ins of parameters that are shards already

    def enter(self, model: nn.Module) -> None:
        """Let the parameters of an existing model be filled: shards by whole stand-ins."""
        self._saw(model)
        if binding_of(model) is not None:
            give_memory(model, self._mesh.device_type, recurse=True)
        wholes: dict[nn.Parameter, nn.Parameter] = {}
        for tensor in model.parameters():
            if isinstance(tensor, DTensor) and not tensor.is_meta:
                shard, param = _torch.local_tensor(tensor), layout.param_of(tensor, self._group)
                wholes[tensor] = self._storages.stand_in(shard, param, requires_grad=tensor.requires_grad)
        self._compiled = {whole: tensor for tensor, whole in wholes.items()}
        sharding.rebind(model.modules(), wholes)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See every module and parameter that is registered, and every operator on one, in this process."""

        def saw_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
            self._modules[module] = None
            with _torch.without_modes():
                self._storages.add(parameter)

        def saw_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
            self._modules[module] = None
            if submodule is not None:
                with _torch.without_modes():
                    self._saw(submodule)

        with ExitStack() as stack:
            stack.callback(register_module_parameter_registration_hook(saw_parameter).remove)
            stack.callback(register_module_module_registration_hook(saw_module).remove)
            stack.enter_context(Operators(self._storages))
            stack.enter_context(Addresses(self._storages))
            yield

    def _saw(self, module: nn.Module) -> None:
        self._modules[module] = None
        for parameter in module.parameters():
            self._storages.add(parameter)

    def finish(self) -> None:
        """Put shards into the modules, and check that all ranks have cut the same values."""
        gc.collect()  # a module in a dead cycle is dead on all ranks
        described: list[str] = []
        local: ZerofxError | None = None
        try:
            with torch.no_grad():
                described = self._shard()
            self._check_left()
        except ZerofxError as error:
            self.abandon()
            local = error
        groups.agree(
            local,
            described,
            self._mesh,
            self._group,
            doing="build",
            where="zerofx.init, at its end",
            remedy="build from the same data on every rank, and seed generators of your own (torch.Generator, numpy, random) alike",
        )

    def _shard(self) -> list[str]:
        """Replace the parameters of all modules by shards; describe them, with checksums of their whole values."""
        modules = list(dict.fromkeys(inner for module in self._modules for inner in module.modules()))
        names = _names(modules)
        check_memory(((name, parameter) for parameter, name in names.items()), "zerofx.init")
        shards: dict[nn.Parameter, nn.Parameter] = {}
        described = []
        for parameter, name in names.items():
            if type(parameter) is not nn.Parameter or parameter.is_meta:
                continue  # lazy, or of somebody else's type: zerofx.compile judges
            held = self._storages.take(parameter, name)
            described.append(
                f"{name} {tuple(parameter.shape)} {parameter.dtype}, checksum {held.checksum if held else checksum(parameter)}"
            )
            shards[parameter] = self._sharded(parameter, name, held)
        sharding.rebind(modules, shards)
        return described

    def _sharded(self, parameter: nn.Parameter, name: str, held: Held | None) -> nn.Parameter:
        compiled = self._compiled.pop(parameter, None)
        if held is not None:
            param = held.param
        else:
            param = self._storages.param_of(parameter) if compiled is None else layout.param_of(compiled, self._group)
        shard = held.shard if held else layout.cut(parameter.detach(), param, self._group)
        assert shard is not None
        if compiled is not None:
            if shard is not (local := _torch.local_tensor(compiled)):
                local.copy_(shard)
            return compiled
        if parameter.device.type != self._mesh.device_type:
            raise ShardingError(
                f"{name} is on {parameter.device}, the ranks of the mesh use {self._mesh.device_type}",
                where="zerofx.init, at its end",
                why="the shards of one model live on the device of its mesh",
                remedy=f"enter torch.device({parameter.device.type!r}) around zerofx.init, or pass a mesh of that device type",
            )
        if held is None and param.dim is not None:
            shard = shard.clone(memory_format=torch.contiguous_format)
        sharded = sharding.shard_of(parameter, layout.dtensor(shard, param, self._mesh))
        if shard in self._storages.mapped:
            vars(sharded)[ATTRIBUTE] = self._storages.mapped
        return sharded

    def _check_left(self) -> None:
        """Check that nothing still needs the memory of a whole parameter that is gone."""
        if any(self._storages.left()):
            gc.collect()
        for _, held in self._storages.left():
            raise ShardingError(
                f"something beside the modules still holds {held.name}, or a view of it",
                where=f"{held.name}, at the end of zerofx.init",
                why="its whole memory is gone, and the modules hold shards",
                remedy="make the optimizer after the context, and let buffers and other attributes be copies (.clone())",
            )

    def abandon(self) -> None:
        """Leave nothing behind that reads freed memory: parameters without values become empty."""
        sharding.rebind(self._modules, self._compiled)
        for module in self._modules:
            for parameter in module._parameters.values():
                if parameter is not None and (storage := self._storages.find(parameter)) is not None and storage.nbytes() == 0:
                    parameter.data = parameter.new_empty(0)
        for storage, held in self._storages.left():
            storage.resize_(held.param.bytes_in(held.param.dtype))


@contextmanager
def _rank_0_draws(mesh: DeviceMesh, group: Group) -> Iterator[None]:
    """Give torch's random numbers of rank 0 to all ranks; one that had others goes on with its own afterwards."""
    sources: list[Any] = [torch] if mesh.device_type == "cpu" else [torch, torch.get_device_module(mesh.device_type)]
    own = [source.get_rng_state() for source in sources]
    agreed = groups.exchange(own, mesh, group)[0]
    for source, state in zip(sources, agreed, strict=True):
        source.set_rng_state(state)
    try:
        yield
    finally:
        for source, state, theirs in zip(sources, own, agreed, strict=True):
            if not torch.equal(state, theirs):
                source.set_rng_state(state)


def _names(modules: Sequence[nn.Module]) -> dict[nn.Parameter, str]:
    """Name each parameter from the outermost module that has it."""
    inner = {child for module in modules for child in module.children()}
    outermost = [module for module in modules if module not in inner]
    names: dict[nn.Parameter, str] = {}
    for module in outermost:
        prefix = "" if len(outermost) == 1 else f"{type(module).__name__}."
        for name, parameter in module.named_parameters():
            names.setdefault(parameter, prefix + name)
    return names
