"""Which activations are worth computing again, by the seconds that each byte costs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.fx import Node

from zerofx.cost import compute_s
from zerofx.errors import MemoryLimitError
from zerofx.machine import Hardware
from zerofx.origins import Call
from zerofx.program import Program, results_of, storage_of
from zerofx.recomputing import Choice, Extent, part_of
from zerofx.work import storage_bytes

K = TypeVar("K")
# What may be given up step by step: bytes held, and seconds that this takes, falling and rising from rung to rung.
Ladder = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Kept:
    """Of each part of a model: the bytes that it keeps for its backward, and the seconds that this spends computing again."""

    size_bytes: Mapping[Call, int]
    seconds: Mapping[Call, float]

    @property
    def total_bytes(self) -> int:
        return sum(self.size_bytes.values())


def kept(forward: Program, backward: Program, output_count: int, hardware: Hardware) -> Kept:
    """Read off a partitioned step what its parts keep. Parameters, inputs and outputs are not activations."""
    sizes: Counter[Call] = Counter()
    seen = {storage_of(node) for node in results_of(forward.graph)[:output_count] if isinstance(node, Node)}
    for node in results_of(forward.graph)[output_count:]:
        if isinstance(node, Node) and node.op == "call_function" and not _is_parameter(node) and storage_of(node) not in seen:
            seen.add(storage_of(node))
            sizes[part_of(node)] += storage_bytes(node)
    again: dict[Call, list[Node]] = {}
    for node, _ in backward.marked("recompute"):
        again.setdefault(part_of(node), []).append(node)
    return Kept(sizes, {call: compute_s(nodes, hardware) for call, nodes in again.items()})


def _is_parameter(node: Node) -> bool:
    mark = node.meta.get("zerofx")
    return mark is not None and mark.kind == "gather"


def ladders_of(options: Mapping[Extent, Kept]) -> dict[Call, Ladder]:
    """Return for each part what it keeps, and spends, the more of it is computed again."""
    parts = dict.fromkeys(call for option in options.values() for call in option.size_bytes)
    return {call: [(option.size_bytes.get(call, 0), option.seconds.get(call, 0.0)) for option in options.values()] for call in parts}


def choice_of(options: Mapping[Extent, Kept], rungs: Mapping[Any, int]) -> Choice:
    """Return the choice that some rungs of the parts' ladders are."""
    extents = list(options)
    return Choice(tuple((call, extents[rung]) for call, rung in rungs.items() if isinstance(call, Call)))


def cheapest(ladders: Mapping[K, Ladder], most_bytes: int) -> dict[K, int]:
    """Return the rung to take on each ladder so that all hold at most so many bytes, in little time; where that is too few, the last.

    Each step is the one that costs the fewest seconds a byte; of equal ones that on the first ladder. Ladders are taken for
    independent: what one part lets go of, another may have to keep.
    """
    rungs = dict.fromkeys(ladders, 0)
    total = sum(ladder[0][0] for ladder in ladders.values())
    while total > most_bytes:
        steps = [
            (max(ladder[rung][1] - ladder[rungs[key]][1], 0.0) / size, place, key, rung, size)
            for place, (key, ladder) in enumerate(ladders.items())
            for rung in range(rungs[key] + 1, len(ladder))
            if (size := ladder[rungs[key]][0] - ladder[rung][0]) > 0
        ]
        if not steps:
            break
        _, _, key, rung, size = min(steps, key=lambda step: step[:2])
        rungs[key] = rung
        total -= size
    return rungs


def choose(options: Mapping[Extent, Kept], most_bytes: int) -> Choice:
    """Return how much of each part to compute again so that at most so many bytes are kept: see ``cheapest``.

    Of equal parts the first goes first, whose activations would lie longest.
    """
    return choice_of(options, cheapest(ladders_of(options), most_bytes))


def foreseen_bytes(options: Mapping[Extent, Kept], choice: Choice) -> int:
    """Return what a choice keeps if each part keeps what it does where all are computed again equally."""
    return sum(options[extent].size_bytes.get(call, 0) for call, extent in choice.levels)


def too_few(most_bytes: int, least_bytes: int) -> MemoryLimitError:
    """Build the error for activations of which so few bytes cannot be kept."""
    error = MemoryLimitError(
        f"at most {most_bytes:,} bytes of activations cannot be kept",
        where="zerofx.compile(recompute=...), the first training step",
        why=f"the inputs of the blocks, and what is outside of them, are {least_bytes:,} bytes",
        remedy=f'allow {least_bytes:,} bytes, make the batch smaller, or bound the whole step: recompute="auto" with a memory_limit',
    )
    error.smallest_bytes = least_bytes
    return error


def extents_of(nodes: Sequence[Node]) -> dict[Extent, Choice]:
    """Return the choices that compute of all parts of a joint graph equally much again; of what is in no submodule, the cheap at most."""
    parts = list(dict.fromkeys(part_of(node) for node in nodes if node.op == "call_function"))
    return {
        extent: Choice(tuple((part, Extent.CHEAP if extent is Extent.ALL and not part.module else extent) for part in parts))
        for extent in Extent
    }
