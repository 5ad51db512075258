"""What is kept for the backward in another form comes back as it was."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zerofx
from benchmarks.measure import allocated_bytes
from tests.peaks import GLOO, PEAK_TOLERANCE, Sending
from tests.programs import fake_ranks
from tests.ranks import Pool
from tests.reference import whole
from zerofx.config import Config
from zerofx.errors import ConfigError, ShardingError
from zerofx.plans import plan

GOLDEN = Path(__file__).parent / "golden"


class Enter(torch.autograd.Function):
    """The identity, whose gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return functional.all_reduce(grad, "sum", ctx.group), None


class Leave(torch.autograd.Function):
    """The sum over the group, whose gradient is what it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return functional.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Block(nn.Module):
    """An MLP cut over a group as Megatron's: the first matrix by rows, the second by columns (Shoeybi et al., 2019, section 3)."""

    def __init__(self, width: int, group: str, ranks: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width // ranks)
        self.down = nn.Linear(4 * width // ranks, width, bias=False)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(Enter.apply(self.norm(x), self.group)))
        return x + Leave.apply(self.down(hidden), self.group)


class TensorParallel(nn.Module):
    def __init__(self, width: int, mesh: DeviceMesh, layers: int = 2, offset: float = 0.0) -> None:
        super().__init__()
        group = mesh.get_group().group_name
        self.first, self.last, self.offset = nn.Linear(width, width), nn.Linear(width, 2), offset
        self.h = nn.ModuleList([Block(width, group, mesh.size()) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.offset
        for block in self.h:
            x = block(x)
        return self.last(x).square().mean()


def device_mesh() -> DeviceMesh:
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def trained(mesh: DeviceMesh, settings: dict[str, Any] | None, batch: Tensor) -> list[Tensor]:
    """Train three steps, as plain torch does without settings; return this rank's part of the model."""
    model, rank = TensorParallel(8, mesh["tp"]), mesh["tp"].get_local_rank()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        values = torch.randn([2 * size if _is_cut(name, dim) else size for dim, size in enumerate(parameter.shape)]) / 4
        for dim in range(values.ndim):
            values = values.chunk(2, dim)[rank] if _is_cut(name, dim) else values
        parameter.data.copy_(values)
    if settings is not None:
        zerofx.compile(model, mesh=mesh["dp"], config=Config(backend="aot_eager", **settings))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    torch._dynamo.reset()
    return [whole(parameter) if settings is not None else parameter.detach() for parameter in model.parameters()]


def _is_cut(name: str, dim: int) -> bool:
    return ("up" in name and dim == 0) or ("down" in name and dim == 1)


def partitioned(rank: int, world: int) -> list[str]:
    torch.manual_seed(7)
    mesh, batch, found = device_mesh(), torch.randn(8, 8), []
    mine = batch.chunk(2)[mesh["dp"].get_local_rank()]
    plain, expected = trained(mesh, None, batch), trained(mesh, {"recompute": "blocks"}, mine)
    # the halves of the batch are averaged: another order of sums
    if not all(torch.allclose(*pair, rtol=1e-6, atol=1e-6) for pair in zip(expected, plain, strict=True)):
        found.append("zerofx beside tensor parallelism")
    partition = {"recompute": "blocks", "partition_activations": mesh["tp"]}
    for settings in ({"stage": 3}, {"stage": 1, "prefetch_buckets": 0}):
        if not all(map(torch.equal, trained(mesh, {**partition, **settings}, mine), expected)):
            found.append(f"{settings}")
    for stage, times in ((1, 2), (3, 1)):  # at stage 1 a caller may go on, and is told again
        model = TensorParallel(8, mesh["tp"], offset=float(rank))
        differing = zerofx.compile(model, mesh=mesh["dp"], config=Config(backend="aot_eager", stage=stage, **partition))
        for _ in range(times):
            try:
                differing(mine)
            except ShardingError as error:
                found.append(error.what)
    return found


def test_partitioned_activations_equal_whole_ones_bitwise(ranks: Pool) -> None:
    """On data and tensor parallel ranks, which equal plain torch; what is not the same on all ranks is refused."""
    refused = "the input of h.0 is not the same on all ranks of partition_activations"
    assert ranks.run(partitioned, 4) == [[refused] * 3] * 4


def step_of(model: nn.Module, batch: Tensor) -> None:
    model.zero_grad()
    model(batch).backward()


def test_partitioned_activations_are_planned(request: pytest.FixtureRequest) -> None:
    """Planned bytes are those measured (the rest is scalars), and the schedule prints what moves."""
    batch, width, layers, ranks = torch.randn(1024, 128), 128, 5, 2
    with fake_ranks(4):
        mesh = device_mesh()
        without = Config(backend="aot_eager", recompute="blocks")
        config = replace(without, partition_activations=mesh["tp"])
        plans = [
            plan(TensorParallel(width, mesh["tp"], layers), (batch,), world_size=2, hardware=GLOO, optimize=False, config=found)
            for found in (without, config)
        ]
        model = zerofx.compile(TensorParallel(width, mesh["tp"], layers), mesh=mesh["dp"], config=config)
        step_of(model, batch)
        with Sending():
            measured = allocated_bytes(partial(step_of, model, batch))
        assert plans[1].step_peak_bytes == pytest.approx(measured, rel=PEAK_TOLERANCE)
        kept_bytes = layers * batch.nbytes
        assert plans[1].traffic_bytes["restore"] == kept_bytes * (ranks - 1) // ranks
        # the backward begins with two of them whole, and one more, of which the parts are still there, on its way
        saved_bytes = plans[0].step_peak_bytes - plans[1].step_peak_bytes
        assert saved_bytes == (kept_bytes - 4 * batch.nbytes) * (ranks - 1) // ranks
        text = str(zerofx.schedule(model)) + "\n"
    path = GOLDEN / "partitioned.txt"
    if request.config.getoption("rewrite_golden"):
        path.write_text(text)
    assert text == path.read_text()


def test_settings_that_cannot_be() -> None:
    with fake_ranks(4):
        mesh = device_mesh()
        with pytest.raises(ConfigError, match="without recompute"):
            Config(partition_activations=mesh["tp"])
        with pytest.raises(ConfigError, match="no 1-D DeviceMesh"):
            Config(partition_activations=mesh, recompute="blocks")
        with pytest.raises(ConfigError, match="takes no partition_activations"):
            Config(partition_activations=mesh["tp"], recompute="blocks", backend="hooks")
        with pytest.raises(ConfigError, match="cannot be in a file"):
            Config(partition_activations=mesh["tp"], recompute="blocks").to_toml()
