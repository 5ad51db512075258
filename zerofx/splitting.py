"""A joint graph becomes a forward and a backward: what is kept between them, and how, by the settings and the memory limit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from zerofx import _torch, randomness, stashing
from zerofx.activations import Kept, choose, extents_of, foreseen_bytes, kept, too_few
from zerofx.compilation import Compilation
from zerofx.errors import MemoryLimitError
from zerofx.fitting import Attempt, attempted, bound_sizes, fit, in_several_graphs
from zerofx.groups import Group
from zerofx.pipeline import Pipeline
from zerofx.presets import PRESETS
from zerofx.program import Level, Phase, Program, Stashed
from zerofx.recomputing import Choice, Extent


class Splitting:
    """Splits one joint program and schedules both parts; writes down in its compilation what it did.

    ``source`` is the backward before it is scheduled. ``replicas_group`` are the ranks that have the same activations, if any do.
    """

    def __init__(self, pipeline: Pipeline, compilation: Compilation, replicas_group: Group | None, *, is_whole: bool) -> None:
        self._pipeline, self._compilation = pipeline, compilation
        self._replicas_group, self._is_whole = replicas_group, is_whole
        self.source: Program | None = None

    def split(self, program: Program, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """Split a joint program as the partitioner is told to, and schedule both parts."""
        if not self._is_whole and (program.config.fits or program.config.spills is not None):
            raise in_several_graphs('recompute="auto"' if program.config.fits else 'offload={"activations": ...}')
        if not program.config.fits:
            return self._split_and_kept(program, joint_inputs, **kwargs)
        try:
            return self._split_to_fit(replace(program, config=program.config.without_spills), joint_inputs, **kwargs)
        except MemoryLimitError:
            if program.config.spills is None:
                raise
        # computing again is not enough: what is left of activations goes to disk
        choice = extents_of(list(program.graph.nodes))[Extent.ALL]
        return self._split_and_kept(replace(program, recompute=choice), joint_inputs, **kwargs)

    def _split_and_kept(self, program: Program, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        # what is kept between the two costs memory, so that only without it the limit is really too small
        tries = [program, replace(program, keeps=False)]
        if program.config.spills is not None:  # so does what is gathered ahead, where all that a step allocates is limited
            tries.append(replace(tries[1], config=replace(program.config, prefetch_buckets=0)))
        for tried in tries:
            try:
                return self._split(tried, joint_inputs, **kwargs)
            except MemoryLimitError as error:
                self._compilation.records.clear()
                failure = error
        raise failure if program.config.spills is None else self._smallest(tries[-1], failure, joint_inputs, **kwargs)

    def _smallest(self, program: Program, failure: MemoryLimitError, joint_inputs: Sequence[Any], **kwargs: Any) -> MemoryLimitError:
        """Return the error that names a limit which works: with the one that an error names, parameters fit, but not yet all else."""
        assert program.config.memory_limit_bytes is not None
        while True:
            smallest_bytes = failure.smallest_bytes
            try:
                self._split(replace(program, config=replace(program.config, memory_limit_bytes=smallest_bytes)), joint_inputs, **kwargs)
                return stashing.too_little(program.config.memory_limit_bytes, smallest_bytes)
            except MemoryLimitError as error:
                self._compilation.records.clear()
                failure = error

    def _split(self, program: Program, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        parts = self._keeping_less if program.config.keeps_at_most else self._partitioned
        forward, backward = parts(program, joint_inputs, **kwargs)
        output_count = kwargs["num_fwd_outputs"]
        stashed = self._in_parts(forward, backward, output_count)
        before = list(self._compilation.records)

        def scheduled(spilled: Sequence[Stashed]) -> list[Program]:
            self._compilation.records[:] = before
            parts = [replace(part, stashed=(*stashed, *spilled)) for part in (forward, backward)]
            self.source = parts[1]
            return self.schedule(parts)

        if (spills := forward.config.spills) is None:
            found = scheduled(())
        else:
            names = [node.name for node in stashing.saved(forward, output_count, spills.min_bytes)]
            names = [name for name in names if name not in {item.name for item in stashed}]
            found = stashing.within_limit(forward.config, names, scheduled, lambda program: self._pipeline.run(program, []))
        self._compilation.forward, self._compilation.backward = found
        return forward.module, backward.module

    def _in_parts(self, forward: Program, backward: Program, output_count: int) -> tuple[Stashed, ...]:
        """Choose which activations the ranks of ``Config.partition_activations`` keep a part each of."""
        group = self._replicas_group
        if group is None:
            return ()
        again = next(record.plan for record in self._compilation.records if record.name == "Recompute")
        regions = {number: stashing.Region(part.module, frozenset(part.kept)) for number, part in enumerate(again)}
        return stashing.partitioned(forward, backward, output_count, regions, group)

    def _partitioned(self, program: Program, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[Program, Program]:
        traced = self.run(program, Level.RECOMPUTED)
        compiler = "inductor" if traced.config.backend == "inductor" else "aot_eager"
        start = time.perf_counter()
        forward, backward = _torch.min_cut_rematerialization_partition(traced.module, joint_inputs, compiler=compiler, **kwargs)
        randomness.settle(forward, backward)
        self._compilation.spend("partition", start)
        return replace(traced, module=forward, phase=Phase.FORWARD), replace(traced, module=backward, phase=Phase.BACKWARD)

    def _keeping_less(self, program: Program, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[Program, Program]:
        """Split a joint program so that no more activations are kept than ``Config.recompute`` says, by what each part keeps and costs."""
        machine = program.config.machine or PRESETS["h100"]  # for want of figures, those of some accelerator
        before = list(self._compilation.records)

        def tried(choice: Choice) -> tuple[tuple[Program, Program], Kept]:
            self._compilation.records[:] = before
            parts = self._partitioned(replace(program, recompute=choice), joint_inputs, **kwargs)
            return parts, kept(*parts, kwargs["num_fwd_outputs"], machine)

        options = {extent: tried(choice)[1] for extent, choice in extents_of(list(program.graph.nodes)).items()}
        most_bytes = aim_bytes = program.config.kept_bytes(options[Extent.NOTHING].total_bytes)
        last: Choice | None = None
        while (choice := choose(options, aim_bytes)) != last:
            parts, found = tried(choice)
            if found.total_bytes <= most_bytes:
                return parts
            # what the parts owe each other was not foreseen: aim lower, and at another choice
            last, aim_bytes = choice, min(aim_bytes - (found.total_bytes - most_bytes), foreseen_bytes(options, choice) - 1)
        raise too_few(most_bytes, options[Extent.ALL].total_bytes)

    def _split_to_fit(self, program: Program, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """Split a joint program so that all that its step holds stays within the memory limit, whatever has to be given up for that."""
        compilation, limit_bytes = self._compilation, program.config.memory_limit_bytes
        machine = program.config.machine or PRESETS["h100"]  # for want of figures, those of some accelerator
        before = list(compilation.records)
        assert limit_bytes is not None

        def attempt(choice: Choice, moving_bytes: int) -> Attempt:
            compilation.records[:] = before
            config = replace(program.config, memory_limit_bytes=moving_bytes)
            modules = self._split_and_kept(replace(program, config=config, recompute=choice), joint_inputs, **kwargs)
            forward, backward = compilation.forward, compilation.backward
            assert forward is not None
            assert backward is not None
            made = modules, forward, backward, self.source, list(compilation.records)
            return attempted(forward, backward, self._pipeline, machine, made)

        def keep(choice: Choice) -> Kept:
            compilation.records[:] = before
            parts = self._partitioned(replace(program, recompute=choice), joint_inputs, **kwargs)
            return kept(*parts, kwargs["num_fwd_outputs"], machine)

        found, share = fit(attempt, keep, extents_of(list(program.graph.nodes)), limit_bytes)
        modules, compilation.forward, compilation.backward, self.source, compilation.records[:] = found.made
        bound_sizes(program, share)
        split: tuple[GraphModule, GraphModule] = modules
        return split

    def schedule(self, programs: list[Program]) -> list[Program]:
        """Schedule each program; where several do not fit the memory limit, raise the error that asks for the most."""
        done, errors = [], []
        for program in programs:
            try:
                done.append(self.run(program, Level.SCHEDULED))
            except MemoryLimitError as error:
                errors.append(error)
        if errors:
            raise max(errors, key=lambda error: error.smallest_bytes)
        return done

    def run(self, program: Program, upto: Level) -> Program:
        start = time.perf_counter()
        result = self._pipeline.run(program, self._compilation.records, upto)
        self._compilation.spend("passes", start)
        return result
