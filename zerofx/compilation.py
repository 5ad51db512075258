"""What became of one traced graph of a model."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from zerofx.pipeline import Record
from zerofx.program import Program
from zerofx.tape import Tape


@dataclass(slots=True)
class Compilation:
    """One traced graph of a model: its scheduled programs, what the passes did, and how long each part took."""

    forward: Program | None = None
    backward: Program | None = None
    lowered: dict[str, Program] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    tapes: list[Tape] = field(default_factory=list)
    region_count: int = 0
    distinct_count: int = 0  # regions that had to be compiled; the others are equal to one of these

    def spend(self, part: str, start: float) -> None:
        """Add the time since ``start`` to a part of the compilation."""
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start
