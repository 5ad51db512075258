"""Steps that the ranks of a group take together through their store: with a deadline, and from any thread."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from zerofx import _torch
from zerofx.errors import CheckpointError, RankMismatchError, ZerofxError
from zerofx.groups import Group
from zerofx.rendezvous import reachable

K = TypeVar("K")
T = TypeVar("T")
R = TypeVar("R")

# The first rank may host the store: it stays this long for the others to take their answers.
PICK_UP_S = 10.0
LONGEST_PAUSE_S = 0.02
PART_BYTES = 2**22  # torch's store takes messages of up to 8 MiB
# What a rank's mark says: that it waits for an answer, that it will get one, or that it has given up.
HERE, TAKEN, GONE = "here", "taken", "gone"


@dataclass(frozen=True, slots=True)
class Consensus:
    """What the ranks of a group do together under one name.

    A collective that a rank does not join hangs, and leaves the process group unusable. A step that a rank does not take ends in an
    error that names the rank, and everything else goes on. Steps of one name are taken in the same order on all ranks.
    """

    name: str
    group: Group
    timeout_s: float

    def step(self, where: str, local: Callable[[], tuple[K, T]], lead: Callable[[list[T]], Sequence[R]]) -> tuple[K, R]:
        """Run ``local`` on every rank, for what it keeps and what it gives, then ``lead`` on the first rank with all that was given.

        Returns what ``local`` kept, and this rank's part of what ``lead`` answered.
        Raises what any rank raised, on all of them; RankMismatchError where a rank has not come ``timeout_s`` after this one;
        RankLostError where the process that keeps the store is gone.
        """
        kept: Any = None
        given: Any
        failure: Exception | None = None
        try:
            kept, given = local()
        except Exception as error:
            failure, given = error, _described(error, where, self.group.rank)
        if not self.group.has_peers:
            answer = _answers([given], lead, where)[0]
        else:
            with reachable(f"{where}, rank {self.group.rank}"):
                answer = self._exchanged(where, given, lead)
        if failure is not None:
            raise given from (failure.__cause__ if given is failure else failure)
        if isinstance(answer, ZerofxError):
            raise answer
        return kept, answer

    def _exchanged(self, where: str, given: Any, lead: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Give to the first rank, and return its answer."""
        store = _torch.default_store()
        # The step's number is kept in the store, and moves on only when all ranks have come: who gave up alone is not ahead.
        counter = f"zerofx/{self.name}/steps"
        base = f"zerofx/{self.name}/{store.add(counter, 0)}"
        _post(store, f"{base}/given/{self.group.rank}", given)
        store.set(f"{base}/mark/{self.group.rank}", HERE)
        if self.group.rank == 0:
            return self._lead(store, base, counter, where, lead)
        return self._follow(store, base, where)

    def _lead(self, store: dist.Store, base: str, counter: str, where: str, lead: Callable[[list[Any]], Sequence[Any]]) -> Any:
        ranks = range(self.group.size)
        marks = [f"{base}/mark/{rank}" for rank in ranks]
        _poll(lambda: store.check(marks), self.timeout_s)
        taken = [rank for rank in ranks if store.compare_set(marks[rank], HERE, TAKEN) == TAKEN.encode()]
        given = [_take(store, f"{base}/given/{rank}") for rank in taken]
        answers: Sequence[Any]
        if len(taken) == len(ranks):
            answers = _answers(given, lead, where)
            store.add(counter, 1)
        else:
            answers = [self._missing(where, [rank for rank in ranks if rank not in taken])] * len(ranks)
        for rank in taken:
            store.delete_key(marks[rank])
            if rank:
                _post(store, f"{base}/answer/{rank}", answers[rank])
        _poll(lambda: not any(store.check([f"{base}/answer/{rank}"]) for rank in taken), PICK_UP_S)
        return answers[0]

    def _follow(self, store: dist.Store, base: str, where: str) -> Any:
        mark, answer = f"{base}/mark/{self.group.rank}", f"{base}/answer/{self.group.rank}"
        # longer than the first rank, which came at about the same time and answers all alike if it is there
        if not _poll(lambda: store.check([answer]), self.timeout_s + min(self.timeout_s, PICK_UP_S)):
            missing = [rank for rank in range(self.group.size) if not store.check([f"{base}/mark/{rank}"])]
            # Where the first rank has just taken it, an answer is on its way.
            if store.compare_set(mark, HERE, GONE) == GONE.encode():
                store.delete_key(mark)
                _take(store, f"{base}/given/{self.group.rank}")
                return self._missing(where, missing or [0])
            if not _poll(lambda: store.check([answer]), self.timeout_s):
                return self._missing(where, [0])
        return _take(store, answer)

    def _missing(self, where: str, missing: Sequence[int]) -> RankMismatchError:
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return RankMismatchError(
            f"{ranks} did not come within {self.timeout_s:g} s",
            where=where,
            why="every rank holds a part of the model, so all ranks of its group make this call together",
            remedy="call it on every rank (not only on rank 0); where ranks come late, pass a longer timeout_s",
        )


def _answers(given: list[Any], lead: Callable[[list[Any]], Sequence[Any]], where: str) -> Sequence[Any]:
    """Return the answers for all ranks: those of ``lead``, or an error."""
    error = next((one for one in given if isinstance(one, ZerofxError)), None)
    if error is None:
        try:
            return lead(given)
        except Exception as raised:
            error = _described(raised, where, 0)
            error.__cause__ = None if error is raised else raised
    return [error] * len(given)


def _described(error: Exception, where: str, rank: int) -> ZerofxError:
    """Return an error that every rank can raise."""
    if isinstance(error, ZerofxError):
        return error
    return CheckpointError(
        f"{type(error).__name__}: {error}",
        where=f"{where}, rank {rank}",
        why="the rank cannot go on, and the others do not go on without it",
        remedy="see what it says on that rank (a full disk, a directory that it may not write)",
    )


def _post(store: dist.Store, key: str, value: Any) -> None:
    content = pickle.dumps(value)
    parts = [content[start : start + PART_BYTES] for start in range(0, len(content), PART_BYTES)]
    for number, part in enumerate(parts):
        store.set(f"{key}/{number}", part)  # type: ignore[arg-type]  # it takes bytes, which its annotations do not say
    store.set(key, str(len(parts)))


def _take(store: dist.Store, key: str) -> Any:
    keys = [f"{key}/{number}" for number in range(int(store.get(key)))]
    content = b"".join(store.get(part) for part in keys)
    for used in (*keys, key):
        store.delete_key(used)
    return pickle.loads(content)


def _poll(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Ask until something is done, or the time is over. A wait inside of the store would keep other threads from it."""
    deadline, pause_s = time.monotonic() + timeout_s, 1e-4
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return True
