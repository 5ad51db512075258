"""Translate settings of DeepSpeed into what trains the same model here."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from zerofx import deepspeed
from zerofx.batch import Batch
from zerofx.deepspeed_keys import MAPPED, OFFLOADED, REFUSED, TYPES, UNUSED
from zerofx.errors import ConfigError
from zerofx.fieldtypes import Amount, Count, Natural, read_from, typed
from zerofx.lossscale import LossScale
from zerofx.names import nearest
from zerofx.precision import dtype_of

Given = Mapping[str, Any]


def _itself(value: Any) -> Any:
    return value


# What transformers' Trainer puts in the place of an "auto": from which of its arguments, and how.
_AUTO: Mapping[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "train_micro_batch_size_per_gpu": (("per_device_train_batch_size",), _itself),
    "gradient_accumulation_steps": (("gradient_accumulation_steps",), _itself),
    "gradient_clipping": (("max_grad_norm",), _itself),
    "bf16.enabled": (("bf16",), _itself),
    "fp16.enabled": (("fp16",), _itself),
    "optimizer.params.lr": (("learning_rate",), _itself),
    "optimizer.params.betas": (("adam_beta1", "adam_beta2"), lambda one, two: [one, two]),
    "optimizer.params.eps": (("adam_epsilon",), _itself),
    "optimizer.params.weight_decay": (("weight_decay",), _itself),
    "scheduler.params.warmup_min_lr": ((), lambda: 0),
    "scheduler.params.warmup_max_lr": (("learning_rate",), _itself),
    "scheduler.params.warmup_num_steps": (("warmup_steps",), lambda steps: max(1, steps)),
    "scheduler.params.total_num_steps": (("num_training_steps",), _itself),
    "zero_optimization.reduce_bucket_size": (("hidden_size",), lambda width: width * width),
    "zero_optimization.prefetch_bucket_size": (("hidden_size",), lambda width: int(0.9 * width * width)),
    "zero_optimization.param_persistence_threshold": (("hidden_size",), lambda width: 10 * width),
}
_ARGUMENTS: Mapping[str, Any] = {
    "per_device_train_batch_size": Count,
    "gradient_accumulation_steps": Count,
    "max_grad_norm": Amount,
    "bf16": bool,
    "fp16": bool,
    "learning_rate": Amount,
    "adam_beta1": Amount,
    "adam_beta2": Amount,
    "adam_epsilon": Amount,
    "weight_decay": Amount,
    "warmup_steps": Natural,
    "num_training_steps": Natural,
    "hidden_size": Count,
}
# Defaults that DeepSpeed changed: the first version with the new one, the old, and the new.
_CHANGED_DEFAULTS = {"gradient_clipping": ((0, 19, 3), 0.0, 1.0), "bf16.check_grad_overflow": ((0, 19, 3), False, True)}

_TORCH_OPTIMIZERS = ("SGD", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
_HOOK_LIMITS = {
    "prefetch_bucket_size": "prefetch_elements",
    "max_live_parameters": "max_live_elements",
    "max_reuse_distance": "max_reuse_distance_elements",
    "param_persistence_threshold": "persistence_threshold_elements",
}


@dataclass(frozen=True, slots=True)
class Component:
    """Something to build, by its name and arguments: an optimizer of ``torch.optim``, a schedule as DeepSpeed names it."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """What became of each setting of a file: where it went, or why it has no meaning here."""

    mapped: Mapping[str, str]
    unused: Mapping[str, str]

    def __str__(self) -> str:
        rows = [*((name, f"-> {place}") for name, place in self.mapped.items()), *((name, why) for name, why in self.unused.items())]
        return tabulate(rows, headers=("setting of DeepSpeed", "here"), disable_numparse=True)


@dataclass(frozen=True, slots=True)
class Translation:
    """Settings of DeepSpeed in terms of zerofx; ``fields`` and ``hooks`` are those of ``Config`` and ``HookLimits``."""

    fields: Mapping[str, Any]
    hooks: Mapping[str, Any] = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)


def translate(settings: Given | str | Path, *, version: str | None, world_size: int | None, auto: Given) -> Translation:
    """Translate settings of DeepSpeed, or a JSON file of them: see ``Config.from_deepspeed``."""
    if world_size is not None and (isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1):
        raise ConfigError(
            f"world_size={world_size!r} is no number of ranks",
            where="zerofx.Config.from_deepspeed(world_size=...)",
            why="the sizes of a batch are divided by it",
            remedy="pass an int of at least 1",
        )
    if not isinstance(auto, Mapping):
        raise ConfigError(
            f"auto={auto!r} is no mapping",
            where="zerofx.Config.from_deepspeed(auto=...)",
            why="it holds what each auto stands for, by name",
            remedy="pass a dict, such as vars(training_arguments)",
        )
    given, since = deepspeed.read(settings), _version(version)
    with read_from(deepspeed.source_of(settings)):
        return _translated(given, since, world_size, auto)


def _translated(given: Given, version: tuple[int, ...] | None, world_size: int | None, auto: Given) -> Translation:
    _refuse(given)
    found = _resolved(given, auto)
    found |= _defaults(found, version)
    precision = deepspeed.precision_of(found)
    places = {name: MAPPED[_entry(name)].place for name in given if _entry(name) in MAPPED}
    places |= dict.fromkeys((name for name in OFFLOADED if _target(found, name) is not None), "config.offload")
    report = Report(places, {name: UNUSED.get(name, "it is off") for name in given if name not in places})
    rest = {
        "batch": Batch.of(found, world_size),
        "gradient_clipping": found["gradient_clipping"] or None,
        "loss_scale": _loss_scale(found, precision),
        "optimizer": _optimizer(found),
        "scheduler": _scheduler(found),
        "report": report,
    }
    limits = {name: f"zero_optimization.{key}" for key, name in _HOOK_LIMITS.items()}
    return Translation(_fields(found, precision), {name: found[key] for name, key in limits.items() if key in found}, rest)


def _entry(name: str) -> str:
    """Return the entry of the table of settings that one belongs to: that of all params, for one of them."""
    return next((section for section in ("optimizer.params", "scheduler.params") if name.startswith(f"{section}.")), name)


def _refuse(given: Given) -> None:
    wanted = {name: REFUSED[name] for name, value in given.items() if name in REFUSED and REFUSED[name].concerns(value)}
    if wanted:
        raise ConfigError(
            f"{', '.join(wanted)} cannot be had here",
            where=", ".join(wanted),
            why="; ".join(f"{name}: {refusal.why}" for name, refusal in wanted.items()),
            remedy="; ".join(f"{name}: {refusal.remedy}" for name, refusal in wanted.items()),
        )


def _resolved(given: Given, auto: Given) -> dict[str, Any]:
    """Put values in the place of each ``"auto"`` that is read. The batch's size is left out, to be derived."""
    found = {}
    for name, value in given.items():
        if value != "auto" or _entry(name) not in MAPPED:
            found[name] = value
        elif name in auto:
            found[name] = typed(auto[name], TYPES.get(name, Any), f"auto[{name!r}]")
        elif name != "train_batch_size" and not (_is_limit(name) and given.get("zero_optimization.stage") != 3):
            found[name] = _auto(name, auto)
    return found


def _is_limit(name: str) -> bool:
    return name.removeprefix("zero_optimization.") in _HOOK_LIMITS


def _auto(name: str, auto: Given) -> Any:
    sources, value = _AUTO.get(name, ((name,), None))
    missing = [source for source in sources if source not in auto]
    if missing or value is None:
        choices = " or ".join(f"auto={{{names}}}" for names in dict.fromkeys((f"{name!r}: ...", ", ".join(f"{s!r}: ..." for s in sources))))
        raise ConfigError(
            f'{name} is "auto", and nothing says what that stands for',
            where=name,
            why="transformers' Trainer fills it in from its arguments; here they are passed",
            remedy=f"pass {choices}, or write the value into the settings",
        )
    return value(*(typed(auto[source], _ARGUMENTS[source], f"auto[{source!r}]") for source in sources))


def _version(version: str | None) -> tuple[int, ...] | None:
    if version is None:
        return None
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version) if isinstance(version, str) else None
    if match is None:
        raise ConfigError(
            f"version={version!r} is no version of DeepSpeed",
            where="zerofx.Config.from_deepspeed(version=...)",
            why="it is text such as 0.19.8",
            remedy="pass the version that the settings were written for",
        )
    return tuple(int(part) for part in match.groups())


def _defaults(found: Given, version: tuple[int, ...] | None) -> dict[str, Any]:
    """Return the defaults that depend on the version, of settings that are not given; without a version the newest, with a warning."""
    concerned = [name for name in _CHANGED_DEFAULTS if not name.startswith("bf16.") or found.get("bf16.enabled")]
    left_out = {name: _CHANGED_DEFAULTS[name] for name in concerned if name not in found}
    if version is None and left_out:
        changes = "; ".join(
            f"{name} was {old} before {'.'.join(map(str, since))} and is {new} since" for name, (since, old, new) in left_out.items()
        )
        warnings.warn(
            f"defaults of DeepSpeed that changed are not in the settings, and the new ones are taken: {changes}. "
            "Pass version= to from_deepspeed, or write them into the settings.",
            stacklevel=5,
        )
    return {name: old if version is not None and version < since else new for name, (since, old, new) in left_out.items()}


def _fields(found: Given, precision: str) -> dict[str, Any]:
    compute = dtype_of(precision, "precision") if precision != "fp32" else None
    fields: dict[str, Any] = {"stage": found.get("zero_optimization.stage", 0), "param_dtype": compute}
    if "communication_data_type" in found:
        fields["reduce_dtype"] = dtype_of(found["communication_data_type"], "communication_data_type")
    if compute is not None:
        fields["cast_forward_inputs"] = precision == "fp16" and bool(found.get("fp16.auto_cast", False))
    if found.get("zero_optimization.overlap_comm") is False:
        fields["reduces_in_flight"] = 0
    buckets = [f"zero_optimization.{name}_bucket_size" for name in ("reduce", "allgather")]
    elements = [found[name] for name in buckets if name in found]
    if elements:
        fields["bucket_max_bytes"] = min(elements) * (4 if compute is None else compute.itemsize)
    targets = {kind: target for name, kinds in OFFLOADED.items() for kind in kinds if (target := _target(found, name)) is not None}
    return {**fields, "offload": targets} if targets else fields


def _target(found: Given, name: str) -> str | None:
    """Return where a table of DeepSpeed's keeps its states, as a target of ``Offload``; None where they stay."""
    table = found.get(name)
    if not isinstance(table, Mapping) or table.get("device") != "nvme":
        return None
    path = table.get("nvme_path")
    return "disk" if path is None else f"disk:{path}"


def _loss_scale(found: Given, precision: str) -> LossScale | None:
    if precision == "bf16":
        return LossScale(initial_scale=1.0, is_dynamic=False) if found["bf16.check_grad_overflow"] else None
    if precision == "fp32":
        return None
    if found.get("fp16.loss_scale", 0):
        return LossScale(initial_scale=found["fp16.loss_scale"], is_dynamic=False)
    with read_from("fp16.min_loss_scale, fp16.initial_scale_power"):
        return LossScale(
            initial_scale=2.0 ** found.get("fp16.initial_scale_power", 16),
            growth_interval_steps=found.get("fp16.loss_scale_window", 1000),
            hysteresis=found.get("fp16.hysteresis", 2),
            min_scale=found.get("fp16.min_loss_scale", 1),
            is_consecutive=found.get("fp16.consecutive_hysteresis", False),
        )


def _params(found: Given, section: str) -> dict[str, Any]:
    return {name.removeprefix(f"{section}.params."): value for name, value in found.items() if name.startswith(f"{section}.params.")}


def _optimizer(found: Given) -> Component | None:
    """Return torch's optimizer of the same update. DeepSpeed's Adam is AdamW unless told otherwise, and decays nothing by default."""
    kind, params = found.get("optimizer.type"), _params(found, "optimizer")
    if kind is None:
        return None
    if "max_grad_norm" in params:
        raise _no_optimizer("optimizer.params.max_grad_norm", "DeepSpeed does not clip by it", "move it to gradient_clipping")
    if kind.lower() in ("adam", "adamw"):
        is_torch, is_adamw = params.pop("torch_adam", False), params.pop("adam_w_mode", True)
        if not params.pop("bias_correction", True):
            raise _no_optimizer("optimizer.params.bias_correction=false", "torch's Adam corrects the bias", "leave it out")
        name = "AdamW" if is_adamw or kind.lower() == "adamw" else "Adam"
        return Component(name, params if is_torch else {"weight_decay": 0.0, **params})
    known = {name.lower(): name for name in _TORCH_OPTIMIZERS}
    if kind.lower() not in known:
        why = "it has no equal in torch.optim"
        raise _no_optimizer(
            f"optimizer.type={kind!r}",
            why,
            nearest(kind, ("Adam", "AdamW", *_TORCH_OPTIMIZERS)) or "leave it out, and build your own optimizer",
        )
    return Component(known[kind.lower()], params)


def _no_optimizer(what: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(f"{what} cannot be had here", where=what.partition("=")[0], why=why, remedy=remedy)


def _scheduler(found: Given) -> Component | None:
    kind = found.get("scheduler.type")
    return None if kind is None else Component(kind, _params(found, "scheduler"))
