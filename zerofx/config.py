"""Frozen, validated settings; every field carries its unit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from zerofx.errors import ConfigError

BACKENDS = ("inductor", "aot_eager")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(value: int | str | None, field: str) -> int | None:
    """Read a number of bytes: an int, or text such as ``"2GiB"``. Raises ConfigError on anything else."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)):
        unit = _UNITS.get(match[2].upper())
        if unit is not None and float(match[1]) > 0:
            return int(float(match[1]) * unit)
    raise ConfigError(
        f"{field}={value!r} is not a number of bytes",
        where=f"zerofx.compile({field}=...)",
        why="a limit is a positive integer or text with a unit",
        remedy='pass bytes, or text such as "512MiB" or "2GiB"',
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one compiled model. Equal on all ranks.

    ``memory_limit_bytes`` bounds whole parameters and communication buffers in flight on one rank;
    None lets the schedule hold one bucket more than it needs, so that the next gather overlaps.
    """

    stage: int = 3
    backend: str = "inductor"
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    memory_limit_bytes: int | None = None
    bucket_max_bytes: int = 25 * 2**20
    bucket_min_bytes: int = 128 * 2**10
    prefetch_buckets: int = 2
    reduces_in_flight: int = 2
    whole_graph: bool = False
    passes: tuple[Any, ...] = ()

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
                remedy='pass backend="inductor" (fast) or backend="aot_eager" (reference)',
            )
        for field in ("bucket_max_bytes", "bucket_min_bytes", "prefetch_buckets", "reduces_in_flight"):
            if not isinstance(getattr(self, field), int) or getattr(self, field) < 0:
                raise ConfigError(
                    f"{field}={getattr(self, field)!r} is not a whole number of at least 0", where=f"zerofx.Config({field}=...)"
                )
