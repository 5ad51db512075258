"""Start one process a rank on a link, each pinned to a core with one thread, and end them all together."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.link import Link
from zerofx.errors import ZerofxError

_TREE = Path(__file__).parent.parent
_POLL_S = 0.1
_TAIL_LINES = 15
# A rank may wait this long for another that is still compiling.
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


class RankError(ZerofxError):
    """A rank did not finish; all others were ended."""


def on_link(function: Callable[..., Any], link: Link, world_size: int, *arguments: Any, timeout_s: float = 7200) -> list[Any]:
    """Run ``function(link, *arguments)`` on gloo ranks; return what each rank returns. The function must be importable.

    Raises RankError, with the end of that rank's stderr, where one dies or the time is up; within seconds none is alive.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as ending:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps((_name(function), link, world_size, arguments)))
        previous = signal.signal(signal.SIGTERM, _interrupt) if threading.current_thread() is threading.main_thread() else None
        ending.callback(lambda: signal.signal(signal.SIGTERM, previous) if previous is not None else None)
        processes: list[subprocess.Popen[bytes]] = []
        ending.callback(_end, processes)
        for rank in range(world_size):
            processes.append(_start(folder, rank, link))
        _wait(processes, folder, timeout_s)
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world_size)]


def _name(function: Callable[..., Any]) -> tuple[str, str]:
    """Name a function so that another process finds it, also where this one runs its module as a script."""
    module = function.__module__
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return (spec.name if module == "__main__" and spec is not None else module), function.__qualname__


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _start(folder: Path, rank: int, link: Link) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of compiling processes would share the rank's core
        "GLOO_SOCKET_IFNAME": link.interface,
    }
    command = [*link.command(rank), sys.executable, "-m", "benchmarks.ranks", str(folder), str(rank)]
    with open(folder / f"stderr{rank}", "wb") as stderr:
        # rank 0 says how far it is; the pipe's end tells a rank that this process is gone
        stdout = 2 if rank == 0 else stderr
        return subprocess.Popen(command, env=environment, cwd=_TREE, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        # a rank whose neighbour died fails too, a moment later: blame one that a signal ended, else the first
        failed = sorted((process.returncode > 0, rank) for rank, process in enumerate(processes) if process.poll())
        if failed:
            raise _error(failed[0][1], processes[failed[0][1]].returncode, folder)
        if time.monotonic() > deadline:
            rank = next(rank for rank, process in enumerate(processes) if process.poll() is None)
            raise _error(rank, None, folder, f"did not finish within {timeout_s:.0f} s")
        time.sleep(_POLL_S)
    for rank, process in enumerate(processes):
        if process.returncode:
            raise _error(rank, process.returncode, folder)


def _error(rank: int, status: int | None, folder: Path, how: str = "") -> RankError:
    if status is not None:
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    tail = (folder / f"stderr{rank}").read_text(errors="replace").strip().splitlines()[-_TAIL_LINES:]
    why = "\n    ".join(["the end of its stderr:", *tail]) if tail else "it wrote nothing to stderr"
    return RankError(f"rank {rank} {how}, so all ranks were ended", where="benchmarks", why=why)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def say(text: str) -> None:
    """Tell the user how far a run is. Only rank 0 is heard."""
    print(text, flush=True)


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def main(folder: Path, rank: int) -> None:
    """Be one rank: join the others, run the call, leave the result."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    (module, name), link, world_size, arguments = pickle.loads((folder / "call").read_bytes())
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=_COLLECTIVE_TIMEOUT)
    function = getattr(importlib.import_module(module), name)
    result = function(link, *arguments)
    (folder / f"result{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by the usual way out, on which threads of gloo groups that a library left open now and then abort the process.
    os._exit(0)


if __name__ == "__main__":
    if int(sys.argv[2]) != 0:
        sys.stdout = sys.stderr
    main(Path(sys.argv[1]), int(sys.argv[2]))
