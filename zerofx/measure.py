"""What this processor and its link to other ranks do, measured within seconds by what runs in a training step."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from zerofx.groups import Group
from zerofx.machine import Link, Rates

# (rows, inner, columns): what blocks of widths 512 to 1024 multiply by; the first alone where it takes long.
_PRODUCTS = ((512, 512, 512), (1024, 512, 2048), (1024, 2048, 512), (512, 1024, 2048))
_LONG_S = 0.02
# How long, and how often, one thing is measured.
_LEAST_S, _MOST = 0.08, 200
_ATTENTION = (2, 4, 512, 64)  # rows, heads, length, head size
# Larger than any cache, as what a step reads has left the caches since it was written.
_MEMORY_BYTES = 64 * 2**20
_ELEMENTS = 2**18
_FUNCTIONS = ("exp", "erf", "log", "sin", "tanh")
_FRESH_BYTES = 48 * 2**20
_DISK_BYTES = 64 * 2**20
# Buckets, by the bytes of their whole tensors; and the time for one from which no larger one is tried.
_BUCKETS_BYTES = (2**13, 2**16, 2**19, 2**21, 2**23, 2**25)
_LONGEST_S = 0.5
_REPEATS, _FEW_REPEATS = 12, 3


def _time_s(run: Callable[[], Any], before: Callable[[], Any] | None = None) -> float:
    """Return the least seconds of a call, as what disturbs it only ever adds; each comes after another call, which does not count."""
    run()
    taken: list[float] = []
    while len(taken) < 3 or (sum(taken) < _LEAST_S and len(taken) < _MOST):
        if before is not None:
            before()
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _better(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return of each figure the better of two: the greater rate, the smaller time."""
    return {
        name: min(value, other[name]) if name.endswith("_s") and not name.endswith("per_s") else _most(value, other[name])
        for name, value in one.items()
    }


def _most(one: Any, other: Any) -> Any:
    """Return the greater of two numbers; of tuples of equal form, part by part."""
    if isinstance(one, tuple) and len(one) == len(other):
        return tuple(_most(mine, its) for mine, its in zip(one, other, strict=True))
    return max(one, other) if isinstance(one, int | float) else one


def processor() -> dict[str, Any]:
    """Measure this processor with the threads that torch uses; return the fields of Hardware that it sets. Takes about 12 s on one core.

    What disturbs a machine comes in spells: each figure is the better one of two times.
    """
    return _better(_processor_once(), _processor_once())


def _processor_once() -> dict[str, Any]:
    plain: list[tuple[str, float]] = []
    special: list[tuple[str, str, float]] = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        products = _products_flops_per_s(dtype)
        plain.append((name, max(products.values())))
        special += [(kind, name, rate) for kind, rate in {**products, **_attention_flops_per_s(dtype)}.items()]
    source, target = torch.ones(_MEMORY_BYTES // 4), torch.ones(_MEMORY_BYTES // 4)
    values, results, one = torch.rand(_ELEMENTS) + 0.1, torch.empty(_ELEMENTS), torch.ones(1)
    return {
        "flops_per_s": tuple(plain),
        "kernel_flops_per_s": tuple(special),
        "memory_bytes_per_s": 2 * _MEMORY_BYTES / _time_s(lambda: target.copy_(source)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "elements_per_s": tuple(
            (name, _ELEMENTS / _time_s(functools.partial(getattr(torch, name), values, out=results))) for name in _FUNCTIONS
        ),
        "launch_s": _time_s(lambda: one.add_(1)),
        "page_in_bytes_per_s": _page_in_bytes_per_s(),
        "disk_bytes_per_s": _disk_bytes_per_s(),
    }


def _disk_bytes_per_s() -> float:
    """Return how fast the disk under the temporary directory is read; 0 where nothing can be written there."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(os.urandom(2**20) * (_DISK_BYTES // 2**20))
            file.flush()
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            start = time.perf_counter()
            while file.read(2**22):
                pass
            return _DISK_BYTES / (time.perf_counter() - start)
    except (OSError, AttributeError):  # not every system can be told to forget a file
        return 0.0


def _products_flops_per_s(dtype: torch.dtype) -> dict[str, float]:
    """Return the rates of products, by which matrix lies transposed in memory."""
    rates, other = {}, torch.ones(_MEMORY_BYTES // 4)
    for kind, first, second in (("matmul", False, False), ("matmul_nt", False, True), ("matmul_tn", True, False)):
        flops, seconds = 0, 0.0
        for rows, inner, columns in _PRODUCTS:
            left, right = _matrix(rows, inner, dtype, transposed=first), _matrix(inner, columns, dtype, transposed=second)
            flops += 2 * rows * inner * columns
            bias = torch.ones(columns, dtype=dtype)
            # a forward's products add a bias, which is first written over the whole result
            product = functools.partial(torch.addmm, bias, left, right) if kind == "matmul_nt" else functools.partial(torch.mm, left, right)
            # a step finds its operands in memory: since they were written, the caches held other things
            seconds += _time_s(product, before=lambda: other.fill_(1.0))
            if seconds > _LONG_S and (rows, inner, columns) == _PRODUCTS[0]:
                break
        rates[kind] = flops / seconds
    return rates


def _matrix(rows: int, columns: int, dtype: torch.dtype, *, transposed: bool) -> Tensor:
    return torch.ones(columns, rows, dtype=dtype).t() if transposed else torch.ones(rows, columns, dtype=dtype)


def _attention_flops_per_s(dtype: torch.dtype) -> dict[str, float]:
    rows, heads, length, size = _ATTENTION
    flops = 4 * rows * heads * length * length * size
    query, key, value = (torch.randn(_ATTENTION, dtype=dtype, requires_grad=True) for _ in range(3))
    result = functional.scaled_dot_product_attention(query, key, value)
    grad = torch.ones_like(result)
    with torch.no_grad():
        forward_s = _time_s(lambda: functional.scaled_dot_product_attention(query, key, value))
    backward_s = _time_s(lambda: torch.autograd.grad(result, (query, key, value), grad, retain_graph=True))
    # the backward computes the scores again: five products where the forward has two
    return {"attention": flops / forward_s, "attention_backward": 2.5 * flops / backward_s}


def _page_in_bytes_per_s() -> float:
    """Return how fast new memory comes, beside writing to it."""
    standing = torch.empty(_FRESH_BYTES // 4)
    again_s = _time_s(lambda: standing.fill_(1.0))
    fresh_s = _time_s(lambda: torch.empty(_FRESH_BYTES // 4).fill_(1.0))
    return _FRESH_BYTES / max(fresh_s - again_s, 1e-9)


def link(group: Group, process_group: dist.ProcessGroup) -> Link:
    """Measure, together with all ranks of a gloo group, the link between them, by buckets of rising size as zerofx sends them.

    Every rank returns the same figures: those of the slowest. It stops at a size that takes long, so that it takes seconds on any link.
    """
    steps_s: dict[str, list[tuple[int, float]]] = {"all_gather": [], "all_to_all": []}
    cpu_s_per_byte = 0.0
    for whole_bytes in _BUCKETS_BYTES:
        count = group.transport.pieces if whole_bytes >= group.transport.split_bytes else 1
        elements = whole_bytes // 4 // group.size // count
        for kind, measured in steps_s.items():
            buffers = [_buffers(kind, elements, group.size) for _ in range(count)]
            repeats = _REPEATS if whole_bytes < group.transport.split_bytes else _FEW_REPEATS
            seconds, cpu_s = _together_s(functools.partial(_send, buffers, process_group), process_group, repeats)
            shard_bytes = elements * count * 4
            measured.append((shard_bytes, seconds / (group.size - 1)))
            cpu_s_per_byte = cpu_s / (shard_bytes * (group.size - 1))  # the largest bucket's, where waiting counts for little
        if seconds > _LONGEST_S:
            break
    latency_s = min(step_s for measured in steps_s.values() for _, step_s in measured)
    gather, exchange = (_rates(measured, latency_s) for measured in steps_s.values())
    return Link(latency_s, gather, exchange, cpu_s_per_byte)


def _buffers(kind: str, shard: int, world_size: int) -> tuple[str, Tensor, Tensor]:
    whole = torch.ones(shard * world_size)
    return (kind, whole, torch.ones(shard)) if kind == "all_gather" else (kind, whole, torch.ones_like(whole))


def _send(buffers: Sequence[tuple[str, Tensor, Tensor]], process_group: dist.ProcessGroup) -> None:
    works = [
        dist.all_gather_single(out, source, group=process_group, async_op=True)
        if kind == "all_gather"
        else dist.all_to_all_single(out, source, group=process_group, async_op=True)
        for kind, out, source in buffers
    ]
    for work in works:
        work.wait()


def _together_s(run: Callable[[], None], process_group: dist.ProcessGroup, repeats: int) -> tuple[float, float]:
    """Return the mean (seconds, processor seconds) of a call that all ranks make; those of the slowest rank.

    The mean, because a small collective takes either 0.2 ms or, where its thread waits for the core, a slice of the scheduler's.
    """
    run()
    taken = cpu = 0.0
    for _ in range(repeats):
        dist.barrier(group=process_group)
        start, cpu_start = time.perf_counter(), time.process_time()
        run()
        taken += time.perf_counter() - start
        cpu += time.process_time() - cpu_start
    slowest = torch.tensor([taken / repeats, cpu / repeats], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=process_group)
    seconds, cpu_s = slowest.tolist()
    return seconds, cpu_s


def _rates(measured: Sequence[tuple[int, float]], latency_s: float) -> Rates:
    """Return (bytes, bytes per second) beside the latency: seconds never fall as the size rises, and no rate is above the best seen."""
    best = max(size / step_s for size, step_s in measured)
    kept: list[tuple[float, float]] = []
    longest_s = 0.0
    for size, step_s in measured:
        longest_s = max(longest_s, step_s - latency_s, size / best)
        kept.append((size, size / longest_s))
    return tuple(kept)
