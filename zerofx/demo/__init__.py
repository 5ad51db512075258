"""The demo: train a byte-level GPT on the standard library's own text, beside one process and ZeRO's formulas."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the demo is asked to do. ``nproc`` None is two ranks, or as many as a launcher has started.

    With ``params``, a model of about so many is trained instead, without one process beside it; the resident memory of each rank may
    not exceed ``memory_limit_bytes``, and ``offload`` is as for ``zerofx.compile``. ``steps`` None is 60, or 3 of that model.
    """

    stage: int = 3
    nproc: int | None = None
    steps: int | None = None
    backend: str = "inductor"
    json_path: Path | None = None
    params: float | None = None
    memory_limit_bytes: int | None = None
    offload: str | None = None
