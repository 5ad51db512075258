"""Run passes: plan, apply on the run's own copy, lint, verify, record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from zerofx.errors import ConfigError
from zerofx.program import Level, Phase, Program
from zerofx.verify import verify


class Pass(Protocol):
    """Deciding apart from rewriting. A pass is a frozen dataclass; its fields are its options, with units."""

    takes: ClassVar[Level]
    gives: ClassVar[Level]

    def plan(self, program: Program) -> Any:
        """Decide, reading only; return frozen data of names and numbers."""
        ...

    def apply(self, program: Program, plan: Any) -> Program:
        """Rewrite the given copy as the plan says, and return it."""
        ...


@dataclass(frozen=True, slots=True)
class Record:
    """What one pass did to one program."""

    name: str
    phase: Phase
    plan: Any
    nodes_before: int
    nodes_after: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Passes in order. Levels are checked here, once: each pass must find at least the level that it takes."""

    passes: tuple[Pass, ...] = field(default=())

    def __init__(self, *passes: Pass) -> None:
        object.__setattr__(self, "passes", passes)
        level = Level.TRACED
        for item in passes:
            if item.takes > level or item.gives < level:
                raise ConfigError(
                    f"{type(item).__name__} cannot stand here: it takes {item.takes.name} and gives {item.gives.name}",
                    where="zerofx.passes",
                    why=f"the passes before it give {level.name}",
                    remedy="put it behind a pass that gives what it takes; levels only rise",
                )
            level = item.gives

    def including(self, extra: Sequence[Pass]) -> Pipeline:
        """Return the pipeline with each extra pass behind the passes that give at most what it takes."""
        passes = list(self.passes)
        for item in extra:
            place = sum(1 for other in passes if other.gives <= item.takes)
            passes.insert(place, item)
        return Pipeline(*passes)

    def run(self, program: Program, records: list[Record], upto: Level = Level.LOWERED) -> Program:
        """Run the passes between the program's level and another, and append a record of each.

        The given program stays as it is: the first pass rewrites a copy, and what one pass made is the next one's to rewrite.
        """
        entry, given = program.level, program
        for item in self.passes:
            if entry < item.gives <= upto:
                program = _run_one(item, program, records, is_given=program is given)
        return program


def _run_one(item: Pass, program: Program, records: list[Record], *, is_given: bool) -> Program:
    start, before = time.perf_counter(), len(program.graph.nodes)
    plan = item.plan(program)
    result = item.apply(program.copy() if is_given else program, plan)
    result = replace(result, level=max(program.level, item.gives))
    result.graph.lint()
    verify(result, after=type(item).__name__)
    seconds = time.perf_counter() - start
    records.append(Record(type(item).__name__, program.phase, plan, before, len(result.graph.nodes), seconds))
    return result
