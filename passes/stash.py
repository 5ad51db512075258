"""Stash: keep another form of a value for the backward, and bring the value back before the backward uses it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from zerofx import _torch, ops
from zerofx.ahead import launches_ahead
from zerofx.collectives import own_part
from zerofx.program import Level, Mark, Phase, Program, Stashed, aliases, output_of


@dataclass(frozen=True, slots=True)
class Move:
    """A stashed value by its number, the node before which it is put away or is back, and the one before which that is launched."""

    number: int
    before: str
    launch_before: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Stash:
    """Replace what a forward saves by another form of it, before the last use; restore it in the backward, before the first.

    A restore is launched ``prefetch_buckets`` ahead, of blocks and of restores, so that computing hides it.
    Source: ZeRO (Rajbhandari et al., 2020), section 6.1 (parts); ZeRO-Infinity (Rajbhandari et al., 2021), section 5.1 (files).
    """

    takes: ClassVar[Level] = Level.UNSHARDED
    gives: ClassVar[Level] = Level.RELEASED

    def plan(self, program: Program) -> tuple[Move, ...]:
        """Find the last use of each value in a forward, the first in a backward; list these in the order of use."""
        places, nodes = program.positions(), program.nodes()
        values = [nodes[stashed.name] for stashed in program.stashed]
        if program.phase is Phase.FORWARD or not values:
            return tuple(Move(number, _last_reader(value, places).name) for number, value in enumerate(values))
        first = [min(places[user] for user in value.users) for value in values]
        order, ordered = sorted(range(len(values)), key=first.__getitem__), list(places)
        uses = [first[number] for number in order]
        begin = next(place for node, place in places.items() if node.op != "placeholder")
        launches = launches_ahead(ordered, uses, program.config.prefetch_buckets, begin)
        names = [node.name for node in ordered]
        why = ["no earlier work" if launch == begin else "window" for launch in launches]
        return tuple(Move(*move) for move in zip(order, map(names.__getitem__, uses), map(names.__getitem__, launches), why, strict=True))

    def apply(self, program: Program, plan: tuple[Move, ...]) -> Program:
        """Insert what puts the values away, or what restores them."""
        if plan:
            (_put_away if program.phase is Phase.FORWARD else _restore)(program, plan)
        return program


def _last_reader(value: Node, places: dict[Node, int]) -> Node:
    """Return the last node of a forward that reads a value; the one behind it where nothing does."""
    readers = [user for alias in aliases(value) for user in alias.users if user.op != "output"]
    return max(readers, key=places.__getitem__, default=value.next)


def _put_away(program: Program, plan: tuple[Move, ...]) -> None:
    graph, nodes, output = program.graph, program.nodes(), output_of(program.graph)
    replicas = (
        program.add_input("replicas", Mark("replicas", ())) if any(stashed.group is not None for stashed in program.stashed) else None
    )
    if any(stashed.group is None for stashed in program.stashed):
        program.add_input("spill", Mark("spill", ()))
    for move in plan:
        stashed = program.stashed[move.number]
        value = nodes[stashed.name]
        with graph.inserting_before(nodes[move.before]):
            if stashed.group is not None:
                check = graph.call_function(ops.check_replicas, (replicas, value, move.number))
                check.meta = {key: value for key, value in nodes[move.before].meta.items() if key == "nn_module_stack"}
            kept = graph.call_function(ops.stash, (value,))
        why = "memory" if stashed.group is None else f"1/{stashed.group.size} of it"
        kept.meta = {**value.meta, "val": _kept(value, stashed), "zerofx": Mark("stash", (), move.number, why)}
        output.replace_input_with(value, kept)


def _restore(program: Program, plan: tuple[Move, ...]) -> None:
    graph, nodes = program.graph, program.nodes()
    if any(stashed.group is None for stashed in program.stashed):
        program.add_input("spill", Mark("spill", ()))
    waits: dict[str, list[Node]] = {}
    for move in plan:
        stashed = program.stashed[move.number]
        kept = nodes[stashed.name]
        with graph.inserting_before(nodes[move.before]):
            wait = graph.call_function(ops.restore_wait)
        waits.setdefault(move.before, []).append(wait)
        kept.replace_all_uses_with(wait, propagate_meta=False)
        wait.meta = {**kept.meta, "zerofx": Mark("restore_wait", (), move.number)}
        kept.meta = {**kept.meta, "val": _kept(kept, stashed)}
    arriving = itertools.chain.from_iterable(waits.values())
    for move, wait in zip(plan, arriving, strict=True):
        with graph.inserting_before(waits.get(move.launch_before, [nodes[move.launch_before]])[0]):
            start = graph.call_function(ops.restore_start, (nodes[program.stashed[move.number].name],))
        start.meta = {**wait.meta, "zerofx": Mark("restore_start", (), move.number, move.why)}
        wait.args = (start,)


def _kept(value: Node, stashed: Stashed) -> object:
    """Return the traced value of the form in which a value is kept."""
    traced = value.meta["val"]
    fake_mode = _torch.detect_fake_mode([traced])
    assert fake_mode is not None
    with fake_mode:
        return own_part(traced, stashed.group) if stashed.group is not None else traced.new_empty(1, dtype=torch.int64)
