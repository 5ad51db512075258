"""Where the ranks of one model meet before they communicate: each meeting ends with one verdict, the same for every rank."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zerofx.errors import RankLostError
from zerofx.groups import Group

# How often a rank that compiles says so, as a part of the time that the others wait.
_BEATS = 4
# No collective of c10d uses this tag.
_PROBE_TAG = 2**30 - 1


@dataclass(frozen=True, slots=True)
class Meeting:
    """What each rank brought to a meeting where not all said the same, in rank order; None for one that did not come in time.

    ``last_seen`` is what each said last, and ``gone`` those among the missing that have no connection any more.
    """

    said: tuple[str | None, ...]
    last_seen: tuple[str | None, ...]
    gone: tuple[int, ...]


class Rendezvous:
    """Meetings of the ranks of one model, over the store that their process group was made with.

    The verdict on a meeting is one key of the store, written once: by the last rank to come, or by the first that waits no longer.
    So a rank that comes late learns that the others have given up, and all ranks go on in step. Nothing of it is a collective: a
    meeting is possible when the ranks are about to run different ones.
    """

    def __init__(self, process_group: Any, group: Group, timeout_s: float) -> None:
        self._process_group, self._backend = process_group, group.backend
        self._rank, self._size = group.rank, group.size
        self._timeout = timedelta(seconds=timeout_s)
        shared = process_group.get_group_store()
        # ranks start to train their models in the same order, copies included
        model = shared.add(f"zerofx/{group.rank}/models", 1)
        # a connection of its own: waiting here must not hold up another thread's use of the store
        self._store = dist.PrefixStore(f"zerofx/model {model}", shared.clone())
        self._store.set_timeout(self._timeout)
        self._count = 0
        self._decided = ""  # at the last meeting
        self._has_left = False

    def meet(self, text: str) -> Meeting | None:
        """Wait until all ranks are here; return None where all said the same.

        Raises RankLostError where the store is out of reach.
        """
        with self._reachable():
            return self._verdict() if self._arrive(text) else self._wait()

    def leave(self, text: str) -> None:
        """Tell the others something at their next meeting, without waiting for them. ``settle`` takes up what they said."""
        with self._reachable():
            self._arrive(text)
        self._has_left = True

    def settle(self) -> Meeting | None:
        """Wait for the end of the meeting that this rank left early; None where it left none, or all said the same."""
        if not self._has_left:
            return None
        self._has_left = False
        with self._reachable():
            return self._wait()

    def publish(self, key: str, text: str) -> None:
        """Let the others read a text by its key."""
        with self._reachable():
            self._store.set(f"text/{key}", text)

    def read(self, key: str) -> str:
        """Return a text that another rank published before it came to a meeting."""
        with self._reachable():
            return str(self._store.get(f"text/{key}").decode())

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Within, the others wait for this rank as long as it lives."""
        over = threading.Event()

        def beat() -> None:
            beats = 0
            while not over.wait(self._timeout.total_seconds() / _BEATS):
                beats += 1
                self._store.set(f"alive/{self._rank}", f"{self._count + 1} {beats}")

        thread = threading.Thread(target=beat, name="zerofx compiles", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    # ---------------------------------------------------------------- broken connections

    def conclude(self, text: str) -> str:
        """Say why no rank can communicate any more; return what the first rank that said so has said."""
        with self._reachable():
            return str(self._store.compare_set("over", "", text).decode())

    def disconnected(self) -> list[int]:
        """Return the ranks that no message can be sent to, in a group whose communication has failed; only gloo can tell."""
        return (
            [] if self._backend != "gloo" else [rank for rank in range(self._size) if rank != self._rank and not self._is_connected(rank)]
        )

    def _is_connected(self, rank: int) -> bool:
        try:
            # it is sent when the other asks for it, which it never does
            self._process_group.send([torch.zeros(1)], rank, _PROBE_TAG)
        except RuntimeError:
            return False
        return True

    def disconnect(self) -> None:
        """Close the connections of the process group, so that whoever waits for this rank stops waiting."""
        if self._backend != "gloo":
            self._process_group.abort()
            return
        with suppress(RuntimeError):
            # gloo's abort closes nothing (torch 2.13), but a receive that times out closes all connections
            self._process_group.recv([torch.zeros(1)], (self._rank + 1) % self._size, _PROBE_TAG).wait(timedelta(milliseconds=1))

    # ---------------------------------------------------------------- the store

    def _arrive(self, text: str) -> bool:
        """Come to the next meeting; return whether this rank was the last, and has given the verdict."""
        self._count += 1
        store, meeting, mark = self._store, self._count, zlib.crc32(text.encode()) >> 2
        store.set(f"at/{self._rank}", f"{meeting} {text}")
        # one number counts the ranks and adds up their marks: 16 and 46 bits
        total = store.add(f"{meeting}", 1 + (mark << 16))
        if total & 0xFFFF == 1 and meeting > 2:
            for key in (f"{meeting - 2}", f"{meeting - 2}/verdict"):
                store.delete_key(key)
        if total & 0xFFFF < self._size:
            return False
        agreed = total >> 16 == mark * self._size
        self._decided = store.compare_set(f"{meeting}/verdict", "", "same" if agreed else self._minutes()).decode()
        return True

    def _wait(self) -> Meeting | None:
        """Wait for the verdict, or give up and make it."""
        key, beats = f"{self._count}/verdict", dict[int, str]()
        while True:
            try:
                self._decided = self._store.get(key).decode()
                return self._verdict()
            except RuntimeError:  # a DistStoreError of a TCPStore; a FileStore raises its plain base
                if not self._shows_life(beats):
                    self._decided = self._store.compare_set(key, "", self._minutes()).decode()
                    return self._verdict()

    def _verdict(self) -> Meeting | None:
        return None if self._decided == "same" else Meeting(*map(tuple, json.loads(self._decided)))

    def _places(self) -> list[tuple[int, str | None]]:
        """Return the number of the last meeting that each rank came to, and what it said there."""
        found: list[tuple[int, str | None]] = []
        for rank in range(self._size):
            key = f"at/{rank}"
            number, _, text = self._store.get(key).decode().partition(" ") if self._store.check([key]) else ("0", "", None)
            found.append((int(number), text))
        return found

    def _minutes(self) -> str:
        places = self._places()
        here = [text if number == self._count else None for number, text in places]
        gone = self.disconnected() if None in here else []
        return json.dumps([here, [text for _, text in places], gone])

    def _shows_life(self, beats: dict[int, str]) -> bool:
        """Whether a rank that is missing has compiled since the last look."""
        lives = False
        for rank, (number, _) in enumerate(self._places()):
            key = f"alive/{rank}"
            if number < self._count and self._store.check([key]):
                beat = self._store.get(key).decode()
                lives |= beat.startswith(f"{self._count} ") and beat != beats.get(rank)
                beats[rank] = beat
        return lives

    def _reachable(self) -> AbstractContextManager[None]:
        return reachable(f"rank {self._rank}, meeting {self._count} of the ranks")


@contextmanager
def reachable(where: str) -> Iterator[None]:
    """Raises RankLostError where the store of the process group is used within and cannot be reached."""
    try:
        yield
    except dist.DistNetworkError as error:
        raise RankLostError(
            "the store of the process group is out of reach",
            where=where,
            why=f"the process that keeps it, mostly rank 0, is gone: {str(error).splitlines()[0]}",
            remedy="see the logs of that process; start the ranks again from the last checkpoint",
        ) from error
