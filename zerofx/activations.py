"""Which activations are worth computing again, by the seconds that each byte costs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from zerofx.cost import compute_s
from zerofx.errors import MemoryLimitError
from zerofx.machine import Hardware
from zerofx.origins import Call
from zerofx.program import Program, results_of, storage_of
from zerofx.recomputing import Choice, Extent, part_of
from zerofx.work import storage_bytes


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


def choose(options: Mapping[Extent, Kept], most_bytes: int) -> Choice:
    """Return how much of each part to compute again so that at most so many bytes are kept, in little time; where that is too few, all.

    Each step takes the part, and the extent, that costs the fewest seconds a byte; of equal parts the first, whose activations would
    lie longest. Parts are taken for independent: what one lets go of, another may have to keep.
    """
    parts = list(dict.fromkeys(call for option in options.values() for call in option.size_bytes))
    extents = list(options)
    levels = dict.fromkeys(parts, extents[0])
    total = options[extents[0]].total_bytes
    while total > most_bytes:
        steps = [
            (seconds / size, place, call, extent, size)
            for place, call in enumerate(parts)
            for extent in extents[extents.index(levels[call]) + 1 :]
            for size, seconds in [_step(options[levels[call]], options[extent], call)]
            if size > 0
        ]
        if not steps:
            break
        _, _, call, extent, size = min(steps, key=lambda step: step[:2])
        levels[call] = extent
        total -= size
    return Choice(tuple(levels.items()))


def foreseen_bytes(options: Mapping[Extent, Kept], choice: Choice) -> int:
    """Return what a choice keeps if each part keeps what it does where all are computed again equally."""
    return sum(options[extent].size_bytes.get(call, 0) for call, extent in choice.levels)


def too_few(most_bytes: int, least_bytes: int) -> MemoryLimitError:
    """Build the error for activations of which so few bytes cannot be kept."""
    error = MemoryLimitError(
        f"at most {most_bytes:,} bytes of activations cannot be kept",
        where="zerofx.compile(recompute=...), the first training step",
        why=f"the inputs of the blocks, and what is outside of them, are {least_bytes:,} bytes",
        remedy=f"allow {least_bytes:,} bytes, or make the batch smaller",
    )
    error.smallest_bytes = least_bytes
    return error


def _step(before: Kept, after: Kept, call: Call) -> tuple[int, float]:
    """Return the bytes that a part keeps less, and the seconds that it computes longer."""
    size = before.size_bytes.get(call, 0) - after.size_bytes.get(call, 0)
    return size, max(after.seconds.get(call, 0.0) - before.seconds.get(call, 0.0), 0.0)


def extents_of(nodes: Sequence[Node]) -> dict[Extent, Choice]:
    """Return the choices that compute of all parts of a joint graph equally much again; of what is in no submodule, the cheap at most."""
    parts = list(dict.fromkeys(part_of(node) for node in nodes if node.op == "call_function"))
    return {
        extent: Choice(tuple((part, Extent.CHEAP if extent is Extent.ALL and not part.module else extent) for part in parts))
        for extent in Extent
    }
