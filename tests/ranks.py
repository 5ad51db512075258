"""Run one function on N gloo ranks, in worker processes that live as long as the test session.

Workers are forked from a server that has imported what they all need, so that a new one is there at once.

A call gets a fresh process group over a fresh store. A rank that raises is reported with its traceback, a rank that does not come back
in time is killed and reported as hung with the stack of each of its threads, and every worker that was not left clean is replaced.
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

TIMEOUT_S = 120.0
# How long the other ranks may go on after one rank has failed: long enough to compile up to the error they share.
GRACE_S = 45.0
# How long a failed rank is left alone before its death is used to wake the ranks that wait for it.
LINGER_S = 2.0
# What is imported before a worker answers for the first time is not part of the time of a test.
START_S = 120.0
# What takes long to import and most calls need. Nothing here starts a thread, which a fork would lose.
PRELOADED = ["pytest", "tests.stages", "torch._inductor.compile_fx", "torch.distributed.fsdp", "zerofx.backend", "zerofx.hooks"]

WarningFilter = tuple[Any, str, type[Warning], str, int]
RankFunction = Callable[..., Any]


@dataclass(frozen=True)
class Failure:
    """An exception of one rank, as plain data: the class may not unpickle, and must not be imported to be checked."""

    type_name: str
    bases: tuple[str, ...]
    text: str
    traceback: str
    parts: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(error: BaseException) -> "Failure":
        parts = {name: str(getattr(error, name)) for name in ("what", "where", "why", "remedy") if hasattr(error, name)}
        bases = tuple(base.__name__ for base in type(error).__mro__)
        return Failure(type(error).__name__, bases, str(error), "".join(traceback.format_exception(error)), parts)


@dataclass(frozen=True)
class Outcome:
    """What one rank gave: a value, or a failure. A hung rank has a failure whose type name is `Hang`."""

    rank: int
    value: Any = None
    failure: Failure | None = None


class RanksFailed(AssertionError):
    """At least one rank raised or hung; the message holds the tracebacks of all that did."""

    def __init__(self, function: RankFunction, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        failed = [outcome for outcome in outcomes if outcome.failure is not None]
        parts = [f"{function.__module__}.{function.__qualname__}: {len(failed)} of {len(outcomes)} ranks failed"]
        parts += [f"--- rank {outcome.rank}: {outcome.failure.traceback}" for outcome in failed if outcome.failure]
        super().__init__("\n".join(parts))


@dataclass(frozen=True)
class Call:
    """What a worker needs for its part of a call."""

    function: RankFunction
    arguments: tuple[Any, ...]
    rank: int
    world: int
    store: tuple[int, str] | None
    timeout_s: float


class Worker:
    """One spawned process that serves calls, its pipe, and the file its stacks are written to when it hangs."""

    def __init__(self, filters: Sequence[WarningFilter], environment: Mapping[str, str], *, forked: bool) -> None:
        context = multiprocessing.get_context("forkserver" if forked else "spawn")
        context.set_forkserver_preload([__name__, *PRELOADED])  # only read when the server starts
        self.connection, theirs = context.Pipe()
        descriptor, name = tempfile.mkstemp(prefix="rank-stacks-")
        os.close(descriptor)
        self.stacks = Path(name)
        self.process = context.Process(target=serve, args=(theirs, list(filters), name), daemon=True)
        with changed_environment(environment):
            # A spawned process inherits the environment, as the server does, and torch reads OMP_NUM_THREADS when it is imported.
            self.process.start()
        theirs.close()
        self.ready = False

    def await_ready(self) -> None:
        if not self.ready:
            if not self.connection.poll(START_S):
                raise RuntimeError(f"a rank's process did not start within {START_S:g} s")
            self.connection.recv_bytes()
            self.ready = True

    def stack_text(self) -> str:
        """Ask the hung process for the stacks of its threads."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            time.sleep(0.3)
        return self.stacks.read_text()

    def kill(self) -> None:
        if self.connection.closed:
            return
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.stacks.unlink(missing_ok=True)


class Pool:
    """Workers kept for the session, started when a call first needs them.

    What the server of forked workers imported was imported in the first pool's environment: a pool for which another one must count
    from the start says ``forked=False``.
    """

    def __init__(self, filters: Sequence[WarningFilter] = (), environment: Mapping[str, str] | None = None, *, forked: bool = True) -> None:
        self._filters = list(filters)
        self._forked = forked
        self._environment = dict(environment or {})
        self._workers: list[Worker] = []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._calls = count()

    def run(self, function: RankFunction, world: int, *arguments: Any, group: bool = True, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Run `function(rank, world, *arguments)` on every rank and return the values by rank; raise RanksFailed otherwise."""
        outcomes = self.outcomes(function, world, *arguments, group=group, timeout_s=timeout_s)
        if any(outcome.failure for outcome in outcomes):
            raise RanksFailed(function, outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, function: RankFunction, world: int, *arguments: Any, group: bool = True, timeout_s: float = TIMEOUT_S
    ) -> list[Outcome]:
        """Like `run`, for tests of errors: an outcome for each rank, failed or not."""
        workers = self._take(world)
        store = (self._store.port, f"call-{next(self._calls)}") if group else None
        calls = [pickle.dumps(Call(function, arguments, rank, world, store, timeout_s)) for rank in range(world)]
        for worker, call in zip(workers, calls, strict=True):
            worker.connection.send_bytes(call)
        outcomes = collect(workers, timeout_s)
        for worker, outcome in zip(workers, outcomes, strict=True):
            if outcome.failure is None:
                worker.connection.send_bytes(b"leave the group")
            else:
                # A failed rank may have left threads, half-open connections or compiler state behind.
                self._workers.remove(worker)
                worker.kill()
        return outcomes

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _take(self, world: int) -> list[Worker]:
        while len(self._workers) < world:
            self._workers.append(Worker(self._filters, self._environment, forked=self._forked))
        workers = self._workers[:world]
        for worker in workers:
            worker.await_ready()
        return workers


def collect(workers: Sequence[Worker], timeout_s: float) -> list[Outcome]:
    """Wait for all workers until the deadline, which comes nearer once one of them has failed."""
    outcomes: dict[int, Outcome] = {}
    started = time.monotonic()
    deadline = started + timeout_s
    while len(outcomes) < len(workers) and time.monotonic() < deadline:
        failed = [rank for rank, outcome in outcomes.items() if outcome.failure and not workers[rank].connection.closed]
        pending = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in outcomes}
        answered = wait(list(pending), timeout=min(LINGER_S if failed else timeout_s, max(0.0, deadline - time.monotonic())))
        if not answered:
            # Its death closes the connections that the others may wait on.
            for rank in failed:
                workers[rank].kill()
        for connection in answered:
            assert isinstance(connection, Connection)
            rank = pending[connection]
            outcomes[rank] = receive(workers[rank], rank)
            if outcomes[rank].failure is not None:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    elapsed_s = time.monotonic() - started
    return [outcomes.get(rank) or hung(worker, rank, elapsed_s) for rank, worker in enumerate(workers)]


def hung(worker: Worker, rank: int, elapsed_s: float) -> Outcome:
    text = f"rank {rank} did not return within {elapsed_s:.0f} s"
    return Outcome(rank, failure=Failure("Hang", ("Hang",), text, f"{text}; it was in\n{worker.stack_text()}"))


def receive(worker: Worker, rank: int) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.process.join(10)
        text = f"rank {rank} died with exit code {worker.process.exitcode}"
        outcome = Outcome(rank, failure=Failure("Died", ("Died",), text, f"{text}\n{worker.stacks.read_text()}"))
    return outcome


def serve(connection: Connection, filters: Sequence[WarningFilter], stacks: str) -> None:
    """The life of a worker: answer calls until the pipe closes."""
    with open(stacks, "w") as stacks_file:
        faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
        faulthandler.enable(stacks_file)
        torch.set_num_threads(1)
        # What is imported stays: the collector, which runs after every call, need not look at it again.
        gc.freeze()
        connection.send_bytes(b"ready")
        with suppress(EOFError):
            while True:
                answer(connection, pickle.loads(connection.recv_bytes()), filters)


def answer(connection: Connection, call: Call, filters: Sequence[WarningFilter]) -> None:
    random_state = torch.get_rng_state()
    with changed_environment({}):
        try:
            with warnings.catch_warnings():
                for warning_filter in filters:
                    warnings.filterwarnings(*warning_filter)
                join_group(call)
                value = call.function(call.rank, call.world, *call.arguments)
            connection.send_bytes(pickle.dumps(Outcome(call.rank, value)))
        except BaseException as error:
            connection.send_bytes(pickle.dumps(Outcome(call.rank, failure=Failure.of(error))))
        # Nobody closes its connections while another rank still waits for a message.
        connection.recv_bytes()
        leave_group()
    torch.set_rng_state(random_state)


def join_group(call: Call) -> None:
    if call.store is not None:
        port, prefix = call.store
        store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False))
        # Longer than the parent waits, so that a hang is always seen as a hang and never as an error of gloo.
        timeout = timedelta(seconds=2 * call.timeout_s)
        dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.world, timeout=timeout)


def leave_group() -> None:
    """Leave the process as the next call wants to find it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    torch._dynamo.reset()
    # Results of DTensor's sharding rules are cached by mesh, and meshes over equal ranks compare equal: without this a call
    # would meet tensors of an earlier call's dead process group.
    _clear_sharding_prop_cache()
    gc.collect()


@contextmanager
def changed_environment(changes: Mapping[str, str]) -> Iterator[None]:
    saved = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
