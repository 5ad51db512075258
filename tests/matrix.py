"""Settings that have to work together: every pair of their values, or all of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerofx.offload import KINDS

VALUES: Mapping[str, Sequence[Any]] = {
    "stage": (1, 2, 3),
    "recompute": (None, "blocks", "selective", 0.5),
    "offload": ((), ("optimizer",), ("parameters",), KINDS),
    "precision": (None, "bf16"),
    "world": (1, 2),
}


@dataclass(frozen=True)
class Row:
    """One combination."""

    stage: int
    recompute: Any
    offload: tuple[str, ...]
    precision: str | None
    world: int


def whole() -> list[Row]:
    """Return all combinations."""
    return [Row(*values) for values in itertools.product(*VALUES.values())]


def pairwise() -> list[Row]:
    """Return few of them that have every pair of values: greedily, those with the most pairs that are new."""
    left = {pair for row in whole() for pair in _pairs(row)}
    rows: list[Row] = []
    while left:
        rows.append(max(whole(), key=lambda row: len(left.intersection(_pairs(row)))))
        left -= set(_pairs(rows[-1]))
    return rows


def _pairs(row: Row) -> list[tuple[Any, ...]]:
    return list(itertools.combinations([(name, getattr(row, name)) for name in VALUES], 2))
