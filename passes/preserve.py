"""Preserve: what the backward cannot compute again, because the forward overwrites what it was computed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from zerofx.origins import is_backward
from zerofx.program import Level, Phase, Program, aliases, arguments, is_view
from zerofx.recomputing import must_keep


@dataclass(frozen=True, slots=True)
class Preserve:
    """Tag what reads the old value of a buffer or an input that the forward changes in place, so that it is never computed again.

    Tracing turns such a change into a copy at the end of the forward. A backward that computed the reader again would read
    the new value.
    """

    takes: ClassVar[Level] = Level.UNSHARDED
    gives: ClassVar[Level] = Level.UNSHARDED

    def plan(self, program: Program) -> tuple[str, ...]:
        """Find the readers of what the forward overwrites, behind views."""
        if program.phase is not Phase.JOINT:
            return ()
        found: dict[Node, None] = {}
        for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default, sort=True):
            overwritten = arguments(node)[0]
            if overwritten.op == "placeholder" and not is_backward(node):
                readers = (user for alias in aliases(overwritten) if alias is not node for user in alias.users)
                found.update(dict.fromkeys(user for user in readers if user is not node and not is_view(user) and not is_backward(user)))
        return tuple(node.name for node in found if node.op == "call_function")

    def apply(self, program: Program, plan: tuple[str, ...]) -> Program:
        """Set the tags that the partitioner reads."""
        nodes = program.nodes()
        for name in plan:
            must_keep(nodes[name])
        return program
