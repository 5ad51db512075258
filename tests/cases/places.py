"""Where a case runs, and a compiled model trained there beside the plain one.

A check is given a place, builds what a report describes, and says what is wrong; nothing where all is right.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zerofx
from tests.ranks import Pool
from tests.reference import named_differences, whole_gradients, whole_parameters
from tests.stages import TIGHT, at_stage
from zerofx.config import Config

# Each stage that shards: compiled where whole copies stay and where none does, and in the eager mode, which costs no tracing.
PLACES = ((1, "aot_eager"), (2, "hooks"), (3, "aot_eager"), (3, "hooks"))
# For what takes long to trace.
FEW = ((1, "hooks"), (3, "aot_eager"))
# Ranks sum float64 in another order than one process does (1e-16 of the largest), and Adam divides by roots of what nearly cancels.
TOLERANCE = 1e-9


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def values(*shape: int, seed: int = 0) -> Tensor:
    """The same random numbers on every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Place:
    rank: int
    world: int
    stage: int
    backend: str

    def compiled(self, plain: nn.Module, **settings: Any) -> nn.Module:
        """A sharded copy."""
        return zerofx.compile(copy.deepcopy(plain), config=Config(stage=self.stage, backend=self.backend, hooks=TIGHT, **settings))

    def rows(self, whole: Any) -> Any:
        """This rank's rows of a tensor; anything else is equal on all ranks."""
        return whole.chunk(self.world)[self.rank] if isinstance(whole, Tensor) else whole

    def both(self, plain: nn.Module, model: nn.Module, *inputs: Any) -> Iterator[tuple[nn.Module, tuple[Any, ...]]]:
        """The plain model with all rows, and the sharded one with this rank's."""
        yield plain, inputs
        yield model, tuple(map(self.rows, inputs))

    def train(
        self,
        plain: nn.Module,
        inputs: Sequence[Any],
        *,
        steps: int = 3,
        optimizer: Callable[[nn.Module], Any] = adamw,
        loss: Callable[[Any], Tensor] = mean_square,
        before: Callable[[nn.Module, int], object] = lambda model, step: None,
        tolerance: float = TOLERANCE,
        with_buffers: bool = False,
        **settings: Any,
    ) -> list[str]:
        """Train a sharded copy and a plain one, and say where their gradients, parameters or buffers differ."""
        model, plain = self.compiled(plain, **settings), copy.deepcopy(plain)
        optimizers = {each: optimizer(each) for each in (plain, model)}
        found = []
        for step in range(steps):
            for each, args in self.both(plain, model, *inputs):
                optimizers[each].zero_grad()
                before(each, step)
                loss(each(*args)).backward()
            found += named_differences(f"step {step}: gradient of", whole_gradients(model), whole_gradients(plain), tolerance)
            for each in optimizers.values():
                each.step()
            found += named_differences(f"step {step}: parameter", whole_parameters(model), whole_parameters(plain), tolerance)
            if with_buffers:
                found += named_differences(f"step {step}: buffer", dict(model.named_buffers()), dict(plain.named_buffers()), tolerance)
        return found


Check = Callable[[Place], list[str]]


def at_places(rank: int, world: int, check: Check, places: Sequence[tuple[int, str]]) -> list[str]:
    found = []
    for stage, backend in places:
        with at_stage(stage), warnings.catch_warnings():
            # the eager mode says once that submodules run in another order than before
            warnings.filterwarnings("ignore", "zerofx hooks: ")
            torch.manual_seed(0)
            found += [f"{backend}, stage {stage}: {text}" for text in check(Place(rank, world, stage, backend))]
    return found


def wrong(ranks: Pool, check: Check, world: int = 2, places: Sequence[tuple[int, str]] = PLACES) -> list[str]:
    """Run a check on every rank at every place; what any of them says is wrong."""
    return [text for found in ranks.run(at_places, world, check, places) for text in found]


def error_of(action: Callable[[], object], *words: str) -> list[str]:
    """Say where an action raises no error of zerofx that has four parts and these words."""
    try:
        action()
    except zerofx.ZerofxError as error:
        parts = {"where": error.where, "why": error.why, "remedy": error.remedy}
        return [f"no {word!r} in {error}" for word in words if word not in str(error)] + [name for name, part in parts.items() if not part]
    return ["no error"]
