"""Every contestant: a name, and how a rank builds it. All train the same model on the same data with the same optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks import peer_deepspeed, peer_fsdp2
from benchmarks.workloads import Workload
from zerofx.config import HookLimits

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def sgd(params: Iterable[nn.Parameter]) -> Optimizer:
    """Make the optimizer of the timings. Its rate moves the loss enough in five steps to show a wrong gradient."""
    return torch.optim.SGD(params, 0.5)


def adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    """Make an optimizer with states, for the memory figures."""
    return torch.optim.AdamW(params, 1e-3)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contestants have in common."""

    workload: Workload
    dtype: torch.dtype
    make_optimizer: MakeOptimizer = sgd

    def model(self) -> nn.Module:
        """Build the model, the same on every rank and for every contestant."""
        torch.manual_seed(0)
        return self.workload.build()

    @property
    def precision(self) -> torch.dtype | None:
        """The dtype to compute and communicate in, where it is not the parameters' own."""
        return None if self.dtype is torch.float32 else self.dtype


@dataclass(frozen=True, slots=True)
class Trainer:
    """A model on one rank: ``compute`` runs forward and backward and returns the loss, ``update`` steps and clears gradients."""

    model: nn.Module
    optimizer: Optimizer
    compute: Callable[[Tensor], Tensor]
    update: Callable[[], None]
    # Steps after which its loss still is that of data-parallel training.
    comparable_steps: int = 5

    def step(self, batch: Tensor) -> Tensor:
        """Train one batch; return the loss."""
        loss = self.compute(batch)
        self.update()
        return loss


Build = Callable[[Setting], Trainer]


def trainer(model: nn.Module, optimizer: Optimizer) -> Trainer:
    """Train a model whose parameters the optimizer holds."""

    def compute(batch: Tensor) -> Tensor:
        loss: Tensor = model(batch)
        loss.backward()
        return loss.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(model, optimizer, compute, update)


def with_masters(model: nn.Module, setting: Setting, params: list[nn.Parameter]) -> Trainer:
    """Train a model kept in the setting's dtype by fp32 masters of ``params``, as the sharded contestants do."""
    if setting.precision is None:
        return trainer(model, setting.make_optimizer(params))
    masters = [nn.Parameter(param.detach().float()) for param in params]
    model.to(setting.precision)
    optimizer = setting.make_optimizer(masters)
    plain = trainer(model, optimizer)

    def update() -> None:
        for master, param in zip(masters, params, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        model.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, param in zip(masters, params, strict=True):
                param.copy_(master)

    return Trainer(model, optimizer, plain.compute, update)


def zerofx_contestant(**config: Any) -> Build:
    """Return what builds the model that zerofx compiles with some settings."""

    def build(setting: Setting) -> Trainer:
        import zerofx

        settled = zerofx.Config(param_dtype=setting.precision, reduce_dtype=setting.precision, **config)
        model = zerofx.compile(setting.model(), config=settled)
        return trainer(model, setting.make_optimizer(model.parameters()))

    return build


def _ddp(*, compiled: bool) -> Build:
    def build(setting: Setting) -> Trainer:
        model = setting.model()
        made = with_masters(model, setting, list(model.parameters()))
        wrapped: Any = DistributedDataParallel(model)
        return _computing_with(torch.compile(wrapped) if compiled else wrapped, made)

    return build


def _computing_with(model: Any, made: Trainer) -> Trainer:
    """Let another callable compute what a trainer updates."""
    return Trainer(made.model, made.optimizer, trainer(model, made.optimizer).compute, made.update, made.comparable_steps)


def _floor(setting: Setting) -> Trainer:
    """Train alone: the compiled model without communication, and the share of the optimizer's work that a shard would have.

    A model that only some of its parameters are trained of is no use, but no sharded step can do less.
    """
    model = setting.model()
    params = list(model.parameters())
    made = with_masters(model, setting, _share(params, dist.get_world_size()))
    compute = trainer(torch.compile(model), made.optimizer).compute  # type: ignore[arg-type]

    def update() -> None:
        made.update()
        model.zero_grad()

    return Trainer(model, made.optimizer, compute, update, comparable_steps=1)


def _share(params: list[nn.Parameter], world_size: int) -> list[nn.Parameter]:
    """Return the first parameters that together are at least 1/N of all."""
    total, share = sum(param.numel() for param in params), list[nn.Parameter]()
    while sum(param.numel() for param in share) * world_size < total:
        share.append(params[len(share)])
    return share


def _fsdp2(**options: Any) -> Build:
    def build(setting: Setting) -> Trainer:
        model = setting.model()
        peer_fsdp2.shard(model, setting.workload.blocks(model), setting.precision, peer_fsdp2.Variant(**options))
        return trainer(model, setting.make_optimizer(model.parameters()))

    return build


def _deepspeed(*, reshard: bool) -> Build:
    def build(setting: Setting) -> Trainer:
        model = setting.model()
        engine, linear = peer_deepspeed.shard(model, setting.make_optimizer(model.parameters()), setting.precision, reshard=reshard)

        def compute(batch: Tensor) -> Tensor:
            with peer_deepspeed.with_linear(linear):
                loss: Tensor = engine(batch)
                engine.backward(loss)
            return loss.detach()

        return Trainer(engine, engine.optimizer, compute, engine.step)

    return build


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to train: how a rank builds it, and the ZeRO stage that it should have the memory and traffic of.

    ``is_peer`` marks ZeRO-3 as users of other libraries get it; ``config`` are the settings of one of ours.
    """

    stage: int
    build: Build
    is_peer: bool = False
    config: Mapping[str, Any] | None = None


def _ours(**config: Any) -> Contestant:
    return Contestant(config["stage"], zerofx_contestant(**config), config=config)


# Prefetch off: each gather is launched where it is waited for. Delayed waits off: each reduction is waited for where it is launched.
_SERIAL: dict[str, Any] = {"prefetch_buckets": 0, "reduces_in_flight": 0}
# Two blocks ahead, where the compiled schedule is one, and nothing that is further away stays whole for the backward.
_RESHARD = HookLimits(prefetch_elements=6_500_000, max_reuse_distance_elements=0)
FLOOR = "no communication"

CONTESTANTS: dict[str, Contestant] = {
    "zerofx 3": _ours(stage=3),
    "zerofx 3, deeper": _ours(stage=3, prefetch_buckets=4, reduces_in_flight=4),
    "zerofx 2": _ours(stage=2),
    "zerofx 1": _ours(stage=1),
    "zerofx 3, not scheduled": _ours(stage=3, **_SERIAL),
    "zerofx 3, hooks": _ours(stage=3, backend="hooks"),
    "zerofx 3, hooks, re-sharding": _ours(stage=3, backend="hooks", hooks=_RESHARD),
    "ddp": Contestant(0, _ddp(compiled=False)),
    "ddp, compiled": Contestant(0, _ddp(compiled=True)),
    "fsdp2": Contestant(3, _fsdp2(), is_peer=True),
    "fsdp2, tuned": Contestant(3, _fsdp2(asynchronous=True), is_peer=True),
    "fsdp2, tuned, our collectives": Contestant(3, _fsdp2(asynchronous=True, pieces=4)),
    "fsdp2, compiled blocks": Contestant(3, _fsdp2(compiled=True), is_peer=True),
    "deepspeed 3": Contestant(3, _deepspeed(reshard=False), is_peer=True),
    "deepspeed 3, re-sharding": Contestant(3, _deepspeed(reshard=True), is_peer=True),
    FLOOR: Contestant(0, _floor),
}
