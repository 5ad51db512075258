"""What a tape runs, one step at a time: a node alone, or the nodes of a kernel that Inductor fuses. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from zerofx.kernels import Kernel, kernels
from zerofx.program import Program
from zerofx.regions import cut


@dataclass(frozen=True, slots=True)
class Step:
    """Nodes that run as one. ``region`` numbers the compiled region, -1 for an op that runs as it is.

    Where a compiler folds views into their readers, they take no step.
    """

    nodes: tuple[Node, ...]
    kernel: Kernel | None = None
    region: int = -1

    @property
    def is_fused(self) -> bool:
        """Whether a compiler wrote it: what nobody else reads is not stored, and results may take the place of what dies."""
        return self.region >= 0


def steps_of(program: Program) -> list[Step]:
    """Return the steps of a lowered program, in the order in which its tape runs them."""
    found: list[Step] = []
    for region, part in enumerate(cut(program)):
        if part.is_compiled:
            found.extend(Step(kernel.nodes, kernel, region) for kernel in kernels(part.nodes))
        else:
            found.extend(Step((node,), next(iter(kernels([node])), None)) for node in part.nodes)
    return found
