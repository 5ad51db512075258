"""Read settings written for DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerofx.errors import ConfigError

_MAPPINGS = ("zero_optimization", "bf16", "fp16", "optimizer")


def estimate_arguments(settings: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return what settings of DeepSpeed, or a JSON file of them, say of the arguments of ``zerofx.estimate``.

    Read are the ZeRO stage, what is offloaded, bf16 and fp16, the optimizer's type and the gradient accumulation. What they leave out
    is as in DeepSpeed: stage 0, fp32, nothing offloaded; of an optimizer made elsewhere they say nothing. An ``"auto"`` is passed on,
    to be refused unless the caller says better. Raises ConfigError on a file, or on types, that cannot be read.
    """
    settings = _read(settings)
    zero = settings.get("zero_optimization", {})
    found = {
        "stage": zero.get("stage", 0),
        "precision": _precision(settings),
        "offload": _offload(zero),
        "micro_batches": _micro_batches(settings),
    }
    return {**found, "optimizer": _optimizer(settings["optimizer"])} if "optimizer" in settings else found


def _read(settings: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    where = "zerofx.estimate(deepspeed=...)"
    if isinstance(settings, (str, Path)):
        where = str(settings)
        try:
            settings = json.loads(Path(settings).read_text())
        except (OSError, ValueError) as error:
            raise _unreadable(f"{where!r} is not a JSON file", where, str(error)) from None
    if not isinstance(settings, Mapping):
        raise _unreadable(f"{settings!r} is no mapping of settings", where, "settings go by name")
    found = {name: value for name, value in settings.items() if value is not None}
    for name in _MAPPINGS:
        if not isinstance(found.get(name, {}), Mapping):
            raise _unreadable(f"{name}={found[name]!r} is no mapping of settings", where, f"{name} holds settings by name")
    return found


def _unreadable(what: str, where: str, why: str) -> ConfigError:
    return ConfigError(
        what, where=where, why=why, remedy='pass a dict such as {"zero_optimization": {"stage": 2}}, or the path of a JSON file of one'
    )


def _precision(settings: Mapping[str, Any]) -> str:
    enabled = {name: settings.get(name, {}).get("enabled", False) for name in ("bf16", "fp16")}
    if "auto" in enabled.values():
        return "auto"
    return next((name for name, is_on in enabled.items() if is_on), "fp32")


def _offload(zero: Mapping[str, Any]) -> tuple[str, ...]:
    """The update runs where the optimizer's states are, so the gradients follow them (Ren et al., "ZeRO-Offload", 2021, section 4)."""
    return (
        *(("optimizer", "gradients") if _is_on_host(zero, "offload_optimizer") else ()),
        *(("parameters",) if _is_on_host(zero, "offload_param") else ()),
    )


def _is_on_host(zero: Mapping[str, Any], name: str) -> bool:
    target = zero.get(name) or {}
    device = target.get("device", "none") if isinstance(target, Mapping) else target
    if device not in ("none", "cpu"):
        raise ConfigError(
            f"{name} to {device!r} is not known",
            where=f"zero_optimization.{name}.device",
            why="the devices with a closed form are none, cpu",
            remedy='set the device to "cpu", or leave the setting out',
        )
    return bool(device == "cpu")


def _micro_batches(settings: Mapping[str, Any]) -> Any:
    """DeepSpeed divides the batch by the micro-batch and by the ranks where it is not told; the ranks are not known here."""
    is_divided = {"train_batch_size", "train_micro_batch_size_per_gpu"} <= settings.keys()
    return settings.get("gradient_accumulation_steps", "left to train_batch_size" if is_divided else 1)


def _optimizer(optimizer: Mapping[str, Any]) -> str:
    name = str(optimizer.get("type", ""))
    options = optimizer.get("params")
    has_momentum = name.lower() == "sgd" and isinstance(options, Mapping) and options.get("momentum")
    return "momentum" if has_momentum else name
