"""Save a sharded model with all that training needs, and load it into any world size and stage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.optim import Optimizer

from zerofx import _torch, huggingface, restore, states, storage
from zerofx.consensus import Consensus
from zerofx.module import runtime_of
from zerofx.random_state import random_state, set_random_state
from zerofx.restore import Misfits
from zerofx.runtime import Runtime
from zerofx.states import Owners

T = TypeVar("T")

TIMEOUT_S = 600.0
MODEL, EXTRA, RANKS = "model.", "zerofx.extra", "zerofx.ranks."


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optim: Optimizer | Iterable[Optimizer] | None = None,
    *,
    asynchronous: bool = False,
    timeout_s: float = TIMEOUT_S,
    **extra: Any,
) -> Future[None]:
    """Save a compiled model, its optimizers, the random state of every rank, and extras, into a directory.

    All ranks of the model call it together, between steps; each writes its own shards. What was saved at ``path`` before stays what
    loads until all of the new files are on disk, whenever a process dies. With ``asynchronous``, it returns once all is copied, and
    writes in a thread: ``result()`` of the future waits for it and raises what went wrong, and the next save of the model waits too.
    ``extra`` are numbers, text, tensors and containers of them, or what has a ``state_dict`` (schedulers, a scaler); rank 0's are kept.
    The files are those of ``torch.distributed.checkpoint``, under ``{"model": ..., "optim": ...}`` with qualified names.

    Raises ShardingError for a model that was not compiled; CheckpointError for what cannot be saved or written; RankMismatchError
    where a rank has not come ``timeout_s`` seconds after this one. All ranks raise alike, and what was saved before is intact.
    """
    runtime: Runtime = runtime_of(model)
    if runtime.saving is not None:
        wait([runtime.saving])
    where = f"zerofx.save({os.fspath(path)!r})"
    steps = Consensus(runtime.group.name, runtime.group, timeout_s)
    planner, writer = DefaultSavePlanner(), storage.Writer(path)

    def look() -> tuple[tuple[Owners, Tensor], dict[str, int]]:
        if runtime.disk is not None:
            runtime.disk.settle()
        return (Owners.of(model, optim), states.packed_extras(extra)), states.digests(_buffers(model))

    (owners, extras), of_first = steps.step(where, look, lambda digests: [digests[0]] * len(digests))

    def plan() -> tuple[None, SavePlan]:
        state = _state_of_rank(owners, extras, of_first, runtime)
        planner.set_up_planner(states.copied(state) if asynchronous else state, writer.storage_meta(), runtime.group.rank == 0)
        writer.set_up_storage_writer(runtime.group.rank == 0)
        return None, writer.prepare_local_plan(planner.create_local_plan())

    _, planned = steps.step(where, plan, lambda plans: writer.prepare_global_plan(planner.create_global_plan(plans)[0]))
    final = planner.finish_plan(planned)
    # What follows may run beside other calls, so its step has a name of its own.
    rest = replace(steps, name=f"{steps.name}/{final.storage_data.prefix[: storage.ID_LENGTH]}")

    def write() -> None:
        rest.step(where, lambda: (None, writer.write_data(final, planner).value()), commit)

    def commit(results: list[Any]) -> list[None]:
        writer.finish(planner.metadata, results)
        return [None] * len(results)

    executor = ThreadPoolExecutor(1, thread_name_prefix="zerofx-save")
    runtime.saving = executor.submit(write)
    executor.shutdown(wait=not asynchronous)
    if not asynchronous:
        runtime.saving.result()
    return runtime.saving


def _state_of_rank(owners: Owners, extras: Tensor, of_first: dict[str, int], runtime: Runtime) -> dict[str, Any]:
    """Return what this rank adds to a checkpoint: the first one everything but the shards of others, the others their own."""
    group, state, buffers = runtime.group, states.taken(owners), _buffers(owners.model)
    own = {name: buffers[name].clone() for name, digest in states.digests(buffers).items() if digest != of_first.get(name)}
    kept = {"random": random_state(_device(runtime)), "buffers": own}
    state = state if group.rank == 0 else states.shards_of(state)
    return {**state, "zerofx": {"ranks": {str(group.rank): states.packed(kept)}, **({} if group.rank else {"extra": extras})}}


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optim: Optimizer | Iterable[Optimizer] | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Load what ``save`` wrote into a compiled model and its optimizers, of any world size and stage; return the extras.

    Also loads what other programs saved by ``torch.distributed.checkpoint`` as ``{"model": ..., "optim": ...}`` with the state dicts of
    ``torch.distributed.checkpoint.state_dict`` (FSDP2, DDP). All ranks call it together; each reads what its shards need. Without
    ``optim``, the optimizers' state stays in the file. At the world size of the save, every rank's random state and own buffers come back;
    at others, the buffers are rank 0's and the random state stays. Extras come back as plain data: pass them to ``load_state_dict``.
    No code of the files is executed.

    Raises CheckpointError, on all ranks and before anything has changed, for files that are missing, damaged or of a later format, and
    for keys that are missing, unexpected or of a wrong shape; ShardingError for a model that was not compiled; RankMismatchError
    where a rank has not come ``timeout_s`` seconds after this one.
    """
    runtime: Runtime = runtime_of(model)

    def read() -> tuple[tuple[Owners, dict[str, Any], list[dict[str, Any]], dict[str, Any]], None]:
        owners, reader, misfits = Owners.of(model, optim), storage.Reader(path), Misfits()
        metadata = reader.read_metadata()
        entries = metadata.state_dict_metadata
        own = f"{RANKS}{runtime.group.rank}"
        is_same_size = sum(key.startswith(RANKS) for key in entries) == runtime.group.size
        beside = [EXTRA, own] if is_same_size else [EXTRA]
        targets = restore.model_targets(owners, entries, MODEL, misfits)
        targets |= restore.optimizer_targets(owners, entries, misfits) | restore.packed_targets(beside, entries)
        misfits.check(path)
        values = storage.read(reader, metadata, targets)
        of_model, of_optimizers = restore.model_state(owners, values, MODEL), restore.optimizer_states(owners, values, misfits)
        misfits.check(path)
        plain = {key: states.unpacked(values[key]) for key in beside if key in values}
        return (owners, of_model, of_optimizers, {"extra": plain.get(EXTRA, {}), **plain.get(own, {})}), None

    (owners, of_model, of_optimizers, beside), _ = _together(f"zerofx.load({os.fspath(path)!r})", runtime, timeout_s, read)
    model.load_state_dict(of_model)
    for optimizer, state in zip(owners.optimizers, of_optimizers, strict=True):
        optimizer.load_state_dict(state)
    buffers = _buffers(model)
    with torch.no_grad():
        for name, value in beside.get("buffers", {}).items():
            buffers[name].copy_(value)
    if "random" in beside:
        set_random_state(beside["random"], _device(runtime))
    extras: dict[str, Any] = beside["extra"]
    return extras


def load_safetensors(
    path: str | os.PathLike[str], model: nn.Module, *, strict: bool = True, timeout_s: float = TIMEOUT_S
) -> tuple[list[str], list[str]]:
    """Load a safetensors file, or a directory of them as Hugging Face models have, into a compiled model; each rank reads its shards.

    Keys are those of ``model.state_dict()``; a tied parameter may be under one of its names. All ranks call it together. Returns the
    missing and the unexpected keys, which are errors unless ``strict`` is False. Needs the ``safetensors`` package.

    Raises CheckpointError, on all ranks and before anything has changed, for files that are missing or damaged, and keys that do not fit;
    ShardingError for a model that was not compiled; RankMismatchError where a rank has not come ``timeout_s`` seconds after this one.
    """
    runtime: Runtime = runtime_of(model)

    def read() -> tuple[tuple[dict[str, Any], Misfits], None]:
        owners, misfits = Owners.of(model, None), Misfits()
        reader, metadata = huggingface.weights(path)
        targets = restore.model_targets(owners, metadata.state_dict_metadata, "", misfits)
        misfits.check(path, {restore.MISSING, restore.UNEXPECTED} if not strict else set())
        return (restore.model_state(owners, storage.read(reader, metadata, targets), ""), misfits), None

    (state, misfits), _ = _together(f"zerofx.load_safetensors({os.fspath(path)!r})", runtime, timeout_s, read)
    model.load_state_dict(state, strict=False)
    return misfits.found.get(restore.MISSING, []), misfits.found.get(restore.UNEXPECTED, [])


def _together(where: str, runtime: Runtime, timeout_s: float, read: Callable[[], tuple[T, None]]) -> tuple[T, Any]:
    """Read on every rank; where one cannot, none returns."""
    return Consensus(runtime.group.name, runtime.group, timeout_s).step(where, read, lambda given: given)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict holds."""
    kept = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _device(runtime: Runtime) -> torch.device:
    return _torch.local_tensor(runtime.tensors[0]).device
