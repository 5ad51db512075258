"""The demo: train a byte-level GPT on the standard library's own text, beside one process and ZeRO's formulas."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the demo is asked to do. ``nproc`` None is two ranks, or as many as a launcher has started."""

    stage: int = 3
    nproc: int | None = None
    steps: int = 60
    backend: str = "inductor"
    json_path: Path | None = None
