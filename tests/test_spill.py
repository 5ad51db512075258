"""Activations on disk: only where the memory limit needs it, the same training, and what happens when the disk fails."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerofx
from benchmarks.measure import allocated_bytes
from tests.peaks import GLOO, PEAK_TOLERANCE, Sending
from tests.programs import TiedStack, fake_ranks
from tests.ranks import Pool
from tests.reference import whole
from zerofx.config import Config
from zerofx.errors import ConfigError, MemoryLimitError, ZerofxError
from zerofx.plans import plan

GOLDEN = Path(__file__).parent / "golden"
_TOKENS = torch.arange(512).view(16, 32) % 300


def settings(directory: Path | None, limit_bytes: int | None, **changes: Any) -> dict[str, Any]:
    offload = None if directory is None else {"activations": f"disk:{directory}", "min_bytes": "4KiB"}
    return {"backend": "aot_eager", "offload": offload, "memory_limit_bytes": limit_bytes, **changes}


def peak_bytes(config: Config, layers: int) -> int:
    return plan(TiedStack(layers), (_TOKENS,), world_size=2, hardware=GLOO, optimize=False, config=config).step_peak_bytes


def disk_bytes(model: nn.Module) -> int:
    return zerofx.schedule(model).traffic_bytes.get("disk", 0)


def step_of(model: nn.Module) -> None:
    model.zero_grad()
    model(_TOKENS).backward()


def test_a_step_fits_the_limit_by_the_activations_that_are_idle_longest(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Planned bytes are those measured (the rest is scalars), and no more is on disk than is missing, plus one value."""
    layers, largest_bytes = 4, 16 * 32 * 4 * 64 * 4
    without = peak_bytes(Config(**settings(None, None)), layers)
    assert peak_bytes(Config(**settings(tmp_path, without)), layers) == without
    limit_bytes = int(0.7 * without)
    config = Config(**settings(tmp_path, limit_bytes))
    planned = plan(TiedStack(layers), (_TOKENS,), world_size=2, hardware=replace(GLOO, disk_bytes_per_s=0), optimize=False, config=config)
    with fake_ranks(2):
        model = zerofx.compile(TiedStack(layers), config=config)
        step_of(model)
        with Sending():
            measured = allocated_bytes(partial(step_of, model))
        text = str(zerofx.schedule(model)) + "\n"
    assert planned.step_peak_bytes == pytest.approx(measured, rel=PEAK_TOLERANCE)
    assert measured <= limit_bytes
    assert without - limit_bytes <= disk_bytes(model) <= without - limit_bytes + largest_bytes
    assert planned.traffic_bytes["disk"] == disk_bytes(model)
    slow = replace(GLOO, disk_bytes_per_s=1e8)
    took_s = plan(TiedStack(layers), (_TOKENS,), world_size=2, hardware=slow, optimize=False, config=config).seconds
    assert took_s - planned.seconds >= disk_bytes(model) / slow.disk_bytes_per_s  # nothing hides the writing
    path = GOLDEN / "spilled.txt"
    if request.config.getoption("rewrite_golden"):
        path.write_text(text)
    assert text == path.read_text()


def test_limits_and_settings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(MemoryLimitError, match="lie on disk") as caught:
        peak_bytes(Config(**settings(tmp_path, 1000)), 1)
    smallest_bytes = caught.value.smallest_bytes
    assert peak_bytes(Config(**settings(tmp_path, smallest_bytes)), 1) <= smallest_bytes
    with pytest.raises(ConfigError, match=r"takes no offload\.activations"):
        Config(offload="activations", backend="hooks")


def trained(rank: int, config: Config) -> tuple[nn.Module, list[Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zerofx.compile(TiedStack(2), config=config)
    optimizer, batches = torch.optim.SGD(model.parameters(), 0.1), (_TOKENS.roll(rank), _TOKENS.roll(rank + 2))
    for _ in range(2):
        optimizer.zero_grad()
        sum(model(batch) for batch in batches).backward()  # both are on disk at once
        optimizer.step()
        model(batches[0])  # nobody asks for its gradients
    return model, [whole(parameter) for parameter in model.parameters()]


def train_alike(rank: int, world: int, directory: Path, limits_bytes: dict[int, int]) -> list[str]:
    found = []
    _, expected = trained(rank, Config(**settings(None, None)))
    for stage, limit_bytes in limits_bytes.items():
        model, again = trained(rank, Config(**settings(directory, limit_bytes, stage=stage)))
        found += [] if all(map(torch.equal, again, expected)) else [f"stage {stage} differs"]
        found += [] if disk_bytes(model) else [f"stage {stage} writes nothing"]
        found += [f"{path}" for path in directory.iterdir()]
    return found


def test_training_is_the_same_bitwise(ranks: Pool, tmp_path: Path) -> None:
    plain = {stage: Config(**settings(None, None, stage=stage)) for stage in (1, 3)}
    limits = {stage: int(0.7 * peak_bytes(config, 2)) for stage, config in plain.items()}
    assert ranks.run(train_alike, 2, tmp_path, limits) == [[], []]


@contextmanager
def failing(call: str, number: int) -> Iterator[None]:
    with mock.patch(f"os.{call}", side_effect=OSError(number, os.strerror(number))):
        yield


def fail(rank: int, world: int, directory: Path, limit_bytes: int) -> list[str]:
    """The disk of one rank is full, then has space, then cannot be read. Returns what each says."""
    model, said = zerofx.compile(TiedStack(3), config=Config(**settings(directory, limit_bytes))), []
    before = [whole(parameter) for parameter in model.parameters()]
    for call, number in (("posix_fallocate", errno.ENOSPC), ("", 0), ("preadv", errno.EIO)):
        try:
            with failing(call, number) if call and rank == 1 else nullcontext():
                step_of(model)
            said.append("trained")
        except ZerofxError as error:
            said.append(f"{type(error).__name__}: {error.what}: {error.why}")
        if call != "preadv":
            said += [] if all(map(torch.equal, map(whole, model.parameters()), before)) else ["changed"]
    return said


def test_a_disk_that_fails_is_an_error_on_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    limit_bytes = int(0.7 * peak_bytes(Config(**settings(None, None)), 3))
    other, own = ranks.run(fail, 2, tmp_path, limit_bytes)
    assert own == [
        "OffloadError: activations found no space on disk: the system says: No space left on device",
        "trained",
        "OffloadError: activations could not be read from disk: the system says: Input/output error",
    ]
    assert other[1] == "trained"
    assert [text.partition(": rank 1")[0] for text in (other[0], other[2])] == ["RankMismatchError"] * 2


def test_what_can_be_computed_again_goes_to_disk_last(tmp_path: Path) -> None:
    layers = 4
    without = peak_bytes(Config(**settings(None, None)), layers)
    with pytest.raises(MemoryLimitError) as caught:
        peak_bytes(Config(**settings(None, without // 10, recompute="auto")), layers)
    least_bytes = caught.value.smallest_bytes
    for limit_bytes, is_on_disk in ((least_bytes, False), (int(0.98 * least_bytes), True)):
        config = Config(**settings(tmp_path, limit_bytes, recompute="auto"))
        planned = plan(TiedStack(layers), (_TOKENS,), world_size=2, hardware=GLOO, optimize=False, config=config)
        assert planned.step_peak_bytes <= limit_bytes
        assert ("disk" in planned.traffic_bytes and planned.traffic_bytes["disk"] > 0) == is_on_disk
