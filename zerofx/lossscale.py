"""How a loss scale follows overflows. Pure numbers; no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerofx.errors import ConfigError

_POSITIVE = "above 0 and below 2**128, as scales are fp32 numbers"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Rules of a loss scale, with DeepSpeed's defaults.

    After ``growth_interval_steps`` without an overflow the scale doubles. ``hysteresis`` overflows halve it: those before the last one
    only skip their step; growth restores them, and with ``is_consecutive`` so does any step without an overflow. It never falls below
    ``min_scale``: an overflow there raises. Where it is not ``is_dynamic`` it stays, and overflows only skip their step.
    Raises ConfigError for numbers that cannot be.
    """

    initial_scale: float = 2.0**16
    growth_interval_steps: int = 1000
    hysteresis: int = 2
    min_scale: float = 1.0
    is_consecutive: bool = False
    is_dynamic: bool = True

    def __post_init__(self) -> None:
        for field in ("initial_scale", "min_scale"):
            value = getattr(self, field)
            _check(isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 2.0**128, field, value, _POSITIVE)
        for field in ("growth_interval_steps", "hysteresis"):
            value = getattr(self, field)
            _check(isinstance(value, int) and not isinstance(value, bool) and value >= 1, field, value, "a whole number of at least 1")
        _check(self.initial_scale >= self.min_scale or not self.is_dynamic, "min_scale", self.min_scale, "at most initial_scale")

    def start(self) -> ScaleState:
        """Return the state before the first step."""
        return ScaleState(float(self.initial_scale), 0, self.hysteresis)

    def after(self, state: ScaleState, overflows: bool) -> ScaleState | None:
        """Return the state after a step; None where an overflow would take the scale below its minimum."""
        if not self.is_dynamic:
            return state
        if overflows:
            if state.overflows_left > 1:
                return ScaleState(state.scale, 0, state.overflows_left - 1)
            return ScaleState(max(state.scale / 2, float(self.min_scale)), 0, 1) if state.scale > self.min_scale else None
        steps = state.good_steps + 1
        grows = steps == self.growth_interval_steps
        left = self.hysteresis if grows or self.is_consecutive else state.overflows_left
        return ScaleState(state.scale * 2, 0, left) if grows else ScaleState(state.scale, steps, left)


@dataclass(frozen=True, slots=True)
class ScaleState:
    """A loss scale, the steps without an overflow since it last changed or met one, and the overflows left until it halves."""

    scale: float
    good_steps: int
    overflows_left: int


def _check(holds: bool, field: str, value: Any, meaning: str) -> None:
    if not holds:
        raise ConfigError(
            f"{field}={value!r} cannot be", where=f"zerofx.LossScale({field}=...)", why=f"it is {meaning}", remedy="mend the number"
        )
