"""Random numbers that a backward draws again: which operators need the generator's state, and what their nodes say of themselves.

torch's partitioner lets the forward save the state of the generator before each random operator that the backward runs again. It
takes attention for random whatever its dropout, and leaves the nodes that it makes without values and modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx import _torch
from zerofx.program import arguments, output_of, results_of


def settle(forward: GraphModule, backward: GraphModule) -> None:
    """Complete, in place, the random nodes of a partitioned step; what draws nothing runs as it did before."""
    again = {arguments(node)[0].name: node for node in backward.graph.find_nodes(op="call_function", target=_torch.run_with_rng_state)}
    saving = forward.graph.find_nodes(op="call_function", target=_torch.run_and_save_rng_state)
    for number, first in enumerate(saving):
        second = again[f"rng_state_output_{number}"]
        state, value = sorted(first.users, key=lambda user: int(arguments(user)[1]))
        source = arguments(second)[0]
        if _draws_nothing(arguments(first)[0], arguments(first)[1:], first.kwargs):
            _replace(forward.graph, value, arguments(first)[0], arguments(first)[1:], first.kwargs, value.meta)
            _replace(backward.graph, second, arguments(second)[1], arguments(second)[2:], second.kwargs, value.meta)
            output = output_of(forward.graph)
            output.args = (tuple(node for node in results_of(forward.graph) if node is not state),)
            for stale in (state, first):
                forward.graph.erase_node(stale)
            backward.graph.erase_node(source)
        else:
            known = _torch.static(torch.get_rng_state(), state.meta["val"])
            state.meta["val"] = source.meta["val"] = known
            first.meta = {**value.meta, "val": (known, value.meta["val"])}
            second.meta = dict(value.meta)
    forward.recompile()
    backward.recompile()


def _draws_nothing(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator is attention without dropout."""
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    return bool((args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) == 0.0)


def _replace(graph: Graph, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meta: dict[str, Any]) -> None:
    with graph.inserting_before(node):
        plain = graph.call_function(target, args, kwargs)
    plain.meta = dict(meta)
    node.replace_all_uses_with(plain)
    graph.erase_node(node)
