"""Dtypes and precisions by name. torch is imported where one is needed, because the command line reads settings without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zerofx.errors import ConfigError
from zerofx.names import nearest

if TYPE_CHECKING:
    import torch

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# What computes and travels, and what gradients are averaged in: a sum over many ranks loses the digits that half precision lacks.
_PRECISIONS: Mapping[str, tuple[str | None, str | None]] = {
    "bf16": ("bfloat16", "float32"),
    "fp16": ("float16", "float32"),
    "fp32": (None, None),
}


def dtype_of(name: Any, field: str) -> torch.dtype | None:
    """Return a floating dtype by its name in torch, or in short (``"bf16"``). Raises ConfigError for another name."""
    import torch

    found = getattr(torch, _SHORT.get(name, name), None) if isinstance(name, str) else name
    if name is None or (isinstance(found, torch.dtype) and found.is_floating_point):
        return found
    usual = [*_SHORT, *_SHORT.values()]
    raise ConfigError(
        f"{field}={name!r} is no {'floating ' if isinstance(found, torch.dtype) else ''}dtype",
        where=field,
        why=f"the usual names are {', '.join(usual)}",
        remedy=nearest(name, usual) or "pass one of them",
    )


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def precision_fields(precision: Any, where: str) -> dict[str, Any]:
    """Return the fields of ``Config`` that a precision sets: ``"bf16"``, ``"fp16"``, ``"fp32"``, torch's MixedPrecisionPolicy, or None.

    The names mean what users of FSDP2 pass: compute in half precision, average gradients in fp32. Raises ConfigError for another name.
    """
    if precision is None:
        return {}
    if isinstance(precision, str) and precision in _PRECISIONS:
        compute, reduce = _PRECISIONS[precision]
        return {"param_dtype": dtype_of(compute, "param_dtype"), "reduce_dtype": dtype_of(reduce, "reduce_dtype")}
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if isinstance(precision, MixedPrecisionPolicy):
        return asdict(precision)
    raise ConfigError(
        f"precision={precision!r} is not known",
        where=where,
        why=f"it is a torch.distributed.fsdp.MixedPrecisionPolicy, or one of {', '.join(_PRECISIONS)}",
        remedy=nearest(precision, _PRECISIONS) or 'pass "bf16", or MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)',
    )
