"""The torch.compile backend: joint graph, passes, partition, passes, lower."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from zerofx import _torch, groups, ops
from zerofx.agreement import Unit
from zerofx.compilation import Compilation
from zerofx.errors import ZerofxError
from zerofx.passes import STAGES
from zerofx.pipeline import Pipeline, Record
from zerofx.program import Level, Mark, Phase, Program, Sync, arguments, results_of
from zerofx.regions import Compiler
from zerofx.render import Schedule
from zerofx.replicas import Replicas
from zerofx.runtime import Forward, Runtime, in_place_error
from zerofx.spill import Spill
from zerofx.splitting import Splitting
from zerofx.tape import Tape
from zerofx.work import bytes_of

# A model whose blocks break the graph compiles each block once; beyond this, Dynamo runs the rest uncompiled.
_MAX_RECOMPILES = 256


class Backend:
    """Compiles the graphs that Dynamo captures from one model."""

    def __init__(self, runtime: CompiledRuntime, forward: Forward) -> None:
        self.runtime, self._forward = runtime, forward
        mesh = runtime.config.partition_activations
        self.replicas_group = None if mesh is None else groups.group_of(mesh)
        self.pipeline: Pipeline = STAGES[runtime.config.stage].including(runtime.config.passes)
        self.compiler = runtime.new_compiler()

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._check_writes(gm)
        inductor = self.runtime.config.backend == "inductor"
        tracing = self.runtime.new_tracing(self, is_whole=_torch.is_whole_frame(gm, self._forward))
        with self.runtime.agreement.compiling():
            compiled = _torch.aot_autograd(
                fw_compiler=tracing.forward,
                bw_compiler=tracing.backward,
                inference_compiler=tracing.inference,
                partition_fn=tracing.partition,
                decompositions=_torch.inductor_decompositions() if inductor else {},
                keep_inference_input_mutations=True,
            )(gm, inputs)
        self.runtime.compilations.append(tracing.compilation)
        return compiled

    def _check_writes(self, gm: GraphModule) -> None:
        """Refuse a graph that writes into a parameter: tracing ran it on fake tensors, whose versions tell."""
        for node in gm.graph.nodes:
            value = node.meta.get("example_value")
            if node.target in (torch.ops.zerofx.unshard, ops.UNSHARD) and value is not None and value._version:
                raise in_place_error(self.runtime.params[node.args[2]])

    def program(self, module: GraphModule, phase: Phase, *, keeps: bool) -> Program:
        """Wrap a traced graph with the facts of the model."""
        runtime = self.runtime
        facts = runtime.params, runtime.group, runtime.config, runtime.wholes.buckets
        return Program(module, phase, Level.TRACED, *facts, keeps=keeps, recompute=runtime.config.recompute)


class CompiledRuntime(Runtime):
    """Runs a model's forward by ``torch.compile`` with the backend above."""

    def __init__(self, *state: Any) -> None:
        super().__init__(*state)
        self.compilations: list[Compilation] = []  # every graph compiled so far
        self.executed: list[Compilation] = []  # those that the current forward runs, in order
        self.last_step: list[Compilation] = []  # those of the last forward, the last trained one where there is one
        self._compiled: dict[Forward, Forward] = {}
        _torch.mark_static(copy for copy in self.wholes.copies if copy is not None)

    def run(self, plain: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plain not in self._compiled:
            # the annotations of torch.compile's overloads lag behind its arguments
            self._compiled[plain] = torch.compile(  # type: ignore[call-overload]
                plain,
                backend=Backend(self, plain),
                recompile_limit=_MAX_RECOMPILES,
                isolate_recompiles=True,
                # what fits a limit depends on the shapes of the batch: each is planned for itself
                dynamic=None if self.config.spills is None else False,
            )
        self.executed = []
        _torch.mark_static(self.shards)
        try:
            # the first time, Dynamo may trace for as long as the compilers that follow
            with nullcontext() if self.compilations else self.agreement.compiling():
                return self._compiled[plain](module, *args, **kwargs)
        except _torch.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, ZerofxError):
                raise error.inner_exception from None
            raise
        finally:
            if any(ran.backward for ran in self.executed) or not any(ran.backward for ran in self.last_step):
                self.last_step = self.executed

    def new_compiler(self) -> Compiler:
        """Return what makes lowered programs run."""
        return Compiler()

    def new_tracing(self, backend: Backend, *, is_whole: bool) -> Tracing:
        """Return the compilers of one captured graph."""
        return Tracing(backend, Compilation(), is_whole)

    def read(self, index: int) -> Tensor:
        if torch.compiler.is_compiling():
            marked: Tensor = torch.ops.zerofx.unshard(self.shards[index], self.wholes.copies[index], *self.geometry[index])
            return marked
        return super().read(index)

    def lowered(self) -> tuple[list[Program], list[Program]]:
        """Return the lowered forwards and backwards of the last step, in the order in which they run."""
        forwards = [ran.lowered["forward"] for ran in self.last_step if "forward" in ran.lowered]
        return forwards, [ran.lowered["backward"] for ran in reversed(self.last_step) if "backward" in ran.lowered]

    @property
    def waited_s(self) -> float:
        return sum(tape.waited_s for ran in self.compilations for tape in ran.tapes)

    def schedule(self) -> Schedule | None:
        forwards = [ran.forward for ran in self.last_step if ran.forward is not None]
        backwards = [ran.backward for ran in reversed(self.last_step) if ran.backward is not None]
        if not forwards:
            return None
        return Schedule.of([*forwards, *backwards], self.params, self.group, self.config, self.wholes.buckets)


class Tracing:
    """The compilers of one captured graph, as AOTAutograd calls them."""

    def __init__(self, backend: Backend, compilation: Compilation, is_whole: bool) -> None:
        self.backend, self.compilation = backend, compilation
        self.is_whole = is_whole
        self.splitting = Splitting(backend.pipeline, compilation, backend.replicas_group, is_whole=is_whole)
        self.spill: Spill | None = None

    def partition(self, joint: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """Run the joint passes, split the graph, and schedule both parts, before anything is compiled."""
        return self.splitting.split(self.joint(joint), joint_inputs, **kwargs)

    def forward(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Lower the scheduled forward."""
        assert self.compilation.forward is not None
        _torch.donate_no_buffers()
        return self._forward(self.compilation.forward)

    def inference(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Schedule and lower a graph without a backward."""
        return self._forward(self.schedule_inference(self.joint(gm)))

    def backward(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Lower the scheduled backward."""
        assert self.splitting.source is not None
        assert self.compilation.backward is not None
        with self.backend.runtime.agreement.compiling():  # it may be the first backward that asks for it
            return _Backward(self, self.splitting.source, self.compilation.backward)

    def lower(self, program: Program, name: str) -> Tape:
        """Lower a scheduled program and compile its regions."""
        lowered = self.splitting.run(program, Level.LOWERED)
        self.compilation.lowered[name] = lowered
        start, compiler = time.perf_counter(), self.backend.compiler
        before = compiler.region_count, compiler.distinct_count
        tape = compiler.tape(lowered)
        self.compilation.tapes.append(tape)
        self.compilation.region_count += compiler.region_count - before[0]
        self.compilation.distinct_count += compiler.distinct_count - before[1]
        self.compilation.spend("regions", start)
        return tape

    def schedule_backward(self, source: Program, sync: Sync) -> Program:
        """Schedule the backward for another treatment of whole gradients."""
        (scheduled,) = self.splitting.schedule([replace(source, sync=sync)])
        return scheduled

    def schedule_inference(self, program: Program) -> Program:
        """Schedule a program without a backward, for which nothing is computed again."""
        program = replace(program, recompute=None)
        traced = replace(self.splitting.run(program, Level.RECOMPUTED), phase=Phase.FORWARD)
        (self.compilation.forward,) = self.splitting.schedule([traced])
        return self.compilation.forward

    def joint(self, module: GraphModule) -> Program:
        """Wrap a traced graph, after Inductor's joint passes."""
        program = self.backend.program(module, Phase.JOINT, keeps=self.is_whole)
        if program.config.backend == "inductor":
            device = next(value.device for node in module.graph.nodes if isinstance(value := node.meta.get("val"), Tensor))
            start = time.perf_counter()
            program = replace(program, module=_torch.inductor_joint_passes(module, device))
            self.compilation.spend("inductor joint passes", start)
        return program

    def _forward(self, scheduled: Program) -> Callable[[list[Any]], Any]:
        tape = self.lower(scheduled, "forward")
        runtime, compilation, unit = self.backend.runtime, self.compilation, unit_of(scheduled)
        given: dict[str, Any] = {"arrivals": runtime.wholes.arrivals, "stored": runtime.stored}
        if self.backend.replicas_group is not None:
            given["replicas"] = Replicas(self.backend.replicas_group, [stashed.module for stashed in scheduled.stashed])
        sizes = _spilled_bytes(scheduled)
        if any(sizes):
            directory = runtime.config.offload.directory("activations")  # type: ignore[union-attr]
            given["spill"] = self.spill = Spill(directory, runtime.group.rank, sizes)
        beside, spill = [given[mark.kind] for _, mark in scheduled.marked(*given)], self.spill
        communicates = runtime.config.stage == 3

        def run(inputs: list[Any]) -> Any:
            runtime.executed.append(compilation)
            inputs.extend(beside)
            if spill is not None:
                spill.begin()
            if communicates:
                return runtime.agreement.turn(unit, lambda: tape(inputs), is_last=self.is_whole)
            return runtime.agreement.guard(lambda: tape(inputs))  # waits for refreshes

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


class _Backward:
    """A backward in up to three forms, lowered when first needed: see ``Sync``."""

    def __init__(self, tracing: Tracing, source: Program, scheduled: Program) -> None:
        self._boxed_call = True  # on the instance: the wrapper that AOTAutograd puts around copies its __dict__
        self._tracing, self._source = tracing, source
        self._runtime = tracing.backend.runtime
        results = results_of(source.graph)
        names = dict(_reduced(tracing.compilation.records))
        self._reduced = [(place, names[node.name]) for place, node in enumerate(results) if node is not None and node.name in names]
        self._indices = [index for _, index in self._reduced]
        self._tapes: dict[Sync, tuple[Tape, Unit, list[Mark]]] = {
            Sync.REDUCE: (tracing.lower(scheduled, "backward"), unit_of(scheduled), _given(scheduled))
        }

    def __call__(self, inputs: list[Any]) -> Any:
        sync = self._runtime.gradients.sync(self._indices)
        if sync not in self._tapes:
            self._tapes[sync] = self._lower(sync)
        tape, unit, given = self._tapes[sync]
        gradients, agreement = self._runtime.gradients, self._runtime.agreement
        is_last = self._tracing.is_whole and not gradients.has_leftovers(self._indices)
        beside = {"spill": self._tracing.spill, "stored": self._runtime.stored}
        inputs.extend(gradients.take_pending(mark.params[0]) if mark.kind == "pending" else beside[mark.kind] for mark in given)
        if sync is not Sync.KEEP:
            return agreement.turn(unit, lambda: tape(inputs), is_last=is_last)
        results = list(tape(inputs))
        for place, index in self._reduced:
            gradients.keep(index, results[place])
            results[place] = None
        return results

    def _lower(self, sync: Sync) -> tuple[Tape, Unit, list[Mark]]:
        with torch.no_grad(), self._runtime.agreement.compiling():
            scheduled = self._tracing.schedule_backward(self._source, sync)
            return self._tracing.lower(scheduled, f"backward, {sync.value}"), unit_of(scheduled), _given(scheduled)


def unit_of(program: Program) -> Unit:
    """Return the communication of a scheduled program."""
    return Unit(tuple((mark.kind.removesuffix("_start"), mark.params) for _, mark in program.marked("gather_start", "reduce_start")))


def _given(backward: Program) -> list[Mark]:
    """Return what a scheduled backward takes beside what was traced, in the order of its inputs."""
    return [mark for _, mark in backward.marked("spill", "pending", "stored")]


def _spilled_bytes(forward: Program) -> list[int]:
    """Return the bytes of each stashed value that lies in a file, 0 of the others."""
    sizes = dict.fromkeys(range(len(forward.stashed)), 0)
    for node, mark in forward.marked("stash"):
        if forward.stashed[mark.bucket].group is None:
            sizes[mark.bucket] = bytes_of(arguments(node)[0])
    return list(sizes.values())


def _reduced(records: Sequence[Record]) -> list[tuple[str, int]]:
    """Return (result node, parameter) of each gradient that the Reduce pass found in a backward."""
    plans = [record.plan for record in records if record.name == "Reduce" and record.phase is Phase.BACKWARD]
    return [(item.result, item.index) for item in plans[0]] if plans else []


def zerofx_backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile what surrounds a model that ``zerofx.compile`` sharded: ``torch.compile(model, backend="zerofx")``.

    The model's own graphs go through its passes; the code around them through Inductor.
    """
    from torch._inductor.compile_fx import compile_fx

    compiled: Callable[..., Any] = compile_fx(gm, list(inputs))  # type: ignore[assignment]
    return compiled
