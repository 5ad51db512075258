"""Seconds of compute regions on given hardware. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from zerofx.kernels import Kernel, kernels
from zerofx.machine import Hardware
from zerofx.work import bytes_of


def kernel_s(kernel: Kernel, hardware: Hardware) -> float:
    """Return the seconds of one kernel: its arithmetic or its memory traffic, whichever takes longer, and its launch.

    Results that need new pages of memory are paid for beside it.
    """
    rates = dict(hardware.elements_per_s)
    arithmetic_s = kernel.run_flops / hardware.rate_flops_per_s(kernel.kind, kernel.dtype)
    functions_s = sum(count / rates[name] for name, count in kernel.elements if name in rates)
    memory_s = kernel.moved_bytes / hardware.memory_bytes_per_s
    fresh_s = kernel.fresh_bytes / hardware.page_in_bytes_per_s if hardware.page_in_bytes_per_s else 0.0
    return max(arithmetic_s, functions_s, memory_s) + fresh_s + hardware.launch_s


def compute_s(nodes: Sequence[Node], hardware: Hardware) -> float:
    """Return the seconds of consecutive nodes: a compute region between two collectives, as Inductor compiles it."""
    return sum(kernel_s(kernel, hardware) for kernel in kernels(nodes))


def attribute_s(nodes: Sequence[Node], hardware: Hardware) -> dict[Node, float]:
    """Return the seconds of each of some consecutive nodes; they add up to ``compute_s``.

    A chain's seconds are shared out among its nodes by the bytes that they give; a node that computes nothing takes none.
    """
    shares = dict.fromkeys(nodes, 0.0)
    for kernel in kernels(nodes):
        weights = [max(bytes_of(node), 1) for node in kernel.nodes]
        seconds = kernel_s(kernel, hardware) / sum(weights)
        shares |= {node: weight * seconds for node, weight in zip(kernel.nodes, weights, strict=True)}
    return shares
