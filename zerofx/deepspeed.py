"""Read settings written for DeepSpeed: one flat mapping of the settings that are given, by dotted name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerofx.deepspeed_keys import ALIASES, MAPPED, REFUSED, TYPES, UNUSED
from zerofx.errors import ConfigError
from zerofx.fieldtypes import read_from, typed
from zerofx.names import nearest, unique

KNOWN = (*MAPPED, *UNUSED, *REFUSED)
# Settings that hold others; all but the params of what is built by name hold a fixed set.
_SECTIONS = tuple(dict.fromkeys(name.rpartition(".")[0] for name in KNOWN if "." in name))
_OPEN_SECTIONS = ("optimizer.params", "scheduler.params")


# A flag may be written as text.
_FLAGS = {"true": True, "false": False}


def read(settings: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return settings of DeepSpeed, or of a JSON file of them, by dotted name: ``{"zero_optimization.stage": 2}``.

    What is null is left out, as if it were not there, and an ``"auto"`` is passed on. Raises ConfigError on a file, or on types, that
    cannot be read, and on a name that is not known, with the nearest that is.
    """
    where = source_of(settings)
    if isinstance(settings, (str, Path)):
        try:
            # some editors begin a file with a byte order mark
            settings = json.loads(Path(settings).read_text(encoding="utf-8-sig"), object_pairs_hook=unique)
        except (OSError, ValueError, RecursionError) as error:
            raise _unreadable(f"{where!r} is not a JSON file", where, str(error)) from None
    if not isinstance(settings, Mapping):
        raise _unreadable(f"{settings!r} is no mapping of settings", where, "settings go by name")
    found: dict[str, Any] = {}
    for name, value in _leaves("", settings, where):
        if name in found:
            raise _unreadable(f"{name} is set twice", where, "DeepSpeed takes it by two names, and both are given")
        found[name] = _FLAGS.get(value.lower(), value) if isinstance(value, str) else value
    with read_from(where):
        return {name: value if value == "auto" else typed(value, TYPES.get(name, Any), name) for name, value in found.items()}


def source_of(settings: Any) -> str:
    """Return how to name what settings are from: their file, where there is one."""
    return str(settings) if isinstance(settings, (str, Path)) else "the settings of DeepSpeed"


def _leaves(path: str, settings: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        name = ALIASES.get(f"{path}{key}", f"{path}{key}")
        is_section = name in _SECTIONS or name in _OPEN_SECTIONS
        if name not in KNOWN and not is_section and not path.startswith(_OPEN_SECTIONS):
            near = nearest(f"{path}{key}", (*KNOWN, *ALIASES, *_SECTIONS))
            raise ConfigError(
                f"{path}{key} is no setting of DeepSpeed that zerofx knows",
                where=where,
                why="a setting that is misspelt would be lost without a word",
                remedy=near or "leave it out",
            )
        if value is None:
            continue
        if not is_section:
            yield name, value
        elif isinstance(value, Mapping):
            yield from _leaves(f"{name}.", value, where)
        else:
            raise _unreadable(f"{name}={value!r} is no mapping of settings", where, f"{name} holds settings by name")


def _unreadable(what: str, where: str, why: str) -> ConfigError:
    return ConfigError(
        what, where=where, why=why, remedy='pass a dict such as {"zero_optimization": {"stage": 2}}, or the path of a JSON file of one'
    )


def precision_of(settings: Mapping[str, Any]) -> str:
    """Return ``"bf16"``, ``"fp16"`` or ``"fp32"``; an ``"auto"`` is passed on. Raises ConfigError where both are enabled."""
    enabled = {name: settings.get(f"{name}.enabled", False) for name in ("bf16", "fp16")}
    if "auto" in enabled.values():
        return "auto"
    if all(enabled.values()):
        raise ConfigError(
            "bf16 and fp16 are both enabled", where="bf16.enabled, fp16.enabled", why="a model computes in one of them", remedy="enable one"
        )
    return next((name for name, is_on in enabled.items() if is_on), "fp32")


def estimate_arguments(settings: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return what settings of DeepSpeed, or a JSON file of them, say of the arguments of ``zerofx.estimate``.

    Read are the ZeRO stage, what is offloaded, bf16 and fp16, the optimizer's type and the gradient accumulation. What they leave out
    is as in DeepSpeed: stage 0, fp32, nothing offloaded; of an optimizer made elsewhere they say nothing. An ``"auto"`` is passed on,
    to be refused unless the caller says better. Raises ConfigError as ``read`` does.
    """
    given = read(settings)
    found = {
        "stage": given.get("zero_optimization.stage", 0),
        "precision": precision_of(given),
        "offload": _offload(given),
        "micro_batches": _micro_batches(given),
    }
    return {**found, "optimizer": _optimizer(given)} if "optimizer.type" in given else found


def _offload(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The update runs where the optimizer's states are, so the gradients follow them (Ren et al., "ZeRO-Offload", 2021, section 4)."""
    return (
        *(("optimizer", "gradients") if _is_on_host(settings, "offload_optimizer", "cpu_offload") else ()),
        *(("parameters",) if _is_on_host(settings, "offload_param", "cpu_offload_param") else ()),
    )


def _is_on_host(settings: Mapping[str, Any], name: str, before: str) -> bool:
    target = settings.get(f"zero_optimization.{name}") or {}
    device = target.get("device", "none") if isinstance(target, Mapping) else target
    if device not in ("none", "cpu"):
        raise ConfigError(
            f"{name} to {device!r} is not known",
            where=f"zero_optimization.{name}.device",
            why="the devices with a closed form are none, cpu",
            remedy='set the device to "cpu", or leave the setting out',
        )
    return bool(device == "cpu" or settings.get(f"zero_optimization.{before}"))


def _micro_batches(settings: Mapping[str, Any]) -> Any:
    """DeepSpeed divides the batch by the micro-batch and by the ranks where it is not told; the ranks are not known here."""
    is_divided = {"train_batch_size", "train_micro_batch_size_per_gpu"} <= settings.keys()
    return settings.get("gradient_accumulation_steps", "left to train_batch_size" if is_divided else 1)


def _optimizer(settings: Mapping[str, Any]) -> str:
    name = str(settings["optimizer.type"])
    return "momentum" if name.lower() == "sgd" and settings.get("optimizer.params.momentum") else name
