"""Where in the model the nodes of a traced graph come from. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch.fx import Node


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a submodule in a forward: its qualified name, and which of its calls it is, from 0."""

    module: str
    number: int = 0


def calls_of(node: Node) -> tuple[Call, ...]:
    """Return the calls of submodules that a node, of the forward or of their backward, belongs to, from the outermost one inwards."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return tuple(Call(_cleaned(path), _number(key)) for key, (path, *_) in stack.items())


def module_of(node: Node) -> str:
    """Return the qualified name of the submodule that a node computes, forward or backward; empty for the root."""
    calls = calls_of(node)
    return calls[-1].module if calls else ""


def is_backward(node: Node) -> bool:
    """Whether a node of a joint graph belongs to the backward."""
    return node.meta.get("partitioner_tag") == "is_backward" or "fwd_nn_module_stack" in node.meta


def _number(key: str) -> int:
    _, _, number = str(key).rpartition("@")  # Dynamo numbers the calls of a module behind its key, from the second one on
    return int(number) if number.isdigit() and "@" in str(key) else 0


def _cleaned(path: str) -> str:
    # Dynamo names the root as an argument of the forward, or of a function that wraps it
    return re.sub(r"^L\['\w+'\](\[\d+\])?", "", path).replace("._modules", "").replace("['", ".").replace("']", "").strip(".")
