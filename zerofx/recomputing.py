"""Which activations a backward computes again instead of keeping them, by ``Config.recompute``. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from zerofx.origins import Call, calls_of, is_backward
from zerofx.params import block_of
from zerofx.program import is_view
from zerofx.work import formula_of

Policy = Callable[..., CheckpointPolicy | bool]


class Extent(enum.Enum):
    """How much of a part a backward computes again."""

    NOTHING = "nothing"
    CHEAP = "cheap operators"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Choice:
    """How much of each part of a model the backward computes again, instead of one rule for all."""

    levels: tuple[tuple[Call, Extent], ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a forward that is computed again as one: a call of a submodule, what is computed again of it, and what must be kept.

    What is kept is read outside of the region, or was chosen to be.
    """

    call: Call
    again: tuple[Node, ...]
    kept: tuple[Node, ...]


def is_block(module: str) -> bool:
    """Whether a qualified name is that of a repeated block: an item of a list of modules, such as ``transformer.h.3``."""
    return module.rpartition(".")[2].isdigit() and block_of(f"{module}.x") == module


def matches(module: str, patterns: Sequence[str]) -> bool:
    """Whether one of some patterns of qualified names fits a module within the model."""
    return bool(module) and any(fnmatchcase(module, pattern) for pattern in patterns)


def regions(nodes: Sequence[Node], recompute: Any) -> list[Region]:
    """Return the regions of a joint graph that ``Config.recompute`` names, in order of first use; none for None."""
    if recompute is None:
        return []
    policy, members = policy_of(recompute), dict[Call, list[Node]]()
    by_part = isinstance(recompute, Choice) or policy is not None
    for node in nodes:
        if node.op != "call_function" or is_backward(node) or _writes(node):
            continue
        if (call := part_of(node) if by_part else _named(node, recompute)) is not None:
            members.setdefault(call, []).append(node)
    if not isinstance(recompute, Choice):
        return [_region(call, inside, policy) for call, inside in members.items()]
    levels = dict(recompute.levels)
    chosen = [(call, inside, levels.get(call, Extent.NOTHING)) for call, inside in members.items()]
    return [
        _region(call, inside, cheap if extent is Extent.CHEAP else None) for call, inside, extent in chosen if extent is not Extent.NOTHING
    ]


def must_keep(node: Node) -> None:
    """Tag a node for torch's partitioner: the backward computes neither it again, nor, as something to compute again, views of it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    left = [node]
    while left:
        for user in left.pop().users:
            if is_view(user) and not is_backward(user):
                user.meta.pop("recompute", None)  # of a checkpoint of the user's own
                left.append(user)


def policy_of(recompute: Any) -> Policy | None:
    """Return the policy by operator that ``Config.recompute`` names, None where it is no such."""
    return cheap if recompute == "selective" else recompute if callable(recompute) else None


def outermost(names: Sequence[str], recompute: Any) -> list[str]:
    """Return which modules of a model ``Config.recompute`` means, none of which is within another."""
    if recompute is None:
        return []
    by_operator = policy_of(recompute) is not None
    chosen = [name for name in names if _is_meant(name, "blocks" if by_operator else recompute)]
    if by_operator:  # what has no blocks within is a part too
        chosen += [name for name in names if name and "." not in name and not any(block.startswith(f"{name}.") for block in chosen)]
    return [name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)]


def cheap(ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep matrix products, convolutions and attention, what torch's ``flop_registry`` counts, and compute all else again.

    A policy as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes.
    """
    is_counted = formula_of(getattr(op, "overloadpacket", op)) is not None
    return CheckpointPolicy.MUST_SAVE if is_counted else CheckpointPolicy.PREFER_RECOMPUTE


def part_of(node: Node) -> Call:
    """Return the part of the model that a node belongs to: its block, else its outermost submodule, else the root."""
    calls = [call for call in calls_of(node) if call.module]
    return next((call for call in calls if is_block(call.module)), calls[0] if calls else Call(""))


def _named(node: Node, recompute: Any) -> Call | None:
    return next((call for call in calls_of(node) if _is_meant(call.module, recompute)), None)


def _is_meant(module: str, recompute: Any) -> bool:
    """Whether ``Config.recompute``, ``"blocks"`` or patterns, names a module."""
    return is_block(module) if recompute == "blocks" else matches(module, recompute)


def _region(call: Call, members: Sequence[Node], policy: Policy | None) -> Region:
    inside = set(members)
    kept: dict[Node, None] = {}
    if policy is not None:
        kept.update(dict.fromkeys(node for node in members if not is_view(node) and _is_kept(node, policy)))
    for node in members:
        if any(user not in inside and not is_backward(user) for user in node.users):
            kept[_source(node, inside)] = None
    return Region(call, tuple(node for node in members if _source(node, inside) not in kept), tuple(kept))


def _is_kept(node: Node, policy: Policy) -> bool:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
    found = policy(SelectiveCheckpointContext(is_recompute=False), node.target, *args, **kwargs)
    return found in (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def _source(node: Node, inside: set[Node]) -> Node:
    """Return what a view, or an item of a tuple, is one of: torch's partitioner keeps that, or nothing."""
    while is_view(node) and node.all_input_nodes[0] in inside:
        node = node.all_input_nodes[0]
    return node


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
