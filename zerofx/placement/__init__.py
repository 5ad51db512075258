"""Where to launch collectives and wait for them, on a line of slots: a problem, and its solution."""

from zerofx.placement.problem import Gather, Launch, Problem, Reduction, tasks
from zerofx.placement.replay import Why
from zerofx.placement.solve import Choice, Placement, solve

__all__ = ["Choice", "Gather", "Launch", "Placement", "Problem", "Reduction", "Why", "solve", "tasks"]
