"""Every private torch import of zerofx, one comment each: what, and what would replace it. Torch 2.13."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# Graph capture under our own compilers; public only as the recipe for custom backends.
from torch._dynamo.backends.common import aot_autograd as aot_autograd

# What Dynamo wraps a backend's exception in; no public way to let a backend's error through.
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed

# The partitioner that the built-in backends use; functorch.compile is its documented home.
from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut_rematerialization_partition

# Compiling under a context of our own, so that regions do not overwrite the caller's output strides.
from torch._guards import TracingContext as TracingContext
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._guards import tracing as tracing
from torch._prims import rng_prims

# Tensors without memory, for plans; torch.export is built on them.
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# The metadata record of a DTensor: building a DTensor from it is 10x cheaper than DTensor.from_local.
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta

# A graph module that writes its code when it is first called; a program is rewritten many times and called rarely.
from torch.fx._lazy_graph_module import _LazyGraphModule

# Every leaf of nested inputs and outputs, registered types of other libraries included; no public name yet.
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_unflatten as tree_unflatten

LazyGraphModule = _LazyGraphModule

# What the partitioner makes of a random operator that the backward runs again; nothing public says so.
run_and_save_rng_state, run_with_rng_state = rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state

# Skips autograd's dispatch in code that is already a backward, or that AOTAutograd made a forward of.
below_autograd = torch._C._AutoDispatchBelowAutograd


@contextmanager
def without_modes() -> Iterator[None]:
    """Run torch itself inside of modes' own code; they have no public switch for what they call in turn."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def outside_checkpoints() -> AbstractContextManager[None]:
    """Let torch's selective checkpoint see nothing of what runs within: it records what a function computes, to compute it again."""
    recording = any(type(mode).__module__ == torch.utils.checkpoint.__name__ for mode in dispatch_modes())
    return without_modes() if recording else nullcontext()


def dispatch_modes() -> list[Any]:
    """Return the dispatch modes that are on, outermost first."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return _get_current_dispatch_mode_stack()


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for another inside ``torch.func`` (``vmap``, ``grad``, ``jvp``): it has no storage of its own."""
    # Private; has been there since functorch joined torch. torch.func has no public name for it.
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def static(value: torch.Tensor, fake: Any) -> torch.Tensor:
    """Return a fake of a tensor, beside another fake, whose sizes are numbers."""
    made: torch.Tensor = fake.fake_mode.from_tensor(value, static_shapes=True)
    return made


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's own local tensor; ``to_local`` would add an autograd node."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


def set_local_tensor(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Give a DTensor another local tensor of the same shape; there is no public way to move its storage."""
    assert isinstance(tensor, DTensor)
    tensor._local_tensor = local


def share_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Call the hooks on a leaf's gradient for another leaf's too; removing one removes it from both. There is no public way."""
    target._backward_hooks = source._backward_hooks
    target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor cut as another one around a local tensor, which stays where it is; ``from_local`` moves it to the mesh's device."""
    assert isinstance(tensor, DTensor)
    return DTensor(local, tensor._spec, requires_grad=False)


def group_size(name: str) -> int:
    """Return how many ranks a process group has, by the name that functional collectives carry; no public way to it."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name).size()  # type: ignore[arg-type]  # a str of a type of its own


def default_store() -> torch.distributed.Store:
    """Return the store that the process groups of this job met through; no public way to it."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def apply_to_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Map the tensors of nested inputs, dataclasses included, as torch's own data parallels cast them."""
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(function, value)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether someone beside the caller's own Python reference holds a tensor; autograd decides by it whether to copy a gradient."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count > 1


def is_recomputing() -> bool:
    """Whether a backward computes a part of its forward again: only activation checkpointing turns gradients on in a backward."""
    # private since 2.1; nothing public tells whether a backward runs
    return torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Take a step that nobody who listens to steps hears of: torch wraps each class's own in a function that calls the hooks."""
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def compiles_what_is_called() -> bool:
    """Whether Dynamo compiles the functions that are called from here, although not this one; there is no public way."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return callable(get_eval_frame_callback())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call once, when the running backward has ended; torch's own data parallels use it, there is no public way."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class _Ending:
    """An end-of-backward callback that the engine drops, uncalled, when a backward raises."""

    def __init__(self, raised: Callable[[], None]) -> None:
        self._raised: Callable[[], None] | None = raised

    def __call__(self) -> None:
        self._raised = None

    def __del__(self) -> None:
        if self._raised is not None:
            self._raised()


def when_backward_raises(callback: Callable[[], None]) -> None:
    """Call once if the running backward ends by an exception, before whoever called it sees that; there is no public way."""
    at_end_of_backward(_Ending(callback))


def import_collectives() -> Any:
    """Import the module that registers fake kernels for ``_c10d_functional``; importing it early slows ``import zerofx``."""
    import torch.distributed._functional_collectives as functional

    return functional


# Exact over fast where the two differ, and the order of the schedule over Inductor's own:
# - the random stream is eager's, so that dropout does not depend on the backend
# - peak-memory reordering would undo prefetch in a whole-graph compile (design, fact 1)
_INDUCTOR: dict[str, Any] = {"fallback_random": True, "reorder_for_peak_memory": False, "reorder_for_locality": False}


def inductor_joint_passes(gm: torch.fx.GraphModule, device: torch.device) -> torch.fx.GraphModule:
    """Run Inductor's pattern passes on a joint graph, as its own partition function does."""
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import _recursive_joint_graph_passes

    with inductor_config.patch(_INDUCTOR):
        return _recursive_joint_graph_passes(gm, skip_invoke_subgraph=True, input_device=device)


def inductor_decompositions() -> dict[Any, Any]:
    """Return Inductor's decomposition table."""
    import torch._inductor.config as inductor_config
    from torch._inductor.decomposition import select_decomp_table

    with inductor_config.patch(_INDUCTOR):
        return select_decomp_table()


def inductor_compile(gm: torch.fx.GraphModule, *, is_backward: bool) -> Any:
    """Compile one graph with Inductor; the result takes a list of inputs, which it may clear.

    All outputs keep the traced strides, because what consumes them was traced with these.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    output.meta["user_visible_output_idxs"] = [i for i, arg in enumerate(output.args[0]) if isinstance(arg, torch.fx.Node)]
    fake_mode = detect_fake_mode(inputs)
    with inductor_config.patch(_INDUCTOR), V.set_fake_mode(fake_mode), tracing(TracingContext(fake_mode)):
        return compile_fx_inner(gm, inputs, is_backward=is_backward)


def pin_order(graph: torch.fx.Graph, before: dict[torch.fx.Node, torch.fx.Node]) -> None:
    """Make nodes depend on others: Inductor's scheduler moves collectives with fused packing, its patterns fuse what they depend on."""
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    preserve_node_ordering(graph, {node: OrderedSet([other]) for node, other in before.items()})


def without_recompile_limit() -> AbstractContextManager[Any]:
    """Within, all that a process has compiled of one function does not count against what it may compile next."""
    limit: AbstractContextManager[Any] = torch._dynamo.config.patch(accumulated_recompile_limit=sys.maxsize)
    return limit


def mark_static(tensors: Iterable[torch.Tensor]) -> None:
    """Keep Dynamo from taking the sizes of tensors for dynamic because another object of the same code had others."""
    for tensor in tensors:
        torch._dynamo.mark_static(tensor)


def is_whole_frame(gm: torch.fx.GraphModule, function: Any) -> bool:
    """Whether a graph that Dynamo hands to a backend holds all of a function: no graph break, and no frame inside of it."""
    from torch._dynamo import external_utils

    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    outermost = next(iter(TracingContext.get_traced_code() or []), None)
    if reason is None or reason.graph_break or outermost is None:
        return False
    # torch.compile wraps a function of torch itself, such as the forward of Sequential; inner frames it does not wrap.
    return outermost is getattr(function, "__code__", None) or outermost.co_filename == external_utils.__file__


def donate_no_buffers() -> None:
    """Say, while a forward is compiled, that its backward overwrites nothing that was saved for it; there is no switch for one call.

    AOTAutograd takes every backward for one that does, and would refuse to run it under ``retain_graph``.
    """
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is not None and metadata.bw_donated_idxs:
        metadata.bw_donated_idxs.clear()  # one list of several records


def check_cxx_compiler() -> str | None:
    """Return None where Inductor finds a C++ compiler, else its complaint."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error)
    return None
