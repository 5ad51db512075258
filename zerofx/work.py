"""What one node of a graph computes and moves, by its traced values. Pure; no hardware, nothing runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from zerofx.program import arguments, is_view

aten, prims = torch.ops.aten, torch.ops.prims

# The attention kernels that torch's registry has no formula for, and those that compute the same.
_SAME_FLOPS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
# A causal kernel skips whole blocks of keys: 512 of them in torch's CPU kernel (ATen/native/cpu/FlashAttentionKernel.cpp,
# kvSplitSize), 128 in FlashAttention-2 (Dao, 2023, section 3.1, block sizes of 64 and 128).
_CPU_BLOCK, _GPU_BLOCK = 512, 128
# What allocates and computes nothing, and what reads a table only where it is told to.
_ALLOCATIONS = frozenset({aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view})
_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
_LOOKUPS = frozenset({aten.embedding, aten.gather, aten.index, aten.index_select, aten._unsafe_index, aten._unsafe_masked_index})
# Functions that take many instructions an element, by those whose rates a machine knows.
_FUNCTIONS: dict[Any, tuple[str, ...]] = {
    **{getattr(aten, name): ("exp",) for name in ("exp", "exp2", "expm1", "sigmoid", "silu", "_softmax", "_log_softmax", "logsumexp")},
    **{getattr(aten, name): ("log",) for name in ("log", "log1p", "log2", "log10")},
    **{getattr(aten, name): ("sin",) for name in ("sin", "cos")},
    aten._log_softmax_backward_data: ("exp",),
    aten.erf: ("erf",),
    aten.gelu: ("erf",),
    aten.gelu_backward: ("erf", "exp"),
    aten.pow: ("exp", "log"),
    aten.softplus: ("exp", "log"),
    aten.tanh: ("tanh",),
}


def packet(node: Node) -> Any:
    """Return what a node calls, without its overload."""
    return node.target.overloadpacket if isinstance(node.target, torch._ops.OpOverload) else node.target


def is_free(node: Node) -> bool:
    """Whether a node computes nothing: no op, a view, an allocation, arithmetic on sizes, or an event or collective of zerofx."""
    if node.op != "call_function" or is_view(node) or packet(node) in _ALLOCATIONS:
        return True
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("_c10d_functional", "zerofx"):
        return True
    return not isinstance(node.target, torch._ops.OperatorBase) or next(tensors(node), None) is None


def tensors(node: Node) -> Iterator[Tensor]:
    """Yield the traced tensors that a node gives."""
    value = node.meta.get("val")
    for part in value if isinstance(value, list | tuple) else (value,):
        if isinstance(part, Tensor):
            yield part


def shape_of(value: Tensor) -> tuple[int, ...]:
    """Return a traced shape in numbers: a dynamic size counts as what it was when traced."""
    return tuple(size if type(size) is int else traced_size(size) for size in value.shape)


def traced_size(size: Any) -> int:
    """Return a size in numbers: a dynamic one counts as what it was when traced."""
    from torch.fx.experimental.symbolic_shapes import optimization_hint

    return int(optimization_hint(size, fallback=1))


def tensor_bytes(value: Tensor) -> int:
    """Return the bytes of a traced tensor's elements."""
    return math.prod(shape_of(value)) * value.dtype.itemsize


def allocated_bytes(value: Tensor) -> int:
    """Return the bytes of the storage behind a traced tensor."""
    return traced_size(value.untyped_storage().nbytes())


def storage_bytes(node: Node) -> int:
    """Return the bytes of the storages behind what a node gives."""
    return sum(map(allocated_bytes, tensors(node)))


def bytes_of(node: Node) -> int:
    """Return the bytes of all that a node gives."""
    return sum(tensor_bytes(value) for value in tensors(node))


def read_bytes(node: Node, source: Node) -> int:
    """Return the bytes that a node reads of a source: of a table that it looks up, no more than it gives."""
    size = bytes_of(source)
    return min(size, bytes_of(node)) if packet(node) in _LOOKUPS and source is node.all_input_nodes[0] else size


def keeps_rows(node: Node) -> bool:
    """Whether a node's result has a row for each of its input's leading rows: not a sum over columns, nor over everything."""
    if torch.Tag.reduction not in getattr(node.target, "tags", ()):
        return True
    result = shape_of(next(tensors(node)))
    source = shape_of(next(tensors(node.all_input_nodes[0])))
    kept = [size for size in source[:-1] if size != 1]
    return math.prod(result) > 1 and [size for size in result if size != 1] == kept


def formula_of(operator: Any) -> Any:
    """Return torch's formula for the flops of an operator without its overload, None for one that it does not count.

    Attention on a CPU, which the registry lacks, counts as the same attention elsewhere.
    """
    return flop_registry.get(_SAME_FLOPS.get(operator, operator))


def flops(node: Node) -> int:
    """Return the floating-point operations of a node by torch's registry (a causal attention counts in full); 0 for what it lacks."""
    formula = formula_of(packet(node))
    if formula is None:
        return 0

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: _concrete(source.meta.get("val")))
    return int(formula(*args, **kwargs, out_val=_concrete(node.meta["val"])))


def _concrete(value: Any) -> Any:
    """Return a traced value with its sizes in numbers."""
    if isinstance(value, list | tuple):
        return [_concrete(part) for part in value]
    return torch.empty(shape_of(value), dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def run_share(node: Node) -> float:
    """Return the share of a node's flops that run: a causal attention skips the blocks above the diagonal."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "is_causal" not in names:
        return 1.0
    place = names.index("is_causal")
    is_causal = arguments(node)[place] if place < len(node.args) else node.kwargs.get("is_causal", False)
    if not is_causal:
        return 1.0
    key = next(tensors(arguments(node)[names.index("key")]))
    blocks = -(-shape_of(key)[-2] // (_CPU_BLOCK if key.device.type == "cpu" else _GPU_BLOCK))
    return (blocks + 1) / (2 * blocks)


def kind_of(node: Node) -> str:
    """Return which rate bounds a node that has flops: ``attention``, ``attention_backward``, or a product by its layout.

    ``matmul_nt`` has its second matrix transposed, as a forward its weights; ``matmul_tn`` its first, as a weight's gradient.
    """
    name = str(packet(node))
    if "attention" in name:
        return "attention_backward" if name.endswith("backward") else "attention"
    if packet(node) not in _PRODUCTS:
        return "matmul"
    first, second = (_is_transposed(next(tensors(source))) for source in arguments(node)[-2:])
    return "matmul_nt" if second and not first else "matmul_tn" if first and not second else "matmul"


def _is_transposed(value: Tensor) -> bool:
    return value.stride(-2) == 1 and value.stride(-1) != 1


def functions(node: Node) -> Iterator[tuple[str, int]]:
    """Yield the functions that a node evaluates on each element, such as ``exp``, with the elements."""
    found = _FUNCTIONS.get(packet(node), ())
    if not found:
        return
    if packet(node) is aten.pow and isinstance(exponent := arguments(node)[1], int | float) and float(2 * exponent).is_integer():
        return  # products and roots
    count = max(math.prod(shape_of(value)) for source in (node, *node.all_input_nodes[:1]) for value in tensors(source))
    for name in found:
        yield name, count
