"""What a checkpoint holds of a model, its optimizers and its ranks, as plain data.

The layout is that of ``torch.distributed.checkpoint.state_dict``: ``model.NAME``, ``optim.state.NAME.KEY`` and
``optim.param_groups.INDEX.OPTION``, by qualified names; beside them ``zerofx.extra`` and ``zerofx.ranks.RANK``.
"""

from __future__ import annotations

import copy
import io
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zerofx import _torch
from zerofx.errors import CheckpointError

Named = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Owners:
    """The parameters of a model by all their qualified names, and the optimizers that update them."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    by_name: dict[str, nn.Parameter]
    first_name: dict[nn.Parameter, str]

    @staticmethod
    def of(model: nn.Module, optim: Optimizer | Iterable[Optimizer] | None) -> Owners:
        """Find them. Raises CheckpointError where an optimizer holds a parameter that is not the model's, or two hold the same."""
        by_name = dict(model.named_parameters(remove_duplicate=False))
        owners = Owners(model, _optimizers(optim), by_name, {tensor: name for name, tensor in model.named_parameters()})
        seen: set[nn.Parameter] = set()
        for optimizer in owners.optimizers:
            for tensor in held(optimizer):
                name = owners.first_name.get(tensor)
                if name is None or tensor in seen:
                    what = f"{name}, as another optimizer does" if name else "a parameter of another model"
                    raise CheckpointError(
                        f"a {type(optimizer).__name__} holds {what}",
                        where=f"the optim argument, a parameter of shape {tuple(tensor.shape)}",
                        why="the state of an optimizer is kept by the qualified names of its parameters",
                        remedy="pass the optimizers that were built from model.parameters() after zerofx.compile, each parameter in one",
                    )
                seen.add(tensor)
        return owners


def _optimizers(optim: Optimizer | Iterable[Optimizer] | None) -> tuple[Optimizer, ...]:
    found = () if optim is None else (optim,) if isinstance(optim, Optimizer) else tuple(optim)
    wrong = [one for one in found if not isinstance(one, Optimizer)]
    if wrong:
        raise CheckpointError(
            f"a {type(wrong[0]).__name__} is no optimizer",
            where="the optim argument",
            why="it takes what has the state of parameters; everything else is an extra",
            remedy="pass a torch.optim.Optimizer or several, and others by name: zerofx.save(path, model, optim, scheduler=scheduler)",
        )
    return found


def held(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer, in the order by which its state dict numbers them."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def taken(owners: Owners) -> Named:
    """Return the state of the model and its optimizers, nested, with sharded tensors as DTensors."""
    state: Named = {"model": owners.model.state_dict()}
    if owners.optimizers:
        by_name: Named = {}
        groups: list[Named] = []
        for optimizer in owners.optimizers:
            numbered, names = optimizer.state_dict(), [owners.first_name[tensor] for tensor in held(optimizer)]
            for number, values in numbered["state"].items():
                by_name[names[number]] = _checked(values, names[number])
            for group in numbered["param_groups"]:
                options = {option: value for option, value in group.items() if option != "param_names"}
                groups.append({**options, "params": [names[number] for number in group["params"]]})
        state["optim"] = {"state": by_name, "param_groups": groups}
    return state


def _checked(values: Named, name: str) -> Named:
    """Refuse what would come back as something else: a rank's own tensor, of which one would be kept, and lists."""
    for key, value in values.items():
        is_own = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim > 0
        if is_own or isinstance(value, (list, tuple)):
            raise CheckpointError(
                f"{key} in the optimizer's state is a {type(value).__name__}, not a DTensor, a scalar or a number",
                where=f"the optimizer's state of {name}",
                why="nothing says which part of it this rank has, and what the others have",
                remedy="use an optimizer that makes its state like its parameters (torch.zeros_like(parameter)), as torch.optim's do",
            )
    return values


def shards_of(state: Named) -> Named:
    """Return the sharded part of a nested state: all that another rank than the first adds to it."""
    found = {key: shards_of(value) if isinstance(value, dict) else value for key, value in state.items()}
    return {key: value for key, value in found.items() if isinstance(value, DTensor) or (isinstance(value, dict) and value)}


def copied(value: Any) -> Any:
    """Copy a nested state into memory of the processor."""
    if isinstance(value, DTensor):
        return _torch.like(value, _torch.local_tensor(value).detach().to("cpu", copy=True))
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copied(one) for key, one in value.items()}
    return copy.deepcopy(value)


def digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a checksum of each tensor's bytes."""
    return {name: zlib.crc32(bytes_of(tensor).cpu().numpy().tobytes()) for name, tensor in tensors.items()}


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def packed(value: Any) -> Tensor:
    """Return plain data as bytes in a tensor."""
    content = io.BytesIO()
    torch.save(value, content)
    return torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)


def unpacked(content: Tensor) -> Any:
    """Return what ``packed`` packed; it runs no code."""
    return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)


def packed_extras(extras: Mapping[str, Any]) -> Tensor:
    """Return the extras as plain data, with ``state_dict()`` in the place of what has one. Raises CheckpointError by name."""
    plain = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in extras.items()}
    for name, value in plain.items():
        why = "it holds shards, which only a model or an optimizer has" if _has_shards(value) else ""
        try:
            unpacked(packed(value))
        except Exception as error:
            why = why or f"loading executes no code, and plain data alone comes back without: {str(error).splitlines()[0]}"
        if why:
            raise CheckpointError(
                f"{name} cannot be saved",
                where=f"zerofx.save({name}=...)",
                why=why,
                remedy="pass numbers, text, tensors, and dicts, lists and tuples of them; save another compiled model by a call of its own",
            )
    return packed(plain)


def _has_shards(value: Any) -> bool:
    return any(isinstance(leaf, DTensor) for leaf in _torch.tree_leaves(value))
