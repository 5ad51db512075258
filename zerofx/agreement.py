"""Ranks that run different programs: they find out before they communicate, and each takes part in what the others run."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from zerofx import _torch, divergence
from zerofx.divergence import BACKWARD, TRAINING, Place
from zerofx.errors import RankLostError, RankMismatchError, ZerofxError
from zerofx.params import Param
from zerofx.render import label_of
from zerofx.rendezvous import Meeting, Rendezvous

T = TypeVar("T")

# Following an expected order takes a meeting at its start and one at its end.
_LEAST_EXPECTED = 3


@dataclass(frozen=True)
class Unit:
    """Communication that runs as one: that of a compiled graph, in the order of its launches, or of one eager bucket.

    Each launch is a kind (``gather``, ``refresh``, ``reduce``) and indices into the parameter table: the same whatever the shapes
    of a rank's batch.
    """

    launches: tuple[tuple[str, tuple[int, ...]], ...]

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(repr(self.launches).encode()).hexdigest()[:16]


# What a rank brings to a meeting that has run all of its own.
_NOTHING = Unit(())


class Agreement:
    """Keeps the communication of all ranks of a model in one order.

    A forward or a backward is a phase of units. Before a unit the ranks meet: where all have the same one, each runs it. Where they
    have different ones, all run each of these, in rank order: for real, or by taking part in it (``take_part``) without adding
    anything. A phase ends for all ranks at once. The order of a long phase is remembered, and followed the next time without
    meetings in between; it is the same on all ranks, because all ran the same.
    """

    def __init__(
        self,
        model: str,
        rank: int,
        params: tuple[Param, ...],
        timeout_s: float,
        meet: Callable[[], Rendezvous] | None,
        take_part: Callable[[str, tuple[int, ...]], None],
        *,
        in_forward: bool,
    ) -> None:
        self._model, self._rank, self._params, self._timeout_s, self._take_part = model, rank, params, timeout_s, take_part
        self._connect, self._in_forward = meet, in_forward
        self._connected: Rendezvous | None = None
        self._units = {_NOTHING.key: _NOTHING}
        self._phase = ""
        self._forward = self._backward = 0
        self._ran: list[Unit] | None = None  # by all ranks in this phase; None before its first meeting
        self._joined = 0  # which of them this rank only took part in, one bit each
        self._ahead: deque[Unit] = deque()
        self._expected: dict[str, tuple[Unit, ...]] = {}
        self._over: ZerofxError | None = None

    @property
    def rendezvous(self) -> Rendezvous:
        """Where the ranks meet; connected when first needed."""
        if self._connected is None:
            assert self._connect is not None
            self._connected = self._connect()
        return self._connected

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self._connect is None

    def compiling(self) -> AbstractContextManager[None]:
        """Within, the others wait for this rank longer than the timeout."""
        return nullcontext() if self.is_alone else self.rendezvous.compiling()

    # ---------------------------------------------------------------- phases

    def begin(self, phase: str) -> None:
        """Start a forward, or a backward. Raises the error that ended all communication, if one did."""
        if self.is_alone:
            return
        if self._over is not None:
            raise self._over
        if self._connected is not None and (left := self._connected.settle()) is not None:
            self._heed(left, was_left=True)
        if self._phase:  # a backward that gave gradients of inputs only, as on the other ranks
            self._meet(_NOTHING, is_last=True, failure="left it before its end")
            self._close()
        self._phase = phase
        if phase == BACKWARD:
            self._backward += 1
        elif phase == TRAINING or self._in_forward:  # others communicate nothing, so that ranks may differ in their number
            self._forward += 1

    def begin_backward(self, *, is_last: bool = False) -> None:
        """Start a backward, called inside of it; ``is_last`` if its first unit is its only one."""
        if not self.is_alone and not self._phase:
            self.begin(BACKWARD)
            if not is_last:
                _torch.when_backward_raises(self._give_up)

    def turn(self, unit: Unit, run: Callable[[], T], *, is_last: bool = False) -> T:
        """Run a unit when all ranks are ready for it, and before or after it what only others have. ``is_last`` ends the phase.

        Raises RankMismatchError where the ranks are in different phases, one has failed, or one does not come in time; RankLostError
        where one is gone. The same on all ranks.
        """
        if self.is_alone:
            return run()
        if not self._phase:
            self.begin_backward(is_last=is_last)
        if self._ran is None:
            self._look_ahead()
        if unit in self._ahead:
            while (expected := self._ahead.popleft()) != unit:
                self._join(expected)
            return self._run(unit, run)
        self._join_ahead()
        places = self._meet(unit, is_last=is_last)
        results = []
        for key in _keys(places):
            if key == unit.key:
                results.append(self._run(unit, run))
            else:
                self._join(self._unit(key))
        if is_last and all(place.is_last for place in places):
            self._expected[self._phase] = ()
            self._close()
        elif is_last:
            self._finish()
        return results[0]

    def end(self) -> frozenset[int]:
        """End the phase when all ranks do; until then take part in what they run.

        Returns the parameters whose gradients an expected order has reduced although no rank had any.
        """
        needless = frozenset[int]()
        if self._phase and (self._in_forward or self._phase == BACKWARD):
            if self._ran is None:
                self._look_ahead()
            self._join_ahead()
            needless = self._finish()
        self._close()
        return needless

    def guard(self, run: Callable[[], T]) -> T:
        """Run a wait for communication that began in a unit. Raises RankLostError where a rank is gone."""
        try:
            return run()
        except RuntimeError as error:
            if self.is_alone or not (gone := self.rendezvous.disconnected()):
                raise
            raise self._break(error, gone) from error

    def fail(self, error: BaseException | None) -> None:
        """Tell the others that this rank gives up the phase: they raise where they next meet it, and all can go on with the next one."""
        if not self._phase or self._over is not None:
            return
        if self._phase in (TRAINING, BACKWARD) or self._in_forward or self._ran is not None:
            self._join_ahead()
            self.rendezvous.leave(self._place(_NOTHING, is_last=True, failure=_raised(error)).to_text())
        self._close()

    def _give_up(self) -> None:
        with suppress(ZerofxError):  # nobody can catch it here; the next forward raises it
            self.fail(None)

    def _look_ahead(self) -> None:
        self._ran = []
        expected = self._expected.get(self._phase, ())
        if len(expected) >= _LEAST_EXPECTED:
            self._meet(expected[0], is_last=False)
            self._ahead.extend(expected)

    def _finish(self) -> frozenset[int]:
        """Take part in what others still have to run; expect next time what any rank needed this time."""
        places: Sequence[Place] = []
        while not places or not all(place.is_last for place in places):
            places = self._meet(_NOTHING, is_last=True)
            for key in _keys(places):
                self._join(self._unit(key))
        needless = functools.reduce(operator.and_, (place.joined for place in places))
        ran = self._ran or []
        kept = [unit for bit, unit in enumerate(ran) if not needless >> bit & 1]
        self._expected[self._phase] = tuple(kept)
        self._close()
        return _reduced(ran) - _reduced(kept)

    def _close(self) -> None:
        self._phase, self._ran, self._joined = "", None, 0
        self._ahead.clear()

    # ---------------------------------------------------------------- units

    def _run(self, unit: Unit, run: Callable[[], T]) -> T:
        assert self._ran is not None
        if unit.launches:
            self._ran.append(unit)
        try:
            return run()
        except BaseException as error:
            gone = self.rendezvous.disconnected() if isinstance(error, RuntimeError) else []
            broken = self._break(error, gone)
            if gone:
                raise broken from error
            raise

    def _join(self, unit: Unit) -> None:
        if not unit.launches:
            return
        assert self._ran is not None
        self._joined |= 1 << len(self._ran)

        def run() -> None:
            for kind, members in unit.launches:
                self._take_part(kind, members)

        self._run(unit, run)

    def _join_ahead(self) -> None:
        while self._ahead:
            self._join(self._ahead.popleft())

    def _unit(self, key: str) -> Unit:
        """Return a unit by its key: one of another rank has been published."""
        if key not in self._units:
            launches = json.loads(self.rendezvous.read(key))
            self._units[key] = Unit(tuple((kind, tuple(members)) for kind, members in launches))
        return self._units[key]

    def _break(self, error: BaseException, gone: Sequence[int]) -> ZerofxError:
        """Close all connections: ranks are gone, or what this one sends no longer fits what the others expect. Return their error."""
        name = self._place(_NOTHING, is_last=True, failure="").name
        if gone:
            found = divergence.lost(gone, name, self._model, str(error))
        else:
            found = divergence.failed(self._rank, name, self._model, f"{_raised(error)}, in the middle of communication", can_go_on=False)
        parts = [isinstance(found, RankLostError), found.what, found.where, found.why, found.remedy]
        try:
            is_lost, what, where, why, remedy = json.loads(self.rendezvous.conclude(json.dumps(parts)))
            found = (RankLostError if is_lost else RankMismatchError)(what, where=where, why=why, remedy=remedy)
        except RankLostError:
            pass  # the store went with the rank that kept it
        self.rendezvous.disconnect()
        self._over = found
        return found

    # ---------------------------------------------------------------- meetings

    def _place(self, unit: Unit, *, is_last: bool, failure: str) -> Place:
        return Place(self._model, self._phase, self._forward, self._backward, unit.key, is_last, self._joined, failure)

    def _meet(self, unit: Unit, *, is_last: bool, failure: str = "") -> Sequence[Place]:
        """Return where the ranks are, one place for all if they are at the same. Raises where they cannot go on together."""
        here = self._place(unit, is_last=is_last, failure=failure)
        try:
            if unit.key not in self._units:
                self.rendezvous.publish(unit.key, json.dumps(unit.launches))
                self._units[unit.key] = unit
            met = self.rendezvous.meet(here.to_text())
        except RankLostError as error:
            self._over = divergence.lost(self.rendezvous.disconnected() or [0], here.name, self._model, error.why)
            raise self._over from error
        return [here] if met is None else self._heed(met)

    def _heed(self, meeting: Meeting, *, was_left: bool = False) -> list[Place]:
        """Return where the ranks were at a meeting; raise where they cannot go on together, all counting alike from there."""
        places = [Place.of_text(text) for text in meeting.said]
        here = [place for place in places if place is not None]
        if was_left and len(here) == len(places):
            error = None
        else:
            last_seen = [Place.of_text(text) for text in meeting.last_seen]
            error = divergence.parted(places, last_seen, meeting.gone, self._timeout_s, self._first_of)
        if was_left or error is not None:
            self._forward, self._backward = max(place.forward for place in here), max(place.backward for place in here)
        if error is not None:
            self._close()
            self._over = error if meeting.gone else None
            raise error
        return here

    def _first_of(self, key: str) -> str:
        """Describe where a unit begins."""
        launches = self._unit(key).launches
        if not launches:
            return "its end"
        kind, members = launches[0]
        return f"the {kind} of {label_of([self._params[index] for index in members])}"


def _reduced(units: Sequence[Unit]) -> frozenset[int]:
    return frozenset(index for unit in units for kind, members in unit.launches if kind == "reduce" for index in members)


def _keys(places: Sequence[Place]) -> list[str]:
    """Return the keys of the different units that ranks are about to run, in rank order."""
    return list(dict.fromkeys(place.unit for place in places))


def _raised(error: BaseException | None) -> str:
    if error is None:
        return "raised in a backward"
    return f"raised {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
