"""A loss scaler with DeepSpeed's rules, for models whose gradients are sharded or not."""

from __future__ import annotations

import logging
from typing import Any

import torch

from zerofx.errors import LossScaleError
from zerofx.lossscale import LossScale, ScaleState

_log = logging.getLogger("zerofx")
_DEEPSPEEDS = LossScale()


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler with the rules of a ``LossScale``; without one (None) it scales nothing and skips no step.

    Used as torch's is. All ranks skip the same steps: gradients of a compiled model show an overflow on every rank. Each skipped step
    is logged as a warning of the logger ``zerofx`` and counted in ``skipped_steps``; a scheduler that ``step`` is given steps only where
    the optimizer did. Raises LossScaleError from ``update`` where the loss overflows at the smallest scale.
    """

    def __init__(self, rules: LossScale | None = _DEEPSPEEDS, *, device: str | None = None) -> None:
        self.rules = rules or _DEEPSPEEDS
        super().__init__(device or _usual_device(), init_scale=self.rules.initial_scale, enabled=rules is not None)
        self._state: ScaleState = self.rules.start()
        self.skipped_steps = 0

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, scheduler: Any = None, **kwargs: Any) -> float | None:
        """Unscale where that was not done, and step the optimizer and then the scheduler, unless a gradient is not finite."""
        result = super().step(optimizer, *args, **kwargs)
        if scheduler is not None and not (self.is_enabled() and self._overflows(id(optimizer))):
            scheduler.step()
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Set the scale for the next step by the rules, or to ``new_scale``."""
        if not self.is_enabled():
            return
        overflows = any(self._overflows(optimizer) for optimizer in self._per_optimizer_states)
        if new_scale is not None:
            super().update(new_scale)
            self._state = ScaleState(self.get_scale(), 0, self._state.overflows_left)
            return
        after = self.rules.after(self._state, overflows)
        super().update((after or self._state).scale)
        if overflows:
            self.skipped_steps += 1
            _log.warning(
                "step skipped: a gradient is not finite at a loss scale of %g; it is %g now (%d skipped so far)",
                self._state.scale,
                (after or self._state).scale,
                self.skipped_steps,
            )
        if after is None:
            raise LossScaleError(
                f"gradients are not finite at the smallest loss scale, {self._state.scale:g}",
                where=f"zerofx.GradScaler.update, after {self.skipped_steps} skipped steps",
                why="a smaller scale cannot help: the loss itself, or what it is made of, is not finite",
                remedy="look for NaN in the inputs and a learning rate that is too high, compute in bf16, or keep_fp32 what overflows",
            )
        self._state = after

    def state_dict(self) -> dict[str, Any]:
        """Return what torch's scaler keeps, and the counts of the rules."""
        counts = {"good_steps": self._state.good_steps, "overflows_left": self._state.overflows_left, "skipped_steps": self.skipped_steps}
        return super().state_dict() | counts if self.is_enabled() else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of this class, or of torch's."""
        super().load_state_dict(state_dict)
        if self.is_enabled():
            left = state_dict.get("overflows_left", self.rules.hysteresis)
            self._state = ScaleState(state_dict["scale"], state_dict.get("good_steps", state_dict["_growth_tracker"]), left)
            self.skipped_steps = state_dict.get("skipped_steps", 0)

    def _overflows(self, optimizer: int) -> bool:
        return any(found.item() for found in self._per_optimizer_states[optimizer]["found_inf_per_device"].values())


def _usual_device() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type
