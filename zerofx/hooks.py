"""The eager mode: ZeRO by hooks on every submodule, with no graph. The reference for what compiling buys, and the fallback."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from zerofx import _torch
from zerofx.buffers import Buffers
from zerofx.coordinator import Coordinator
from zerofx.eventlog import EventLog
from zerofx.params import Param
from zerofx.recomputing import outermost, policy_of
from zerofx.reductions import Reductions
from zerofx.render import Schedule
from zerofx.runtime import Forward, Runtime, second_derivative_error

# What an output can hold without hiding a tensor.
_KNOWN = (Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _leaves(value: Any) -> list[Any]:
    """Return what nested outputs hold, the items and attributes of plain objects included; what cannot be searched is a leaf."""
    found, seen, left = [], set(), _torch.tree_leaves(value)
    while left:
        leaf = left.pop()
        inner = None if isinstance(leaf, _KNOWN) else _inside(leaf)
        if inner is None:
            found.append(leaf)
        elif id(leaf) not in seen:
            seen.add(id(leaf))
            left.extend(_torch.tree_leaves(inner))
    return found


def _inside(value: Any) -> list[Any] | None:
    """Return what a plain object or a container holds; None where nothing can be known."""
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    is_container = isinstance(value, Mapping | list | tuple | set | frozenset)
    if callable(value) or not (is_container or slots or hasattr(value, "__dict__")):
        return None
    items = [] if not is_container else list(value.values()) if isinstance(value, Mapping) else list(value)
    attributes = [getattr(value, name) for name in slots if name != "__dict__" and hasattr(value, name)]
    return [*items, *attributes, *getattr(value, "__dict__", {}).values()]


def _entry(tensor: Tensor) -> Any:
    """Return the graph node by which a backward enters what made a tensor, before that needs anything; None for a leaf.

    A view's own node is replaced when the view is written into; the node behind its base stays.
    """
    base = tensor._base
    node = tensor.grad_fn if base is None or base.grad_fn is None else base.grad_fn
    return None if isinstance(node, _Unshard._backward_cls) else node


class Pass:
    """One forward, and what its backward has to know of it."""

    def __init__(self, shards: list[Tensor]) -> None:
        self.shards = shards
        self.reads: dict[tuple[int, bool], Tensor] = {}
        self.callers: Counter[int] = Counter()  # calls of submodules that hold a parameter
        self.awaiting: dict[int, list[Call]] = {}  # calls whose backward ends no sooner than a parameter's gradient


class Call:
    """One call of a submodule in a forward."""

    def __init__(self, module: nn.Module, within: Pass) -> None:
        self.module, self.within = module, within
        self.held: tuple[int, ...] = ()
        self.inputs = self.inputs_left = 0  # inputs that need a gradient, and those whose gradient is not complete
        self.awaited: set[int] = set()
        self.is_active = False


class HookedRuntime(Runtime):
    """Runs a model's forward eagerly; submodules fetch their parameters before they compute and release them after, both ways.

    Source: ZeRO (Rajbhandari et al., 2020), section 7.2; ZeRO-Infinity (2021), section 6.2.
    """

    def __init__(self, *state: Any) -> None:
        super().__init__(*state)
        self._log = EventLog(self.config, self.group, self.params)
        facts = self.config, self.group, self.params
        self._coordinator = Coordinator(*facts, self.tensors, self.versions, self.local_shard, self._log, self.agreement, self.stored)
        self._reductions = Reductions(*facts, self._log, self.agreement, self.stored)
        self._names = {module: name for name, module in self._modules}
        self._pass = Pass([])
        self._stack: list[Call] = []
        self._active: dict[Call, None] = {}  # between their pre-backward and their post-backward
        self._in_backward = False
        recompute = self.config.recompute
        policy = policy_of(recompute)
        parts = set(outermost(list(self._names.values()), recompute))
        self._recomputed = {module for module, name in self._names.items() if name in parts}
        self._contexts = noop_context_fn if policy is None else functools.partial(create_selective_checkpoint_contexts, policy)

    @property
    def inside(self) -> bool:
        """Whether modules show whole parameters: in a forward, and where a backward computes parts of one again."""
        return self.in_forward or (self._in_backward and _torch.is_recomputing())

    def schedule(self) -> Schedule | None:
        return self._log.schedule()

    # ---------------------------------------------------------------- forward

    def run(self, plain: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with_backward = any(shard.requires_grad for shard in self.shards)
        self._pass, self._stack, self._in_backward = Pass(self.shards), [], False
        self._reductions.forget()
        self._active.clear()
        self._log.begin_forward()
        self._coordinator.begin_forward(with_backward=with_backward)
        try:
            result = self._call(plain, module, args, kwargs)
        except BaseException:
            self._coordinator.abandon()
            raise
        finally:
            self._pass = Pass([])  # its graph alone keeps it, and its shards the graph
        self._coordinator.end_forward(with_backward=with_backward)
        return result

    def submodule(self, plain: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of a submodule between its hooks; outside of the model's forward and backward, run it plainly."""
        if not self.inside:
            return plain(module, *args, **kwargs)
        if module not in self._recomputed or not torch.is_grad_enabled():
            return self._call(plain, module, args, kwargs)
        # inputs are passed on one by one, so that torch keeps them, and sees whose random numbers to draw again
        inputs, spec = _torch.tree_flatten((args, kwargs))
        given = [(args, kwargs)]  # the first time as they are: the module may fill a list
        run = functools.partial(self._again, plain, module, given, spec, Buffers(module, self._names[module]))
        return checkpoint(run, *inputs, use_reentrant=False, context_fn=self._contexts)

    def _again(
        self, plain: Forward, module: nn.Module, given: list[tuple[Any, Any]], spec: _torch.TreeSpec, buffers: Buffers, *inputs: Any
    ) -> Any:
        """Run a submodule for the first time, or again in a backward."""
        args, kwargs = given.pop() if given else _torch.tree_unflatten(inputs, spec)
        depth = len(self._stack)
        try:
            with buffers.as_found():
                result = self._call(plain, module, args, kwargs)
        finally:  # torch ends by an exception what it computes again, once it has all that it needs
            with _torch.outside_checkpoints():
                for call in self._stack[depth:]:
                    self._coordinator.release_sub_module(call.held)
            del self._stack[depth:]
        buffers.hold()
        return result

    def _call(self, plain: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(module, self._pass)
        with _torch.outside_checkpoints():
            call.held = self._coordinator.fetch_sub_module(module)
        self._log.compute(self._names[module], again=not self.in_forward)
        self._watch_inputs(call, args, kwargs)
        self._stack.append(call)
        result = plain(module, *args, **kwargs)
        self._stack.pop()
        call.within.callers.update(call.held)
        self._watch_outputs(call, result)
        with _torch.outside_checkpoints():
            self._coordinator.release_sub_module(call.held)
        call.held = ()
        return result

    def _watch_inputs(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.held and torch.is_grad_enabled():
            hook = functools.partial(self._input_grad, call)
            for tensor in _torch.tree_leaves((args, kwargs)):
                # a leaf may live for ever, and its gradient is complete no sooner than its users' parameters need
                if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(hook)
                    call.inputs += 1

    def _watch_outputs(self, call: Call, result: Any) -> None:
        """Let a backward fetch before it enters a submodule: by its outputs, and by what it stored on itself."""
        is_root = not self._stack  # where every backward begins
        if not (call.held or is_root):
            return
        leaves = [result] if isinstance(result, Tensor) else _leaves(result)
        self._hand_over(call, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        if not torch.is_grad_enabled():
            return
        hidden = next((leaf for leaf in leaves if not isinstance(leaf, _KNOWN)), None)
        if hidden is not None and call.held:
            self._coordinator.keep(
                call.held,
                f"{self._names[call.module] or 'the model'} returns a {type(hidden).__qualname__}, in which tensors may hide",
                "return tensors in tuples, lists, dicts or plain objects",
            )
        for leaf in [*leaves, *vars(call.module).values()]:
            node = _entry(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None
            # a tensor that a submodule keeps is met again in each forward
            if node is not None and call.module not in node.metadata.setdefault("zerofx", set()):
                node.metadata["zerofx"].add(call.module)
                node.register_prehook(functools.partial(self._pre_backward, call))

    def _hand_over(self, call: Call, outputs: Sequence[Tensor]) -> None:
        """Let the caller hold the parameters that a submodule returns, or views of them: it is the caller that computes with them."""
        storages = {tensor.untyped_storage()._cdata for tensor in outputs}
        for index in dict.fromkeys(call.held):
            whole = self._coordinator.whole(index)
            if whole is None or whole.untyped_storage()._cdata not in storages:
                continue
            if self._stack:
                caller = self._stack[-1]
                caller.held += self._coordinator.fetch_external(caller.module, index)
            else:
                self._coordinator.keep([index], "the model returns a parameter", "return a copy of it")

    def read(self, index: int) -> Tensor:
        with _torch.outside_checkpoints():
            return self._read(index)

    def _read(self, index: int) -> Tensor:
        if self._stack and not self._coordinator.is_held(index):
            call = self._stack[-1]
            call.held += self._coordinator.fetch_external(call.module, index)
        key = index, torch.is_grad_enabled()
        found = self._pass.reads.get(key)
        if found is None:
            found = _Unshard.apply(self, self._pass.awaiting, index, self._pass.shards[index])  # type: ignore[no-untyped-call]
            self._pass.reads[key] = self.noted(index, found)
        return found

    def gather(self, param: Param, shard: Tensor) -> Tensor:
        whole = self._coordinator.whole(param.index)
        assert whole is not None
        return whole.detach()

    # ---------------------------------------------------------------- backward

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            if not self.gradients.keeps_whole:
                self.agreement.begin_backward()
            self._log.begin_backward()
            self._coordinator.begin_backward()
            _torch.at_end_of_backward(self._end_backward)

    def _pre_backward(self, call: Call, grads: Any) -> None:
        """Fetch what a submodule holds before its backward: called before the node that made one of its outputs."""
        if call.is_active:
            return
        if torch.is_grad_enabled():
            raise second_derivative_error(f"{self._names[call.module] or 'the model'}, before its backward")
        self._begin_backward()
        self._pass = call.within
        call.is_active, call.inputs_left = True, call.inputs
        call.held = self._coordinator.fetch_sub_module(call.module)
        self._log.compute(self._names[call.module])
        self._active[call] = None
        # The gradient of a parameter that several calls share is complete only after the last of them. torch's own modules need
        # it no longer than their inputs' gradients do; in others, a branch of the graph may begin at the parameter itself.
        is_plain = type(call.module)._zerofx_key[0].__module__.startswith("torch.nn.modules.")  # type: ignore[attr-defined]
        call.awaited = {
            index
            for index in call.held
            if self.tensors[index].requires_grad and not (is_plain and call.inputs and call.within.callers[index] > 1)
        }
        for index in call.awaited:
            call.within.awaiting.setdefault(index, []).append(call)

    def _input_grad(self, call: Call, grad: Tensor) -> None:
        call.inputs_left -= 1
        self._post_backward(call)

    def _post_backward(self, call: Call) -> None:
        """Release what a submodule holds once the gradients of its inputs and of its own parameters are complete."""
        if call.is_active and call.inputs_left <= 0 and not call.awaited:
            del self._active[call]
            call.is_active = False
            self._coordinator.release_sub_module(call.held)

    def arrived(self, awaiting: dict[int, list[Call]], index: int, grad: Tensor) -> None:
        """Take the whole gradient of a parameter, complete for one forward: release, and reduce."""
        self._begin_backward()
        for call in awaiting.pop(index, ()):
            call.awaited.discard(index)
            self._post_backward(call)
        total = self.gradients.to_reduce(index, grad)
        if total is not None:
            self._reductions.add(index, total)

    def _end_backward(self) -> None:
        self._in_backward = False
        for call in self._active:
            call.is_active = False
            call.within.awaiting.clear()
        self._active.clear()
        self._pass = Pass([])
        self._coordinator.end_backward()

    def collect(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        reduced = self._reductions.finish()
        return super().collect([reduced.get(index, grad) for index, grad in enumerate(grads)])


class _Unshard(torch.autograd.Function):
    """A whole parameter, read once in each forward: its backward gets the sum of the gradients of all its uses."""

    @staticmethod
    def forward(ctx: Any, runtime: HookedRuntime, awaiting: dict[int, list[Call]], index: int, shard: Tensor) -> Tensor:
        ctx.runtime, ctx.awaiting, ctx.index = runtime, awaiting, index
        return runtime.value(index, shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        ctx.runtime.arrived(ctx.awaiting, ctx.index, grad)
        return None, None, None, None
