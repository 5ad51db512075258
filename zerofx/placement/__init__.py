"""Where to launch collectives and wait for them, on a line of slots: a problem, and its solution."""

from zerofx.placement.problem import Gather, Launch, Line, Problem, Reduction, tasks
from zerofx.placement.replay import Why
from zerofx.placement.room import Tightest, tightest
from zerofx.placement.solver import Choice, Placement, earliest, solve

__all__ = [
    "Choice",
    "Gather",
    "Launch",
    "Line",
    "Placement",
    "Problem",
    "Reduction",
    "Tightest",
    "Why",
    "earliest",
    "solve",
    "tasks",
    "tightest",
]
