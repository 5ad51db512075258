"""Where the values of a checkpoint go: checked against a model and its optimizers, and put into the form that they load.

Nothing here changes a model or an optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor

from zerofx import _torch
from zerofx.errors import CheckpointError
from zerofx.module import tie_error
from zerofx.states import Named, Owners, bytes_of, held

STATE, GROUPS = "optim.state.", "optim.param_groups."
MISSING, UNEXPECTED = "missing", "unexpected"


@dataclass(slots=True)
class Misfits:
    """What of a file and a model does not fit together."""

    found: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, name: str) -> None:
        self.found.setdefault(kind, []).append(name)

    def check(self, path: object, allowed: Collection[str] = ()) -> None:
        """Raises CheckpointError that lists them all, but for the allowed kinds."""
        kinds = [f"{kind}: {', '.join(names)}" for kind, names in self.found.items() if kind not in allowed]
        if kinds:
            raise CheckpointError(
                f"{path} does not fit the model or its optimizers: {'; '.join(kinds)}",
                where=str(path),
                why="it was saved from another model, or other optimizers; nothing was loaded",
                remedy="load it into the model that it was saved from, with the same parameter groups",
            )


def model_targets(owners: Owners, entries: Mapping[str, Any], prefix: str, misfits: Misfits) -> Named:
    """Return new tensors for the entries of the model: each rank's shard of what is sharded."""
    state = owners.model.state_dict()
    there = {tensor for name, tensor in owners.by_name.items() if prefix + name in entries}
    targets: Named = {}
    for name, value in state.items():
        entry = entries.get(prefix + name)
        if entry is None:
            if owners.by_name.get(name) not in there:
                misfits.add(MISSING, name)
        elif isinstance(value, Tensor) and getattr(entry, "size", None) != value.shape:
            found = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else "no tensor"
            misfits.add("wrong shape", f"{name} (file {found}, model {tuple(value.shape)})")
        else:
            targets[prefix + name] = _empty_like(value, owners) if isinstance(value, Tensor) else None
    for key in entries:
        if key.startswith(prefix) and key.removeprefix(prefix) not in state:
            misfits.add(UNEXPECTED, key.removeprefix(prefix))
    return targets


def _empty_like(value: Tensor, owners: Owners) -> Tensor:
    """Make a tensor of the same kind; for one without memory, on the device of the model's shards."""
    if isinstance(value, DTensor):
        return empty_dtensor(value.shape, dtype=value.dtype, device_mesh=value.device_mesh, placements=value.placements)
    sharded = next((tensor for tensor in owners.first_name if isinstance(tensor, DTensor)), None)
    return torch.empty_like(value, device=sharded.device_mesh.device_type if value.is_meta and sharded is not None else value.device)


def model_state(owners: Owners, values: Named, prefix: str) -> Named:
    """Return the state dict that the values read make up. Raises CheckpointError for two values of one parameter."""
    kept = owners.model.state_dict()
    state = {name: values[prefix + name] for name in kept if prefix + name in values}
    first: dict[nn.Parameter, str] = {}
    for name in state:
        if name in owners.by_name:
            other = first.setdefault(owners.by_name[name], name)
            if not _equal(state[other], state[name]):
                raise tie_error(other, name)
    return state | {name: state[first[tensor]] for name, tensor in owners.by_name.items() if name in kept and tensor in first}


def _equal(first: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one layout hold the same bits on this rank."""
    if first is other:
        return True
    parts = [_torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor for tensor in (first, other)]
    return torch.equal(*map(bytes_of, parts))


def packed_targets(keys: Iterable[str], entries: Mapping[str, Any]) -> Named:
    """Return new tensors for what ``packed`` packed, of those keys that are there."""
    return {key: torch.empty(entries[key].size, dtype=torch.uint8) for key in keys if key in entries}


def optimizer_targets(owners: Owners, entries: Mapping[str, Any], misfits: Misfits) -> Named:
    """Return new tensors for the entries of the optimizers."""
    targets: Named = {}
    if owners.optimizers and not any(key.startswith(GROUPS) for key in entries):
        misfits.add(MISSING, "the state of any optimizer")
    scalars = _scalars(owners, entries)
    for key, entry in entries.items():
        if not owners.optimizers or not key.startswith((STATE, GROUPS)):
            continue
        name = None if key.startswith(GROUPS) else _owner(key.removeprefix(STATE), owners.by_name)
        if key.startswith(STATE) and name is None:
            misfits.add(UNEXPECTED, f"optimizer state {key.removeprefix(STATE)}")
        elif not isinstance(entry, TensorStorageMetadata):
            targets[key] = None
        elif name is None or _last(key) in scalars:
            targets[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        else:
            targets[key] = _empty_beside(owners.by_name[name], entry)
    return targets


def _scalars(owners: Owners, entries: Mapping[str, Any]) -> set[str]:
    """Return the names of states that are no tensor like their parameter: a parameter without dimensions does not tell."""
    found = {"step"}  # which torch's optimizers know by this name, too
    for key, entry in entries.items():
        if key.startswith(STATE) and isinstance(entry, TensorStorageMetadata) and not entry.size:
            name = _owner(key.removeprefix(STATE), owners.by_name)
            if name is not None and owners.by_name[name].ndim:
                found.add(_last(key))
    return found


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _owner(key: str, by_name: Mapping[str, Any]) -> str | None:
    """Return the parameter whose state an entry is: the longest name that the key starts with."""
    parts = key.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    return next((name for name in names if name in by_name), None)


def _empty_beside(tensor: Tensor, entry: TensorStorageMetadata) -> Tensor:
    """Make a DTensor for an optimizer's state, cut as its parameter is where it has as many rows."""
    assert isinstance(tensor, DTensor)
    (placement,) = tensor.placements
    if isinstance(placement, Shard) and entry.size[placement.dim : placement.dim + 1] != tensor.shape[placement.dim : placement.dim + 1]:
        placement = Replicate()
    return empty_dtensor(entry.size, dtype=entry.properties.dtype, device_mesh=tensor.device_mesh, placements=[placement])


def optimizer_states(owners: Owners, values: Named, misfits: Misfits) -> list[Named]:
    """Return what each optimizer's ``load_state_dict`` takes."""
    states: dict[nn.Parameter, Named] = {}
    groups: dict[int, Named] = {}
    flat: dict[nn.Parameter, Named] = {}
    for key, value in values.items():
        if key.startswith(STATE):
            name = _owner(key.removeprefix(STATE), owners.by_name)
            assert name is not None
            *parents, last = key.removeprefix(f"{STATE}{name}.").split(".")
            place = states.setdefault(owners.by_name[name], {})
            for part in parents:
                place = place.setdefault(part, {})
            place[last] = value
        elif match := re.fullmatch(re.escape(GROUPS) + r"(\d+)\.(.+)", key):
            groups.setdefault(int(match[1]), {})[match[2]] = value
        elif key.startswith(GROUPS) and (name := _owner(key.removeprefix(GROUPS), owners.by_name)):
            # DCP's flattened form: the options of each parameter
            flat.setdefault(owners.by_name[name], {})[key.removeprefix(f"{GROUPS}{name}.")] = value
    left = [group for _, group in sorted(groups.items())]
    found = []
    for optimizer in owners.optimizers:
        order = held(optimizer)
        numbers = {tensor: number for number, tensor in enumerate(order)}
        chosen = []
        for group in optimizer.param_groups:
            options = [flat.pop(tensor) for tensor in group["params"] if tensor in flat]
            is_flat = options and len(options) == len(group["params"]) and all(one == options[0] for one in options)
            saved = options[0] if is_flat else _group_like(group, left, owners)
            if saved is None:
                names = [owners.first_name[tensor] for tensor in group["params"]]
                misfits.add("no such parameter group", f"{type(optimizer).__name__} of {', '.join(names) or 'nothing'}")
                continue
            left = [one for one in left if one is not saved]
            lacking, foreign = group.keys() - saved.keys() - {"param_names"}, saved.keys() - group.keys() - {"initial_lr"}
            if lacking and foreign:
                misfits.add("another kind of optimizer", f"{type(optimizer).__name__} has {sorted(lacking)}, the file {sorted(foreign)}")
            chosen.append({**saved, "params": [numbers[tensor] for tensor in group["params"]]})
        found.append({"state": {numbers[tensor]: states.pop(tensor) for tensor in order if tensor in states}, "param_groups": chosen})
    for group in left if owners.optimizers else []:
        misfits.add("in no optimizer given", ", ".join(group.get("params", [])) or "an empty group")
    for tensor in states | flat:
        misfits.add("in no optimizer given", f"the state of {owners.first_name[tensor]}")
    return found


def _group_like(group: Named, saved: Sequence[Named], owners: Owners) -> Named | None:
    """Return the first saved group of the same parameters."""
    wanted = set(group["params"])
    for one in saved:
        names = one.get("params", [])
        if len(names) == len(wanted) and {owners.by_name.get(name) for name in names} == wanted:
            return one
    return None
