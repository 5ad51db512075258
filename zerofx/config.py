"""Frozen, validated settings; every field carries its unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofx import configfile, migration
from zerofx.batch import Batch
from zerofx.errors import ConfigError
from zerofx.fieldtypes import read_from
from zerofx.lossscale import LossScale
from zerofx.migration import Component, Report
from zerofx.names import check_names
from zerofx.offload import KINDS, STATES, Offload
from zerofx.units import parse_bytes

if TYPE_CHECKING:  # torch takes seconds to import, and the command line reads settings without it
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from zerofx.machine import Hardware

_CODE = {"passes", "partition_activations"}  # what no file can hold
BACKENDS = ("inductor", "aot_eager", "hooks")


def _check_count(settings: object, field: str) -> None:
    value = getattr(settings, field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(
            f"{field}={value!r} is not a whole number of at least 0",
            where=f"zerofx.{type(settings).__name__}({field}=...)",
            why="it counts bytes, elements or buckets",
            remedy="pass an int",
        )


def _no_code(where: str, field: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{field}={value!r} cannot be in a file",
        where=where,
        why="it is code, or ranks of this run",
        remedy=f"leave {field} out of what is written (dataclasses.replace), and pass it to zerofx.compile",
    )


def offload_from(given: Any, where: str) -> Offload | None:
    """Return what an ``offload`` argument says. Raises ConfigError."""
    if given is None or isinstance(given, Offload):
        return given
    with read_from(where):
        if isinstance(given, Mapping):
            return configfile.decoded(Offload, given, {})
        if str(given).partition(":")[0] == "disk":
            return configfile.decoded(Offload, dict.fromkeys(STATES, given), {})
        check_names([given], [*KINDS, "disk"], where="", what="kind of offload")
        return configfile.decoded(Offload, {given: "disk"}, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class HookLimits:
    """Limits of the eager mode at stage 3, in elements, with DeepSpeed's defaults.

    Gathers run ahead of use by at most ``prefetch_elements``, and while fewer than ``max_live_elements`` are whole. A parameter
    stays whole where at most ``max_reuse_distance_elements`` (or the prefetch size) are fetched before it is used again, and one
    of at most ``persistence_threshold_elements`` stays until it is updated.
    """

    prefetch_elements: int = 50_000_000
    max_live_elements: int = 1_000_000_000
    max_reuse_distance_elements: int = 1_000_000_000
    persistence_threshold_elements: int = 100_000

    def __post_init__(self) -> None:
        for field in self.__slots__:
            _check_count(self, field)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one compiled model. Equal on all ranks.

    ``reduce`` is what a gradient is of those of all ranks: their "mean", or their "sum". ``methods`` are called as the forward is.
    The dtypes mean what they mean in torch's ``MixedPrecisionPolicy``; modules that ``keep_fp32`` names (by class, or by a pattern of
    qualified names such as ``"blocks.*.norm"``) compute in fp32 all the same. ``memory_limit_bytes`` bounds whole parameters and
    communication buffers in flight on one rank. Below it, whole parameters may take what is in use at once and
    ``prefetch_buckets`` of the largest bucket ahead of use, and gradients in flight ``reduces_in_flight`` of theirs (in the eager
    mode: so many buckets); 0 overlaps nothing. At stage 3, blocks of parameters, from the first, of at most ``keep_whole_bytes`` stay
    whole until an optimizer changes them, so that only the first of several micro-batches gathers them. ``recompute`` says which
    activations a backward computes again: those within the repeated ``"blocks"``, all but products and attention (``"selective"``),
    those within modules by patterns of qualified names, by a policy as torch's ``create_selective_checkpoint_contexts`` takes, so many
    that at most a fraction (a float), or a number of bytes, is kept, or (``"auto"``) no more than makes a step fit: then
    ``memory_limit_bytes`` bounds all that a step holds beside shards and optimizer states, and what costs the least time for each
    byte is given up first, be it overlap, parameters kept whole, or activations. ``partition_activations`` is the dimension of a mesh
    whose ranks compute the same inputs of what is computed again (tensor parallelism): each keeps 1/N of such an input; one that is not
    contiguous, of dynamic size, or does not divide stays whole. ``offload`` is an ``Offload``, or a dict of its fields: what of the
    training state lies on disk; ``"disk"`` or ``"disk:DIRECTORY"`` is short for all of it, ``"optimizer"`` for that; or activations do,
    and then ``memory_limit_bytes`` bounds all that the graphs of a step allocate. ``hardware`` are the figures that the schedule goes by,
    or the name of a machine. A rank that the others wait for longer than ``timeout_s``, neither computing with them nor compiling, is an
    error on all; with None the ranks do not ask each other, and those that differ wait for ever.
    """

    stage: int = 3
    backend: str = "inductor"
    reduce: str = "mean"
    methods: tuple[str, ...] = ()
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    keep_fp32: tuple[str, ...] = ()
    memory_limit_bytes: int | None = None
    bucket_max_bytes: int = 25 * 2**20
    bucket_min_bytes: int = 128 * 2**10
    prefetch_buckets: int = 1
    reduces_in_flight: int = 2
    keep_whole_bytes: int = 0
    recompute: str | float | tuple[str, ...] | Callable[..., Any] | None = None
    partition_activations: DeviceMesh | None = None
    offload: Offload | str | Mapping[str, Any] | None = None
    whole_graph: bool = False
    hardware: Hardware | str | None = None
    hooks: HookLimits = HookLimits()
    timeout_s: float | None = 60.0
    passes: tuple[Any, ...] = ()

    @classmethod
    def from_file(cls, path: str | Path) -> Config:
        """Read settings from a TOML or JSON file: dtypes and hardware by name, bytes as ints or text, ``hooks`` as a table.

        What the file leaves out is as in ``Config()``. Raises ConfigError for a file that cannot be read, for a name that is not known,
        with the nearest that is, and for values that cannot be.
        """
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        from zerofx.machine import Hardware

        table = configfile.read(path)
        for field in _CODE & table.keys():
            raise _no_code(str(path), field, table[field])
        with read_from(str(path)):
            return configfile.decoded(cls, table, {"torch": torch, "Hardware": Hardware, "DeviceMesh": DeviceMesh})

    def to_toml(self) -> str:
        """Return the settings as TOML text, which ``from_file`` reads back. Raises ConfigError for passes, which are code."""
        return configfile.to_toml(self._table())

    def to_json(self) -> str:
        """Return the settings as JSON text, which ``from_file`` reads back. Raises ConfigError for passes, which are code."""
        return configfile.to_json(self._table())

    def _table(self) -> dict[str, Any]:
        for field in ("recompute", *_CODE):
            value = getattr(self, field)
            if callable(value) or (field in _CODE and value):
                raise _no_code("zerofx.Config.to_toml, to_json", field, value)
        return {name: value for name, value in configfile.encoded(self).items() if name not in _CODE}

    @classmethod
    def from_deepspeed(
        cls,
        settings: Mapping[str, Any] | str | Path,
        *,
        version: str | None = None,
        world_size: int | None = None,
        auto: Mapping[str, Any] | None = None,
    ) -> Imported:
        """Translate settings of DeepSpeed, or a JSON file of them: a ``Config``, and what is said of the training loop around it.

        ``version`` is the DeepSpeed that they were written for: some defaults changed, and without it a Python warning names those that
        the settings leave out. ``world_size`` checks the batch's sizes, or derives the missing one. ``auto`` says what ``"auto"`` stands
        for: by the names of transformers' ``TrainingArguments`` (with ``hidden_size``, ``num_training_steps``), or by dotted setting.

        Each setting is mapped, or listed in the report as meaningless here. Raises ConfigError for settings that cannot be had here, all
        at once; for a name that is not known, with the nearest; for an ``"auto"`` without a value; and where the batch's sizes do not fit.
        """
        found = migration.translate(settings, version=version, world_size=world_size, auto=auto or {})
        return Imported(config=cls(**found.fields, hooks=HookLimits(**found.hooks)), **found.rest)

    @property
    def fits(self) -> bool:
        """Whether the memory limit bounds all that a step holds, and so decides what is computed again."""
        return isinstance(self.recompute, str) and self.recompute == "auto"

    @property
    def keeps_at_most(self) -> bool:
        """Whether ``recompute`` is a fraction or a number of bytes, so that what is computed again has to be chosen."""
        given = self.recompute
        return given[:1].isdigit() if isinstance(given, str) else isinstance(given, int | float) and not isinstance(given, bool)

    def kept_bytes(self, all_bytes: int) -> int:
        """Return how many bytes of ``all_bytes`` of activations may be kept, where ``recompute`` is an amount."""
        if isinstance(self.recompute, float):
            return int(self.recompute * all_bytes)
        assert isinstance(self.recompute, int | str)
        return parse_bytes(self.recompute, "recompute") or 0

    @property
    def spills(self) -> Offload | None:
        """What says which activations may lie on disk; None where none, as nothing limits what the graphs of a step allocate."""
        is_given = isinstance(self.offload, Offload) and self.offload.activations is not None and self.memory_limit_bytes is not None
        return self.offload if is_given else None  # type: ignore[return-value]

    @property
    def without_spills(self) -> Config:
        """The same settings, with all activations in memory."""
        offload = self.offload
        if not isinstance(offload, Offload) or offload.activations is None:
            return self
        return replace(self, offload=replace(offload, activations=None) if offload.keeps_states else None)

    @property
    def machine(self) -> Hardware | None:
        """The figures to schedule by: ``compile`` has put them in the place of a name."""
        assert not isinstance(self.hardware, str)
        return self.hardware

    def sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that gradients of ``dtype`` travel in."""
        return dtype if self.reduce_dtype is None or dtype.is_complex else self.reduce_dtype

    def divisor(self, world_size: int) -> int:
        """Return what the sum of all ranks' gradients is divided by."""
        return world_size if self.reduce == "mean" else 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "offload", offload_from(self.offload, "zerofx.Config(offload=...)"))
        if isinstance(self.stage, bool) or not isinstance(self.stage, int) or self.stage not in (0, 1, 2, 3):
            raise ConfigError(
                f"stage={self.stage!r} is not a ZeRO stage",
                where="zerofx.Config(stage=...)",
                why="ZeRO has the stages 0 (replicate), 1 (shard optimizer), 2 (+ gradients), 3 (+ parameters)",
                remedy="pass stage=0, 1, 2 or 3",
            )
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"backend={self.backend!r} is not known",
                where="zerofx.Config(backend=...)",
                why=f"the backends are {', '.join(BACKENDS)}",
                remedy='pass backend="inductor" (fast), "aot_eager" (reference) or "hooks" (eager)',
            )
        if self.reduce not in ("mean", "sum"):
            raise ConfigError(
                f"reduce={self.reduce!r} is not known",
                where="zerofx.Config(reduce=...)",
                why="gradients of the ranks are averaged or added up",
                remedy='pass reduce="mean", or "sum" where the loss is divided by a count over all ranks',
            )
        if self.memory_limit_bytes is not None:
            _check_count(self, "memory_limit_bytes")
        self._check_types()
        if self.hardware is not None:
            from zerofx.presets import check_hardware

            check_hardware(self.hardware, "zerofx.Config(hardware=...)")
        unusable = {
            "passes": bool(self.passes),
            "memory_limit": self.memory_limit_bytes is not None,
            "hardware": self.hardware is not None,
            "recompute": self.keeps_at_most or self.fits,
            "partition_activations": self.partition_activations is not None,
            "offload.activations": isinstance(self.offload, Offload) and self.offload.activations is not None,
        }
        if self.backend == "hooks" and any(unusable.values()):
            field = next(name for name, given in unusable.items() if given)
            raise ConfigError(
                f'backend="hooks" takes no {field}' + (f"={self.recompute!r}" if field == "recompute" else ""),
                where=f"zerofx.Config({field}=...)",
                why="there is no graph that passes could rewrite, or that a schedule could be proved on",
                remedy='pass recompute="blocks" or compile'
                if field == "recompute"
                else "bound the eager mode by Config(hooks=HookLimits(...)), or compile",
            )
        given = self.timeout_s
        if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf):
            raise ConfigError(
                f"timeout_s={given!r} is no number of seconds",
                where="zerofx.Config(timeout_s=...)",
                why="it bounds how long the ranks wait for one of them",
                remedy="pass a positive number, such as 60, or None where ranks never differ",
            )
        for field in ("bucket_max_bytes", "bucket_min_bytes", "prefetch_buckets", "reduces_in_flight", "keep_whole_bytes"):
            _check_count(self, field)

    def _check_types(self) -> None:
        names_only = isinstance(self.keep_fp32, tuple) and all(isinstance(name, str) for name in self.keep_fp32)
        self._check(names_only, "keep_fp32", "no tuple of names", "it names modules", 'pass a tuple such as ("LayerNorm",)')
        self._check(isinstance(self.passes, tuple), "passes", "no tuple of passes", "passes run in order", "pass a tuple")
        self._check(isinstance(self.hooks, HookLimits), "hooks", "no HookLimits", "the eager mode goes by them", "pass HookLimits(...)")
        for field in ("cast_forward_inputs", "whole_graph"):
            self._check(isinstance(getattr(self, field), bool), field, "neither True nor False", "it is on or off", "pass a bool")
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            kind = type(getattr(self, field))
            is_dtype = kind is type(None) or (kind.__module__, kind.__name__) == ("torch", "dtype")
            self._check(is_dtype, field, "no dtype", "it is a torch.dtype", "pass torch.bfloat16")
            floats = getattr(self, field) is None or getattr(self, field).is_floating_point
            self._check(floats, field, "no floating dtype", "parameters and gradients are cast to it", "pass torch.bfloat16")
        is_named = isinstance(self.methods, tuple) and all(isinstance(name, str) for name in self.methods)
        self._check(is_named, "methods", "no tuple of names", "it names methods of the model", 'pass a tuple such as ("encode",)')
        self._check_recompute()
        mesh = self.partition_activations
        is_line = mesh is None or (hasattr(mesh, "mesh_dim_names") and mesh.ndim == 1)
        words = 'pass one dimension of yours: mesh["tp"]'
        self._check(is_line, "partition_activations", "no 1-D DeviceMesh", "its ranks keep a part each", words)
        is_used = mesh is None or self.recompute is not None
        words = 'pass recompute="blocks", or leave it out'
        self._check(is_used, "partition_activations", "without recompute", "it is what the backward computes again from", words)

    def _check_recompute(self) -> None:
        given, where = self.recompute, "zerofx.Config(recompute=...)"
        if given is None or callable(given) or given in ("blocks", "selective"):
            return
        if self.fits:
            is_bounded = self.memory_limit_bytes is not None or self.backend == "hooks"  # which takes neither
            self._check(is_bounded, "recompute", "no choice without a memory_limit", "that is what it fits a step into", "pass both")
            return
        is_named = isinstance(given, tuple) and bool(given) and all(isinstance(name, str) for name in given)
        is_amount = self.keeps_at_most and (not isinstance(given, float) or 0 <= given <= 1)
        words = 'pass "blocks", "selective", "auto", ("h.*.mlp",), a fraction from 0.0 to 1.0, bytes such as "2GiB", or a policy'
        self._check(is_named or is_amount, "recompute", "not known", "it says which activations are not kept", words)
        if isinstance(given, str | int):
            parse_bytes(given, "recompute", where)

    def _check(self, holds: bool, field: str, what: str, why: str, remedy: str) -> None:
        if not holds:
            raise ConfigError(f"{field}={getattr(self, field)!r} is {what}", where=f"zerofx.Config({field}=...)", why=why, remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What settings of DeepSpeed say: ``config`` is for ``zerofx.compile``, all else for the training loop, which is yours here.

    ``gradient_clipping`` is the most that the norm of all gradients may be, None where nothing clips. ``loss_scale`` is for
    ``zerofx.GradScaler``, None where no step would be skipped. ``report`` lists what became of each setting.
    """

    config: Config
    batch: Batch
    gradient_clipping: float | None
    loss_scale: LossScale | None
    optimizer: Component | None
    scheduler: Component | None
    report: Report
