"""Many plans of one model beside each other, and the search for the fastest that fits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate

from zerofx.errors import ConfigError, MemoryLimitError
from zerofx.units import parse_bytes

# Differences below this share of a step say nothing: that is how far predictions may be off.
_ALIKE = 0.02
# How often an amount of activations to keep is aimed at.
_AMOUNTS = 2


# Plans with some settings changed; raises MemoryLimitError as planning does.
Planner = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One setting: what was changed, and its plan, or why there is none."""

    settings: Mapping[str, Any]
    plan: Any = None
    problem: str = ""

    @property
    def cells(self) -> list[str]:
        if self.plan is None:
            return ["", "", "", "", "", self.problem]
        found = self.plan
        sent = sum(found.traffic_bytes.values())
        figures = [f"{found.seconds:.4g}", f"{found.exposed_s:.3g}", f"{found.tokens_per_s:,.0f}", f"{found.mfu:.1%}"]
        return [*figures, _gb(found.total_peak_bytes), self.problem or _gb(sent)]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Plans of one model under all combinations of some settings; ``str`` is one table."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return _table(self.rows, "GB sent by a rank")

    def to_json(self) -> str:
        """Return settings and figures as JSON text, a row each."""
        return json.dumps([_plain(row) for row in self.rows], indent=1, default=str)


@dataclass(frozen=True, slots=True)
class Fastest:
    """The fastest setting found within a memory, what else was tried, and why it is the one; ``str`` says it all."""

    memory_bytes: int
    chosen: Row
    tried: tuple[Row, ...]
    why: str

    @property
    def plan(self) -> Any:
        """The plan of the chosen setting."""
        return self.chosen.plan

    def __str__(self) -> str:
        return f"{_table(self.tried, 'verdict')}\n\n{self.why}"

    def to_json(self) -> str:
        """Return the choice, its reason and all that was tried as JSON text."""
        said = {"chosen": _plain(self.chosen), "why": self.why, "tried": [_plain(row) for row in self.tried]}
        return json.dumps(said, indent=1, default=str)


def sweep(planner: Planner, settings: Mapping[str, Sequence[Any] | Any]) -> Sweep:
    """Plan all combinations of settings, each a value or a list of values. One that does not fit its own memory limit says so.

    Raises ConfigError where a list is empty, and as planning does.
    """
    lists = {name: list(value) if isinstance(value, list | range) else [value] for name, value in settings.items()}
    empty = next((name for name, values in lists.items() if not values), None)
    if empty is not None or not lists:
        raise ConfigError(
            f"there is nothing to sweep over{'' if empty is None else f': {empty} is empty'}",
            where="plan.sweep",
            why="each setting is a value, or a list of at least one",
            remedy="plan.sweep(stage=[1, 2, 3], world_size=[8, 64])",
        )
    return Sweep(tuple(_row(planner, dict(zip(lists, values, strict=True))) for values in itertools.product(*lists.values())))


def fastest(planner: Planner, memory: int | str, rows_of_batch: int, recompute: Sequence[Any] = ()) -> Fastest:
    """Find the fastest setting whose peak stays within a memory, over stages, memory limits, recompute and micro-batches of one batch.

    Each stage is planned with its default window first, stage 3 then with the limit of whole parameters and buffers that would fill
    the memory, or the smallest that works, and with parameters that stay whole between micro-batches. Where that does not fit, as much
    is computed again as makes it fit; the batch is halved while it does not without. ``recompute`` are the only values of it to try,
    where some are given. Raises ConfigError where nothing fits at all.
    """
    budget = parse_bytes(memory, "memory")
    if budget is None:
        raise ConfigError(
            "no memory is given", where="plan.fastest(memory)", why="it is what the peak must fit in", remedy='pass bytes, or "40GB"'
        )
    tried: list[Row] = []
    for stage in range(4):
        for micro_batches in _halvings(rows_of_batch):
            settings = {"stage": stage, "micro_batches": micro_batches}
            rows = list(_each(planner, budget, settings, recompute) if recompute else _as_needed(planner, budget, settings))
            tried += rows
            first, plan = rows[0].settings["recompute"], rows[0].plan
            # more micro-batches are slower, and hold no fewer states
            if any(_fits(row, budget) and row.settings["recompute"] == first for row in rows):
                break
            if plan is not None and sum(plan.states_bytes.values()) > budget:
                break
    fitting = [row for row in tried if _fits(row, budget)]
    if not fitting:
        planned = [row for row in tried if row.plan is not None]
        if not planned:
            raise ConfigError(
                f"no setting can be planned: stage {tried[-1].settings['stage']} {tried[-1].problem}",
                where="plan.fastest",
                why="the plan that the search starts from has a memory limit that cannot be met",
                remedy="plan without a memory limit: the search finds one",
            )
        least = min(planned, key=lambda row: row.plan.total_peak_bytes)
        raise ConfigError(
            f"nothing fits in {_gb(budget)} GB: the least is {_gb(least.plan.total_peak_bytes)} GB ({_named(least)})",
            where="plan.fastest",
            why="; ".join(f"{_gb(size)} GB are {kind}" for kind, size in _largest(least)),
            remedy="use more ranks, a smaller batch, or an optimizer with fewer states",
        )
    # of settings that are alike, the one that holds the least
    quickest = min(row.plan.seconds for row in fitting)
    alike = [row for row in fitting if row.plan.seconds <= (1 + _ALIKE) * quickest]
    chosen = min(alike, key=lambda row: (row.plan.total_peak_bytes, row.plan.seconds))
    verdicts = tuple(_judged(row, chosen, budget) for row in tried)
    return Fastest(budget, verdicts[tried.index(chosen)], verdicts, _why(chosen, fitting, tried, budget))


def _each(planner: Planner, budget: int, settings: dict[str, Any], recompute: Sequence[Any]) -> Iterator[Row]:
    """Yield a setting with each of some values of recompute."""
    for value in recompute:
        yield from _within(planner, budget, settings | {"recompute": value})


def _as_needed(planner: Planner, budget: int, settings: dict[str, Any]) -> Iterator[Row]:
    """Yield a setting without recompute; where that does not fit and blocks do, with what is between: by operator, and by amount.

    An amount is what may be kept: less than all by what is too much; once more where computing again takes memory of its own.
    """
    everything = list(_within(planner, budget, settings | {"recompute": None}))
    yield from everything
    if everything[0].plan is None or any(_fits(row, budget) for row in everything):
        return
    blocks = list(_within(planner, budget, settings | {"recompute": "blocks"}))
    yield from blocks
    if not any(_fits(row, budget) for row in blocks):
        return
    yield from _within(planner, budget, settings | {"recompute": "selective"})
    kept, row = _saved_bytes(everything[0]), everything[0]
    for _ in range(_AMOUNTS):
        kept -= row.plan.total_peak_bytes - budget
        if kept <= _saved_bytes(blocks[0]):
            break
        row = _row(planner, settings | {"recompute": kept})
        yield row
        if row.plan is None or _fits(row, budget):
            break


def _saved_bytes(row: Row) -> int:
    return int(row.plan.peak_bytes.get("saved activations", 0))


def _within(planner: Planner, budget: int, settings: dict[str, Any]) -> Iterator[Row]:
    """Yield a setting with its default window; then with a limit, lower where that is too large, higher where memory is left.

    Of several micro-batches, what is left may also keep parameters whole from one to the next. Below stage 3 the limit counts all
    parameters, and takes nothing away but what is in flight.
    """
    row = _row(planner, settings)
    yield row
    if row.plan is None or settings["stage"] < 3:
        return
    if row.plan.micro_batches > 1 and row.plan.total_peak_bytes < budget:
        yield _row(planner, settings | {"keep_whole_bytes": budget - row.plan.total_peak_bytes})
    in_motion = row.plan.schedule.peak_total_bytes
    limit = in_motion - (row.plan.total_peak_bytes - budget)
    if limit <= 0 or limit == in_motion:
        return
    try:
        yield Row(settings | {"memory_limit": limit}, planner(**settings, memory_limit=limit))
    except MemoryLimitError as error:
        if error.smallest_bytes < in_motion:
            yield _row(planner, settings | {"memory_limit": error.smallest_bytes})


def _row(planner: Planner, settings: dict[str, Any]) -> Row:
    try:
        return Row(settings, planner(**settings))
    except MemoryLimitError as error:
        return Row(settings, problem=f"needs a limit of {_gb(error.smallest_bytes)} GB")


def _halvings(rows: int) -> Iterator[int]:
    """Yield the numbers of micro-batches into which a batch halves evenly."""
    count = 1
    while count == 1 or rows % count == 0 < rows:
        yield count
        count *= 2


def _fits(row: Row, budget: int) -> bool:
    return row.plan is not None and row.plan.total_peak_bytes <= budget


def _largest(row: Row) -> list[tuple[str, int]]:
    return sorted(row.plan.peak_bytes.items(), key=lambda item: item[1], reverse=True)[:3]


def _judged(row: Row, chosen: Row, budget: int) -> Row:
    if row.plan is None:
        return row
    if not _fits(row, budget):
        kind, size = _largest(row)[0]
        over = row.plan.total_peak_bytes - budget
        return replace(row, problem=f"{_gb(over)} GB too much; {_gb(size)} GB are {kind}")
    if row is chosen:
        return replace(row, problem="chosen")
    slower = row.plan.seconds / chosen.plan.seconds - 1
    return replace(row, problem=f"{slower:.1%} slower" if slower > _ALIKE else "as fast, holds more")


def _why(chosen: Row, fitting: Sequence[Row], tried: Sequence[Row], budget: int) -> str:
    plan = chosen.plan
    text = (
        f"{_named(chosen)}: {plan.seconds:.4g} s a step, {_gb(plan.total_peak_bytes)} of {_gb(budget)} GB. "
        f"{len(fitting)} of {len(tried)} settings fit"
    )
    others = [row for row in fitting if row is not chosen]
    if not others:
        return f"{text}, and no other."
    nearest = min(others, key=lambda row: row.plan.seconds)
    waits_s, computes_s = nearest.plan.exposed_s - plan.exposed_s, nearest.plan.compute_s - plan.compute_s
    cause = f"waits {_differing(waits_s)} for communication" if abs(waits_s) >= abs(computes_s) else f"computes {_differing(computes_s)}"
    return f"{text}; the next, {_named(nearest)}, takes {nearest.plan.seconds:.4g} s and {cause}."


def _differing(seconds: float) -> str:
    return f"{abs(seconds):.3g} s {'longer' if seconds > 0 else 'less'}"


def _named(row: Row) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in row.settings.items())


def _gb(size: float) -> str:
    return f"{size / 1e9:.4g}"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _table(rows: Sequence[Row], last: str) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.settings))
    heads = [*names, "s a step", "s waiting", "tokens/s", "MFU", "peak GB", last]
    body = [[*(_shown(row.settings.get(name)) for name in names), *row.cells] for row in rows]
    align = ("right",) * (len(heads) - 1) + ("left",)
    return tabulate(body, heads, tablefmt="simple", disable_numparse=True, colalign=align)


def _plain(row: Row) -> dict[str, Any]:
    figures = {} if row.plan is None else json.loads(row.plan.to_json())
    return {"settings": dict(row.settings), "problem": row.problem, **figures}
