"""ZeRO's closed forms (Rajbhandari et al., "ZeRO", 2020, sections 5 and 7) for one rank of ``world_size``, by stage.

Where shards do not divide evenly a rank holds and sends a little more than these say: its shards are padded.
"""

from __future__ import annotations

# The first stage that shards each kind of model state.
GRADIENTS_SHARDED_FROM = 2
OPTIMIZER_SHARDED_FROM = 1
PARAMETERS_SHARDED_FROM = 3


def parameters_bytes(stage: int, total_bytes: int, world_size: int) -> float:
    """Return the bytes of parameters that one rank keeps between their uses."""
    return total_bytes / world_size if stage >= PARAMETERS_SHARDED_FROM else total_bytes


def gradients_bytes(stage: int, total_bytes: int, world_size: int) -> float:
    """Return the bytes of gradients that one rank keeps until the optimizer steps."""
    return total_bytes / world_size if stage >= GRADIENTS_SHARDED_FROM else total_bytes


def optimizer_bytes(stage: int, total_bytes: int, world_size: int) -> float:
    """Return the bytes of optimizer state (with master weights, where they are kept apart) on one rank."""
    return total_bytes / world_size if stage >= OPTIMIZER_SHARDED_FROM else total_bytes


def sent_bytes(stage: int, total_bytes: int, world_size: int, micro_batches: int = 1) -> dict[str, float]:
    """Return the bytes that one rank sends per optimizer step, by kind of collective; an upper bound at stage 3.

    ``total_bytes`` are those of the parameters in the dtype that is communicated.
    """
    once = total_bytes * (world_size - 1) / world_size
    each = once * micro_batches
    gathers, scatters, reduces = {0: (0.0, 0.0, 2 * once), 1: (once, once, 0.0), 2: (once, each, 0.0), 3: (2 * each, each, 0.0)}[stage]
    return {"all_gather": gathers, "reduce_scatter": scatters, "all_reduce": reduces}
