"""Where to launch what has to be there before a node of a graph uses it: some blocks ahead, and some uses ahead. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from torch.fx import Node

from zerofx.origins import module_of
from zerofx.params import block_of


def launches_ahead(nodes: Sequence[Node], uses: Sequence[int], ahead: int, begin: int) -> list[int]:
    """Return for each use, by place and in order, where to launch it: ``ahead`` blocks ahead, but behind the ``ahead``-th use before it.

    So no more than ``ahead`` are on their way, or there too early, beside the one in use. Nothing is launched before ``begin``.
    """
    starts, current = [begin], ""
    for place, node in enumerate(nodes):
        block = block_of(f"{module_of(node)}.x")
        if node.op == "call_function" and block and block != current and place > begin:
            starts.append(place)
        current = block or current
    found = []
    for number, use in enumerate(uses):
        here = bisect.bisect_right(starts, use) - 1
        by_block = starts[max(0, here - ahead)] if ahead else use
        found.append(max(by_block, uses[number - ahead] if number >= ahead else begin))
    return found
