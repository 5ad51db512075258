"""What may be asked of a plan: a model, its inputs, and numbers that can be. Everything else is refused in words."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from zerofx.errors import ConfigError, ShardingError

# Beyond these nobody plans; a mistyped number should not take all memory, or hours.
MOST_RANKS, MOST_MICRO_BATCHES, MOST_TOKENS = 2**20, 2**12, 2**31


def check_count(name: str, count: Any, most: int) -> None:
    """Raise ConfigError for anything but a whole number from 1 to ``most``."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        raise ConfigError(
            f"{name}={count!r} is not a whole number of 1 to {most}",
            where=f"zerofx.plan({name}=...)",
            why="it counts ranks, micro-batches or tokens",
            remedy="pass an int in that range",
        )


def check_mesh(world_size: int, mesh: Any) -> None:
    """Raise ConfigError for a mesh that does not hold the ranks in one dimension; None stands for all ranks."""
    if mesh is None:
        return
    if not isinstance(mesh, tuple) or not mesh:
        raise ConfigError(
            f"mesh={mesh!r} is no shape of a mesh",
            where="zerofx.plan(mesh=...)",
            why="it is a tuple of sizes",
            remedy=f"pass ({world_size},)",
        )
    for place, size in enumerate(mesh):
        check_count(f"mesh[{place}]", size, MOST_RANKS)
    if math.prod(mesh) != world_size or len(mesh) != 1:
        holds = f"holds {math.prod(mesh)} ranks" if math.prod(mesh) != world_size else f"has {len(mesh)} dimensions"
        raise ConfigError(
            f"world_size={world_size} does not fit a mesh of {' x '.join(map(str, mesh))}",
            where="zerofx.plan(mesh=...)",
            why=f"the mesh {holds}; states are sharded over one dimension of all ranks",
            remedy=f"pass mesh=({world_size},), or world_size={math.prod(mesh)} with one dimension",
        )


def check_call(model: Any, args: Any, kwargs: Any) -> None:
    """Raise ShardingError for what is no model, and ConfigError for arguments that are not its arguments."""
    if not isinstance(model, nn.Module) or next(iter(model.parameters()), None) is None:
        raise ShardingError(
            f"{type(model).__name__} has no parameters to plan"
            if isinstance(model, nn.Module)
            else f"{type(model).__name__} is no torch.nn.Module",
            where="zerofx.plan(model, ...)",
            why="a plan shards the parameters of a module",
            remedy="pass a module with parameters, meta ones included",
        )
    if not isinstance(args, tuple | list):
        raise ConfigError(
            f"args is a {type(args).__name__}, not a tuple of arguments",
            where="zerofx.plan(model, args, ...)",
            why="the model is called as model(*args, **kwargs)",
            remedy="pass args=(value,)",
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise ConfigError(
            f"kwargs is a {type(kwargs).__name__}, not a dict of arguments",
            where="zerofx.plan(model, args, kwargs, ...)",
            why="the model is called as model(*args, **kwargs)",
            remedy='pass kwargs={"name": value}',
        )
