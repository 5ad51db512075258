"""The order of submodules: recorded, followed, and looked ahead on."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from torch import nn


class Trace:
    """The order in which a forward, or a backward, fetches submodules: recorded once, then followed until it changes."""

    def __init__(self) -> None:
        self.order: list[nn.Module] = []
        self.step = 0
        self.is_complete = False

    def advance(self, module: nn.Module) -> bool:
        """Record or follow one step; return False where the recorded order no longer holds, which starts recording again."""
        follows = not self.is_complete or (self.step < len(self.order) and self.order[self.step] is module)
        if not follows:
            self.is_complete = False
        if not self.is_complete:
            self.order[self.step :] = [module]
        self.step += 1
        return follows

    def end(self) -> bool:
        """Keep what was recorded; return False where fewer steps were made than recorded."""
        whole = self.step == len(self.order)
        del self.order[self.step :]
        self.is_complete = True
        return whole


class Route:
    """What lies ahead: the parameters that each step needs, and how many elements pass until one is used again."""

    def __init__(self, needs: Sequence[Sequence[int]], numel: Sequence[int]) -> None:
        self.needs = needs
        self._uses: dict[int, list[int]] = {}
        for step, indices in enumerate(needs):
            for index in indices:
                self._uses.setdefault(index, []).append(step)
        self.elements = [0, *itertools.accumulate(sum(numel[index] for index in indices) for indices in needs)]

    def distance(self, index: int, step: int) -> int | None:
        """Return the elements fetched from a step on until a parameter is used; None where it is not used again."""
        uses = self._uses.get(index, [])
        place = bisect.bisect_left(uses, step)
        return self.elements[uses[place]] - self.elements[step] if place < len(uses) else None
