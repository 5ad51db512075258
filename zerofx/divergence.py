"""What to say when ranks part: from where each of them is to one error, the same on all. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerofx.errors import RankLostError, RankMismatchError, ZerofxError

TRAINING, KEEPING, EVALUATION, BACKWARD = "training forward", "forward under no_sync", "forward without gradients", "backward"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is when it comes to a meeting, and what it would run: the key of a unit, and whether its phase ends with that.

    ``joined`` has a bit for each unit of the phase so far, set where the rank only took part in it.
    """

    model: str
    phase: str
    forward: int
    backward: int
    unit: str
    is_last: bool
    joined: int
    failure: str

    @property
    def name(self) -> str:
        count = f"{self.backward} after forward {self.forward}" if self.phase == BACKWARD else f"{self.forward}"
        return f"{self.phase} {count}"

    def to_text(self) -> str:
        return json.dumps([self.model, self.phase, self.forward, self.backward, self.unit, self.is_last, self.joined, self.failure])

    @staticmethod
    def of_text(text: str | None) -> Place | None:
        return None if text is None else Place(*json.loads(text))


def parted(
    places: Sequence[Place | None],
    last_seen: Sequence[Place | None],
    gone: Sequence[int],
    timeout_s: float,
    first_of: Callable[[str], str],
) -> ZerofxError | None:
    """Return why ranks cannot go on together, None where they can; ``first_of`` describes where a unit begins."""
    here = {rank: place for rank, place in enumerate(places) if place is not None}
    rank, place = next(iter(here.items()))
    missing = [rank for rank in range(len(places)) if rank not in here]
    if gone:
        return lost(gone, place.name, place.model, f"it did not come within {timeout_s:g} s")
    if missing:
        return _absent(missing, last_seen, rank, place, timeout_s, first_of)
    other, there = next(((other, there) for other, there in here.items() if there.model != place.model), (rank, place))
    if other != rank:
        return RankMismatchError(
            f"rank {rank} runs {place.model}, rank {other} runs {there.model}",
            where=f"rank {rank}: {place.name}; rank {other}: {there.name}",
            why="each rank counts its models in the order in which they first run, and these meet as the same one",
            remedy="run the same models in the same order on every rank",
        )
    other, there = next(((other, there) for other, there in here.items() if there.failure), (rank, place))
    if there.failure:
        return failed(other, there.name, there.model, there.failure)
    other, there = next(((other, there) for other, there in here.items() if there.name != place.name), (rank, place))
    if other != rank:
        return RankMismatchError(
            f"rank {rank} is in {place.name}, rank {other} is in {there.name}",
            where=f"{place.model}: rank {rank} before {first_of(place.unit)}, rank {other} before {first_of(there.unit)}",
            why="one of them left out a forward or a backward, or ran one more; nothing of this was communicated",
            remedy="call forward and backward equally often on every rank, also for a loss that you would skip on one of them",
        )
    return None


def failed(rank: int, name: str, model: str, failure: str, *, can_go_on: bool = True) -> ZerofxError:
    """Return the error of the others when one rank has raised."""
    on = "all ranks can go on with the next forward" if can_go_on else "the process group cannot be used again: start from a checkpoint"
    return RankMismatchError(
        f"rank {rank} {failure}",
        where=f"{model}, {name} of rank {rank}",
        why="the other ranks need its part of what is computed there",
        remedy=f"see the error of rank {rank}; {on}",
    )


def lost(ranks: Sequence[int], name: str, model: str, reason: str) -> ZerofxError:
    """Return the error of the ranks that are left when others are gone."""
    return RankLostError(
        f"{_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} gone",
        where=f"{model}, {name}",
        why=f"its connections are closed: {reason.partition('. ')[0][:200]}",
        remedy="see the logs of what is gone; the process group cannot be used again: start from a checkpoint",
    )


def _absent(
    missing: Sequence[int],
    last_seen: Sequence[Place | None],
    rank: int,
    place: Place,
    timeout_s: float,
    first_of: Callable[[str], str],
) -> ZerofxError:
    before = [f"rank {other} was last in {'no forward' if (seen := last_seen[other]) is None else seen.name}" for other in missing]
    return RankMismatchError(
        f"{_ranks(missing)} did not come to {place.name} within {timeout_s:g} s",
        where=f"{place.model}, rank {rank} before {first_of(place.unit)}",
        why=f"{'; '.join(before)}: it made fewer calls, is slower than that, or is gone; nothing of this was communicated",
        remedy="call forward and backward equally often on every rank; where one may be slow, pass Config(timeout_s=...)",
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
