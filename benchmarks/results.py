"""What a run of ``step_time`` found, and the figures that follow from it: medians, ratios, exposed communication, bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.contestants import FLOOR
from benchmarks.link import parse_rate
from benchmarks.measure import Step, median

# What gloo gets out of a link at best, of its rate: the rest is headers, acknowledgements and pacing (design, fact 15).
WIRE_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Timings:
    """Steps by contestant and rate, of one dtype. Steps of one place were taken in turn, so they compare in pairs."""

    dtype: str
    rates: tuple[str, ...]
    steps: Mapping[str, Mapping[str, Sequence[Step]]]
    errors: Mapping[str, str]

    @property
    def contestants(self) -> list[str]:
        """All that ran."""
        return list(self.steps)

    def median_s(self, name: str, rate: str) -> float:
        """Return a contestant's median seconds per step, over the steps that nobody disturbed; over all where none was left alone."""
        steps = self.steps[name][rate]
        return median([step.seconds for step in steps if not step.is_disturbed] or [step.seconds for step in steps])

    def sent_bytes(self, name: str) -> float:
        """Return the bytes that a rank sends per step, on the interface."""
        return median([step.sent_bytes for steps in self.steps[name].values() for step in steps])

    def dropped(self, name: str) -> int:
        """Count the steps that others disturbed, at all rates."""
        return sum(step.is_disturbed for steps in self.steps[name].values() for step in steps)

    def count(self, name: str) -> int:
        """Count a contestant's steps, at all rates."""
        return sum(len(steps) for steps in self.steps[name].values())

    def ratio(self, name: str, other: str, rate: str) -> float:
        """Return the median ratio of two contestants' steps, taken in pairs."""
        return median([mine.seconds / theirs.seconds for mine, theirs in self._pairs(name, other, rate)])

    def exposed_s(self, name: str, rate: str) -> float | None:
        """Return the seconds of a step that its compute does not hide; None where the floor was not measured."""
        if FLOOR not in self.steps:
            return None
        return median([mine.seconds - floor.seconds for mine, floor in self._pairs(name, FLOOR, rate)])

    def wire_s(self, name: str, rate: str) -> float | None:
        """Return the seconds that a contestant's bytes need on the wire alone; None where the rate is not limited."""
        rate_bits = parse_rate(rate)
        return None if rate_bits is None else 8 * self.sent_bytes(name) / (WIRE_SHARE * rate_bits)

    def bound_s(self, name: str, rate: str) -> float | None:
        """Return what no step of these bytes can beat: the greater of compute floor and wire time."""
        return max(self.median_s(FLOOR, rate), self.wire_s(name, rate) or 0.0) if FLOOR in self.steps else None

    def _pairs(self, name: str, other: str, rate: str) -> list[tuple[Step, Step]]:
        pairs = list(zip(self.steps[name][rate], self.steps[other][rate], strict=True))
        return [pair for pair in pairs if not any(step.is_disturbed for step in pair)] or pairs


def timings(result: Mapping[str, Any]) -> list[Timings]:
    """Read the JSON of ``step_time``; one ``Timings`` for each dtype."""
    found = []
    for dtype in dict.fromkeys(row["dtype"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["dtype"] == dtype]
        steps: dict[str, dict[str, list[Step]]] = {}
        for row in rows:
            if "steps" in row:
                steps.setdefault(row["contestant"], {})[row["rate"]] = [Step(**step) for step in row["steps"]]
        errors = {row["contestant"]: row["error"] for row in rows if "error" in row}
        rates = tuple(sorted({row["rate"] for row in rows if "rate" in row}, key=lambda rate: -(parse_rate(rate) or math.inf)))
        found.append(Timings(dtype, rates, steps, errors))
    return found
