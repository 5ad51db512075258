"""Small models compiled in this process for any number of ranks, over torch's fake process group: no communication, real programs."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerofx
from zerofx.compilation import Compilation
from zerofx.config import Config


class Block(nn.Module):
    """A pre-norm MLP block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class TiedStack(nn.Module):
    """An embedding, equal blocks, and a head that is the embedding."""

    def __init__(self, layers: int, width: int = 64, vocabulary: int = 300) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.h = nn.ModuleList([Block(width) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return functional.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1), tokens.flatten())


class Repeated(nn.Module):
    """One module called three times, and one of its parameters read once more outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.relu(self.inner(x))
        return (x * self.inner.bias).sum()


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be one of several ranks whose collectives do nothing."""
    torch._dynamo.reset()  # or a shape seen by an earlier test would count as dynamic
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def compiled(
    model: nn.Module, *inputs: Tensor, world_size: int = 2, train: bool = True, config: Config | None = None, **settings: Any
) -> nn.Module:
    """Compile a model and run one step of it, for its programs."""
    with fake_ranks(world_size):
        zerofx.compile(model, config=config or Config(**{"backend": "aot_eager", **settings}))
        if train:
            model(*inputs).backward()
        else:
            with torch.no_grad():
                model(*inputs)
    return model


def compilation(model: nn.Module) -> Compilation:
    """Return the only compilation of a model."""
    (only,) = model._zerofx.runtime.compilations
    assert isinstance(only, Compilation)
    return only


def stack(layers: int, *, world_size: int = 2, **settings: Any) -> nn.Module:
    """A compiled stack, one step in: to be read only, as all who ask for the same settings get the same one."""
    return _stack(layers, world_size, Config(backend="aot_eager", **settings))


@functools.cache
def _stack(layers: int, world_size: int, config: Config) -> nn.Module:
    torch.manual_seed(0)
    return compiled(TiedStack(layers), torch.arange(32).view(4, 8), world_size=world_size, config=config)
