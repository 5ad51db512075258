"""Start the demo's ranks, or join those that a launcher started, and end them all together."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from datetime import timedelta
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import zerofx
from zerofx.demo import Options
from zerofx.demo.large import EXIT_OVER_LIMIT, train_large
from zerofx.demo.model import new_model, standard_library_text
from zerofx.demo.report import Report
from zerofx.demo.train import Rank, train_sharded, train_single

DEFAULT_NPROC = 2
STEPS = 60
EXIT_FAILED = 1
EXIT_DIFFERS = 3

# One rank may wait this long for another that is still compiling.
COLLECTIVE_TIMEOUT = timedelta(minutes=5)

COMPILE_NOTES = {
    "inductor": "the first step compiles: graphs are traced, the passes rewrite them, Inductor builds each distinct region in C++\n"
    "(about half a minute; a few seconds where Inductor's cache on disk has them)",
    "aot_eager": "the first step traces the graphs and runs the passes (a few seconds)",
}


def run(options: Options) -> int:
    """Run the demo in the ranks that exist, or in new ones; return the exit status.

    A launcher (torchrun) is known by RANK and WORLD_SIZE in the environment.
    """
    try:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return _join_launched(options)
        nproc = options.nproc or DEFAULT_NPROC
        return _train(options, Rank(0, 1, _device(0, 1))) if nproc == 1 else _start(options, nproc)
    except zerofx.ZerofxError as error:
        return _fail(str(error))


def _fail(message: str) -> int:
    print(f"zerofx demo: {message}", file=sys.stderr, flush=True)
    return EXIT_FAILED


def _join_launched(options: Options) -> int:
    try:
        index, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if options.nproc not in (None, world_size):
            return _fail(f"--nproc {options.nproc}, but the launcher started {world_size} ranks: leave --nproc out")
        local, local_size = int(os.environ.get("LOCAL_RANK", index)), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        rank = Rank(index, world_size, _device(local, local_size))
        if world_size > 1:
            dist.init_process_group(_communication(rank), timeout=COLLECTIVE_TIMEOUT)
    except ValueError as error:
        return _fail(f"RANK and WORLD_SIZE are set as if by torchrun, but the rest does not fit ({error}): use torchrun, or unset both")
    return _train(options, rank)


def _start(options: Options, nproc: int) -> int:
    """Start ``nproc`` ranks on this machine and wait for them; if one dies, end the others."""
    # A rank that is ended cannot tidy up after itself. Python does it instead; neither it nor torch need say so.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    complaints = mp.get_context("spawn").SimpleQueue()
    # Until a rank has said how it takes Ctrl-C (by dying, without a word) it must not take it at all.
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        context = mp.spawn(_started, (options, nproc, store.port, complaints), nprocs=nproc, join=False)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert context is not None
    try:
        while not context.join():
            pass
        return 0
    except mp.ProcessRaisedException as error:
        return _fail(f"rank {error.error_index} failed, so all ranks were ended\n{error.msg.strip()}")
    except mp.ProcessExitedException as error:
        if error.signal_name == "SIGINT":
            raise KeyboardInterrupt from None
        if error.exit_code in (EXIT_DIFFERS, EXIT_OVER_LIMIT):
            return error.exit_code
        if not complaints.empty():
            return _fail(complaints.get())
        how = f"was killed by {error.signal_name}" if error.signal_name else f"exited with status {error.exit_code}"
        return _fail(f"rank {error.error_index} {how}, so all ranks were ended")
    finally:
        for process in context.processes:
            process.kill()


def _started(index: int, options: Options, nproc: int, port: int, complaints: SimpleQueue[str]) -> None:
    """Be one of the ranks that ``_start`` started."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    rank = Rank(index, nproc, _device(index, nproc))
    store = dist.TCPStore("127.0.0.1", port, nproc, is_master=False)
    dist.init_process_group(_communication(rank), store=store, rank=index, world_size=nproc, timeout=COLLECTIVE_TIMEOUT)
    try:
        status = _train(options, rank)
    except zerofx.ZerofxError as error:
        complaints.put(str(error))
        status = EXIT_FAILED
    if status:
        sys.exit(status)


def _device(local_index: int, local_size: int) -> torch.device:
    """Return the accelerator of one rank where there is one for each, else the CPU, of which it takes its share of threads."""
    if torch.cuda.device_count() >= local_size:
        torch.cuda.set_device(local_index)
        return torch.device("cuda", local_index)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _cores() // local_size))
    return torch.device("cpu")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _communication(rank: Rank) -> str:
    return "nccl" if rank.device.type == "cuda" else "gloo"


def _train(options: Options, rank: Rank) -> int:
    """Train on one rank; on rank 0 also train without zerofx, and report. Returns the exit status."""
    text = standard_library_text()
    if options.params is not None:
        return train_large(options, rank, text)
    steps, start = options.steps or STEPS, time.perf_counter()
    model = zerofx.compile(new_model(rank.device), stage=options.stage, backend=options.backend)
    prepare_seconds = time.perf_counter() - start
    rank.say(f"stage {options.stage}, {rank.world_size} ranks on {rank.device.type}, {len(text) / 1e6:.1f} MB of Python source")
    rank.say(COMPILE_NOTES[options.backend])
    sharded, measured = train_sharded(rank, text, model, steps)
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank.index != 0:
        return 0
    rank.say("the same batches in one process, eagerly, without zerofx:")
    single = train_single(rank, text, steps)
    report = Report(zerofx.schedule(model), measured, sharded, single, prepare_seconds + sharded.excess_seconds)
    rank.say(f"\n{report}")
    if options.json_path is not None:
        options.json_path.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    return 0 if report.comparison.passed else EXIT_DIFFERS
