"""Make ``module.weight`` mean the whole parameter inside a forward, and the sharded DTensor outside."""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zerofx.errors import CheckpointError, ShardingError
from zerofx.vacancies import give_memory

_BINDING = "_zerofx"


@dataclass(slots=True)
class Binding:
    """What a module knows of zerofx: its model's runtime, and the table index of each of its own parameters."""

    runtime: Any
    indices: dict[str, int] = field(default_factory=dict)


@functools.cache
def sharded_class(base: type[nn.Module], names: frozenset[str], entry: str | None, methods: frozenset[str]) -> type[nn.Module]:
    """Return the subclass of a module class that reads the named parameters through the runtime. One per class, not per instance.

    ``entry`` names the method of the runtime that the forward goes through, and with it the ``methods``, which a root's users call
    as they call its forward; None for a forward that stays as it is.
    """
    body: dict[str, Any] = {name: _reader(name) for name in sorted(names)}
    if entry == "forward":
        body.update({name: _method(plain, entry if name in methods else None) for name, plain in own_methods(base).items()})
    body.update(__module__=base.__module__, __qualname__=base.__qualname__, __doc__=base.__doc__, __reduce_ex__=_reduce)
    body.update(_zerofx_key=(base, names, entry, methods), _load_from_state_dict=_load_from_state_dict, _apply=_apply)
    if entry is not None:
        body["forward"] = _through(base.forward, entry)
    return type(base.__name__, (base,), body)


def bind(module: nn.Module, binding: Binding, entry: str | None, methods: frozenset[str]) -> None:
    """Turn a module into its sharded class, in place."""
    module.__dict__[_BINDING] = binding
    module.__class__ = sharded_class(type(module), frozenset(binding.indices), entry, methods)  # type: ignore[arg-type]


def binding_of(module: nn.Module) -> Binding | None:
    """Return a module's binding, None where zerofx has not sharded it."""
    return module.__dict__.get(_BINDING)


def runtime_of(model: nn.Module) -> Any:
    """Return the runtime of a compiled model. Raises ShardingError for any other."""
    binding = binding_of(model) if isinstance(model, nn.Module) else None
    if binding is None:
        raise ShardingError(
            f"{type(model).__name__} was not compiled by zerofx",
            where="the model argument",
            why="only a compiled model has shards and a schedule",
            remedy="call zerofx.compile(model) first, and pass the model that it returns",
        )
    return binding.runtime


def bindings(module: nn.Module) -> Iterator[tuple[nn.Module, Binding]]:
    """Yield every sharded submodule, once, with its binding."""
    for submodule in module.modules():
        if (binding := binding_of(submodule)) is not None:
            yield submodule, binding


def _reader(name: str) -> property:
    def read(self: Any) -> Any:
        binding = self._zerofx
        if binding.runtime.inside:
            return binding.runtime.read(binding.indices[name])
        return self._parameters[name]

    return property(read, doc=f"The whole parameter inside a forward; its shard, a DTensor, outside ({name}).")


def own_methods(base: type[nn.Module]) -> dict[str, types.FunctionType]:
    """Return the public methods that a module class adds to those of every module."""
    return {
        name: value
        for kind in reversed(base.__mro__)
        for name, value in vars(kind).items()
        if isinstance(value, types.FunctionType) and not name.startswith("_") and not hasattr(nn.Module, name)
    }


def meets_shard(error: BaseException) -> bool:
    """Whether torch found a shard among whole tensors."""
    return isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error)


def _method(plain: types.FunctionType, entry: str | None) -> Any:
    """Make a method of the root: as it is inside a forward; called from outside, it runs as a forward does, or says why it cannot."""
    called = _explained(plain) if entry is None else _through(plain, entry)

    @functools.wraps(plain)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        # a function that Dynamo traces through, where the forward calls it
        return plain(self, *args, **kwargs) if self._zerofx.runtime.in_forward else called(self, *args, **kwargs)

    return run


def _through(plain: Any, entry: str) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(plain)  # callers read the signature
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._zerofx.runtime, entry)(plain, self, args, kwargs)

    return run


def _explained(plain: types.FunctionType) -> Any:
    @functools.wraps(plain)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return plain(self, *args, **kwargs)
        except RuntimeError as error:
            if not meets_shard(error):
                raise
            raise ShardingError(
                f"{plain.__name__} meets a shard where it expects a whole parameter",
                where=f"{type(self).__name__}.{plain.__name__}, called from outside of a forward",
                why="only a forward reads whole parameters, and only what zerofx.compile was told runs as one",
                remedy=f"call the model; or pass methods=[{plain.__name__!r}] to zerofx.compile, and call it on what that returns",
            ) from error

    return run


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle by the original class: the subclass is made anew on loading."""
    made, args, *rest = self._zerofx_key[0].__reduce_ex__(self, protocol)
    if made is copyreg.__newobj__ and args and args[0] is type(self):  # type: ignore[attr-defined]
        return _rebuild, (self._zerofx_key, *args[1:]), *rest
    return made, args, *rest


def _rebuild(key: tuple[type[nn.Module], frozenset[str], str | None, frozenset[str]], *args: Any) -> nn.Module:
    kind = sharded_class(*key)  # type: ignore[arg-type]
    made: nn.Module = kind.__new__(kind, *args)
    return made


def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
    """See which tensors on the meta device a conversion, as ``to_empty``, gives memory but no values."""
    with self._zerofx.runtime.vacancies.watching(self):
        return self._zerofx_key[0]._apply(self, fn, recurse)


def _load_from_state_dict(self: Any, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any) -> None:
    """Accept whole tensors for sharded parameters: keep this rank's shard of each. On the meta device, first make room for them."""
    binding = self._zerofx
    if binding.runtime.root is self:
        _check_ties(binding.runtime.params, state_dict, prefix)
    if binding.runtime.vacancies.is_open:
        give_memory(self, binding.runtime.mesh.device_type, recurse=False)
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}
    for name, index in binding.indices.items():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor):
            state_dict[prefix + name] = binding.runtime.shard_like(index, value)
    self._zerofx_key[0]._load_from_state_dict(self, state_dict, prefix, local_metadata, *args)


def _check_ties(params: tuple[Any, ...], state_dict: dict[str, Any], prefix: str) -> None:
    """Refuse two values for one parameter, before the first is copied: the last would win."""
    for param in params:
        found = [name for name in param.names if isinstance(state_dict.get(prefix + name), torch.Tensor)]
        for name in found[1:]:
            first, other = state_dict[prefix + found[0]], state_dict[prefix + name]
            if first is not other and not torch.equal(first, other):
                raise tie_error(found[0], name)


def tie_error(first: str, other: str) -> CheckpointError:
    """Build the error for two different values of one parameter."""
    return CheckpointError(
        f"{first} and {other} are one parameter of the model, and two different values are to be loaded",
        where=f"{first} and {other}",
        why="either value would be wrong for one of the two uses",
        remedy="leave one of the two keys out, or untie the model before zerofx.compile",
    )
