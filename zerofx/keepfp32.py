"""Modules that compute in fp32 within a model that computes in half precision."""

from __future__ import annotations

import functools
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from zerofx import _torch
from zerofx.config import Config
from zerofx.errors import ConfigError, ShardingError
from zerofx.names import nearest

# torch's kernels take running statistics in fp32 with parameters in fp32 only.
_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def kept_modules(model: nn.Module, settings: Config) -> tuple[nn.Module, ...]:
    """Return the modules that compute in fp32 with all that is within them: those that ``keep_fp32`` names, and batch norms.

    Raises ConfigError for a name that matches nothing, or the model itself; ShardingError where such a module shares a parameter with
    one that computes in half precision.
    """
    named = dict(model.named_modules())
    for pattern in settings.keep_fp32:
        found = [name for name, module in named.items() if _matches(pattern, name, module)]
        if not found or "" in found:
            classes = dict.fromkeys(type(module).__name__ for module in named.values())
            raise ConfigError(
                f"keep_fp32={pattern!r} {'is the model itself' if found else 'matches no module'}",
                where=f"zerofx.compile(keep_fp32=...), {type(model).__name__}",
                why=f"it names a module within the model, by its class ({', '.join(classes)}) or a pattern of its qualified name",
                remedy='pass precision="fp32"' if found else nearest(pattern, [*classes, *named]) or "pass one of them",
            )
    if settings.param_dtype in (None, torch.float32):
        return ()
    kept: list[nn.Module] = []
    within: set[nn.Module] = set()
    for name, module in named.items():
        is_kept = any(_matches(pattern, name, module) for pattern in settings.keep_fp32) or _has_statistics(module)
        if is_kept and name and module not in within:
            kept.append(module)
            within.update(module.modules())
    _check_sharing(named, within)
    return tuple(kept)


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    return any(base.__name__ == pattern for base in type(module).__mro__) or (fnmatchcase(name, pattern) and bool(name))


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _WITH_STATISTICS) and module.running_mean is not None and module.running_mean.dtype == torch.float32


def _check_sharing(named: dict[str, nn.Module], within: set[nn.Module]) -> None:
    kept = {tensor for module in within for tensor in module._parameters.values() if tensor is not None}
    for name, module in named.items():
        for own, tensor in module._parameters.items():
            if module not in within and tensor in kept:
                other = next(path for path, one in named.items() if one in within and tensor in set(one._parameters.values()))
                raise ShardingError(
                    f"{other or 'the model'} computes in fp32 and shares {own} with {name or 'the model'}, which does not",
                    where=f"{name}.{own}".lstrip("."),
                    why="a shared parameter is gathered once, in one dtype",
                    remedy="let keep_fp32 name both modules, or neither",
                )


def compute_in_fp32(module: nn.Module, outside: torch.dtype) -> None:
    """Cast what enters a module to fp32, and what leaves it to the dtype that the model computes in.

    The casts are hooks of the module, so that they are traced where its call is.
    """
    module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
    module.register_forward_hook(functools.partial(_cast_outputs, outside))


def _cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast((args, kwargs), torch.float32)


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, outputs: Any) -> Any:
    return _cast(outputs, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return _torch.apply_to_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
