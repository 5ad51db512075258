"""The three sizes of a batch, of which any two give the third."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerofx.errors import ConfigError

_TRAIN, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences or samples of one optimizer step, of one rank's backward, and backwards for each step. None where nothing says."""

    train_size: int | None
    micro_size: int | None
    micro_batches: int | None

    @staticmethod
    def of(settings: Mapping[str, Any], world_size: int | None) -> Batch:
        """Read the sizes from settings of DeepSpeed and derive the one that is missing, as DeepSpeed does.

        Raises ConfigError, with all three and the world size, where they do not fit.
        """
        train, micro, steps = (settings.get(name) for name in (_TRAIN, _MICRO, _STEPS))
        problem = _mismatch(train, micro, steps, world_size)
        if problem:
            shown = ", ".join(f"{name}={value}" for name, value in ((_TRAIN, train), (_MICRO, micro), (_STEPS, steps)))
            raise ConfigError(
                f"{shown} do not fit {'each other' if world_size is None else f'a world size of {world_size}'}",
                where=f"{_TRAIN}, {_MICRO}, {_STEPS}",
                why=problem,
                remedy="mend one of the three, or leave one out to have it derived; pass world_size= for another number of ranks",
            )
        if train is None:
            steps = steps or (1 if micro else None)
            is_known = None not in (micro, steps, world_size)
            return Batch(math.prod((micro, steps, world_size)) if is_known else None, micro, steps)  # type: ignore[arg-type]
        if micro is None and world_size is not None:
            micro = train // (world_size * (steps or 1))
        if steps is None and world_size is not None:
            steps = train // (world_size * micro)  # type: ignore[operator]
        return Batch(train, micro, steps)


def _mismatch(train: int | None, micro: int | None, steps: int | None, world_size: int | None) -> str:
    """Say why the sizes do not fit, as far as they and the world size are known; empty where they do."""
    if train is None:
        return ""
    given = [(name, value) for name, value in ((_MICRO, micro), (_STEPS, steps), ("world size", world_size)) if value is not None]
    product = math.prod(value for _, value in given)
    names = " x ".join(name for name, _ in given)
    if len(given) == 3 and product != train:
        return f"{names} is {' x '.join(str(value) for _, value in given)} = {product}, not {train}"
    return f"{train} is no multiple of {names} = {product}" if train % product else ""
