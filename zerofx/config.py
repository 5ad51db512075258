"""Frozen, validated settings; every field carries its unit."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofx.errors import ConfigError

if TYPE_CHECKING:  # torch takes seconds to import, and the command line reads settings without it
    import torch

    from zerofx.machine import Hardware

BACKENDS = ("inductor", "aot_eager", "hooks")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(value: int | str | None, field: str) -> int | None:
    """Read a number of bytes: an int, or text such as ``"2GiB"``. Raises ConfigError on anything else."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)):
        unit = _UNITS.get(match[2].upper())
        if unit is not None and 0 < float(match[1]) < math.inf:
            return int(float(match[1]) * unit)
    raise ConfigError(
        f"{field}={value!r} is not a number of bytes",
        where=f"zerofx.compile({field}=...)",
        why="a limit is a positive integer or text with a unit",
        remedy='pass bytes, or text such as "512MiB" or "2GiB"',
    )


def _check_count(value: object, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(
            f"{value!r} is not a whole number of at least 0", where=where, why="it counts bytes, elements or buckets", remedy="pass an int"
        )


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
            _check_count(getattr(self, field), f"HookLimits({field}=...)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one compiled model. Equal on all ranks.

    ``reduce`` is what a gradient is of those of all ranks: their "mean", or their "sum". ``methods`` are called as the forward is.
    The dtypes mean what they mean in torch's ``MixedPrecisionPolicy``. ``memory_limit_bytes`` bounds whole parameters and
    communication buffers in flight on one rank. Below it, whole parameters may take what is in use at once and
    ``prefetch_buckets`` of the largest bucket ahead of use, and gradients in flight ``reduces_in_flight`` of theirs (in the eager
    mode: so many buckets); 0 overlaps nothing. At stage 3, blocks of parameters, from the first, of at most ``keep_whole_bytes`` stay
    whole until an optimizer changes them, so that only the first of several micro-batches gathers them. ``hardware`` are the figures
    that the schedule goes by, or the name of a machine.
    """

    stage: int = 3
    backend: str = "inductor"
    reduce: str = "mean"
    methods: tuple[str, ...] = ()
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    memory_limit_bytes: int | None = None
    bucket_max_bytes: int = 25 * 2**20
    bucket_min_bytes: int = 128 * 2**10
    prefetch_buckets: int = 1
    reduces_in_flight: int = 2
    keep_whole_bytes: int = 0
    whole_graph: bool = False
    hardware: Hardware | str | None = None
    hooks: HookLimits = HookLimits()
    passes: tuple[Any, ...] = ()

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
        if isinstance(self.stage, bool) or not isinstance(self.stage, int) or self.stage not in (0, 1, 2, 3):
            raise ConfigError(
                f"stage={self.stage!r} is not a ZeRO stage",
                where="zerofx.compile(stage=...)",
                why="ZeRO has the stages 0 (replicate), 1 (shard optimizer), 2 (+ gradients), 3 (+ parameters)",
                remedy="pass stage=0, 1, 2 or 3",
            )
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"backend={self.backend!r} is not known",
                where="zerofx.compile(backend=...)",
                why=f"the backends are {', '.join(BACKENDS)}",
                remedy='pass backend="inductor" (fast), "aot_eager" (reference) or "hooks" (eager)',
            )
        if self.reduce not in ("mean", "sum"):
            raise ConfigError(
                f"reduce={self.reduce!r} is not known",
                where="zerofx.compile(reduce=...)",
                why="gradients of the ranks are averaged or added up",
                remedy='pass reduce="mean", or "sum" where the loss is divided by a count over all ranks',
            )
        if self.memory_limit_bytes is not None:
            _check_count(self.memory_limit_bytes, "zerofx.Config(memory_limit_bytes=...)")
        if not isinstance(self.passes, tuple):
            raise ConfigError(
                f"passes={self.passes!r} is no tuple of passes",
                where="zerofx.Config(passes=...)",
                why="passes run in order",
                remedy="pass a tuple",
            )
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, field)
            if value is not None and (type(value).__module__, type(value).__name__) != ("torch", "dtype"):
                raise ConfigError(
                    f"{field}={value!r} is no dtype",
                    where=f"zerofx.Config({field}=...)",
                    why="it is a torch.dtype",
                    remedy="pass torch.bfloat16",
                )
        unusable = {"passes": bool(self.passes), "memory_limit": self.memory_limit_bytes is not None, "hardware": self.hardware is not None}
        if self.backend == "hooks" and any(unusable.values()):
            field = next(name for name, given in unusable.items() if given)
            raise ConfigError(
                f'backend="hooks" takes no {field}',
                where=f"zerofx.compile({field}=...)",
                why="there is no graph that passes could rewrite, or that a schedule could be proved on",
                remedy="bound the eager mode by Config(hooks=HookLimits(...)), or compile",
            )
        for field in ("bucket_max_bytes", "bucket_min_bytes", "prefetch_buckets", "reduces_in_flight", "keep_whole_bytes"):
            _check_count(getattr(self, field), f"zerofx.Config({field}=...)")
