"""ZeRO's closed forms (Rajbhandari et al., "ZeRO", 2020, sections 3, 5 and 7) for one rank of ``world_size``, by stage.

They take plain numbers, fractions (and are exact then) or sympy expressions, and return the same kind; two ints give a float.
Where shards do not divide evenly a rank holds and sends a little more than these say: its shards are padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

Quantity = TypeVar("Quantity", float, Fraction)  # or a sympy expression, which has no type to a checker

# The first stage that shards each kind of model state.
GRADIENTS_SHARDED_FROM = 2
OPTIMIZER_SHARDED_FROM = 1
PARAMETERS_SHARDED_FROM = 3

FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of each parameter: the copy that computes, its gradient, and the fp32 master where that is kept apart."""

    parameter_bytes: int
    gradient_bytes: int
    master_bytes: int


# Section 3.1 of the paper: half precision computes on copies of fp32 masters; fp32 needs none.
PRECISIONS = {"fp32": Precision(4, 4, 0), "bf16": Precision(2, 2, 4), "fp16": Precision(2, 2, 4)}

# What each optimizer keeps between steps, in fp32 numbers for each parameter.
OPTIMIZER_STATES = {"adagrad": 1, "adam": 2, "adamw": 2, "lamb": 2, "lion": 1, "momentum": 1, "rmsprop": 1, "sgd": 0}


def optimizer_multiplier(precision: Precision, states: int) -> int:
    """Return the paper's K: bytes of optimizer state for each parameter, with the master; 12 for Adam in mixed precision."""
    return FP32_BYTES * states + precision.master_bytes


def parameters_bytes(stage: int, total_bytes: Quantity, world_size: Quantity) -> Quantity:
    """Return the bytes of parameters that one rank keeps between their uses."""
    return total_bytes / world_size if stage >= PARAMETERS_SHARDED_FROM else total_bytes


def gradients_bytes(stage: int, total_bytes: Quantity, world_size: Quantity) -> Quantity:
    """Return the bytes of gradients that one rank keeps until the optimizer steps."""
    return total_bytes / world_size if stage >= GRADIENTS_SHARDED_FROM else total_bytes


def optimizer_bytes(stage: int, total_bytes: Quantity, world_size: Quantity) -> Quantity:
    """Return the bytes of optimizer state (with master weights, where they are kept apart) on one rank."""
    return total_bytes / world_size if stage >= OPTIMIZER_SHARDED_FROM else total_bytes


def sent_times(stage: int, micro_batches: Quantity | int = 1) -> dict[str, Quantity | int]:
    """Return how many times one rank sends its P(N-1)/N bytes per optimizer step, by kind of collective; at most, at stage 3.

    P are the bytes of all parameters in the dtype that is communicated, N the ranks. Section 7 of the paper, for one micro-batch.
    """
    each = micro_batches
    gathers, scatters, reduces = {0: (0, 0, 2), 1: (1, 1, 0), 2: (1, each, 0), 3: (2 * each, each, 0)}[stage]
    return {"all_gather": gathers, "reduce_scatter": scatters, "all_reduce": reduces}


def sent_bytes(stage: int, total_bytes: Quantity, world_size: Quantity, micro_batches: Quantity | int = 1) -> dict[str, Quantity]:
    """Return the bytes that one rank sends per optimizer step, by kind of collective; an upper bound at stage 3.

    ``total_bytes`` are those of the parameters in the dtype that is communicated.
    """
    once = total_bytes / world_size * (world_size - 1)
    return {kind: times * once for kind, times in sent_times(stage, micro_batches).items()}


def traffic_ratio(stage: int, micro_batches: Quantity | int = 1) -> Quantity | float:
    """Return what a stage sends per optimizer step as a share of what data parallelism (stage 0) sends; at most, at stage 3."""
    return sum(sent_times(stage, micro_batches).values()) / sum(sent_times(0, micro_batches).values())
