"""Models and training settings drawn by hypothesis, as plain data from which every rank builds the same.

An example whose blocks only add, multiply and choose trains integers held in floats, as the exact cases of tests/models.py do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.models import fill_with_integers, integers
from tests.stages import TIGHT
from zerofx.config import Config, HookLimits

TOKENS = 5


class Plain(nn.Module):
    """A layer, of a dtype of its own or not."""

    def __init__(self, width: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dtype = dtype  # its own, None for that of the model

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        return self.linear(x.to(self.linear.weight.dtype)).to(x.dtype)


class Wide(nn.Module):
    """One column, or a prime number of them, between two layers of which one has no bias."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        return self.down(self.up(x)) + x


class Convolution(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 3, 3, padding=1)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        return self.convolution(x[:, None]).sum(1)


class ReadTwice(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        return (x @ self.weight + self.bias) @ self.weight.t() - self.bias


class Thrice(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        for _ in range(3):
            x = self.linear(x)
        return x


class Sizes(nn.Module):
    """No dimension, one element, no element, and fewer rows than ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.single = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.ones(0, width))
        self.flat = nn.Parameter(torch.randn(1, width))

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        return x * self.scalar + self.single + self.flat + self.empty.sum(0)


class Branch(nn.Module):
    """Which layer runs depends on the values of this rank's inputs; one more never runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.even = nn.Linear(width, width)
        self.odd = nn.Linear(width, width)
        self.never = nn.Linear(width, 2)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        return self.even(x) if inputs.long().sum() % 2 == 0 else self.odd(x)


class Counted(nn.Module):
    """Buffers that the forward changes, after all that it reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("offset", torch.arange(float(width)), persistent=False)
        self.register_buffer("total", torch.zeros(width))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("odd", torch.zeros(2, dtype=torch.bool))

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        x = self.linear(x) + self.offset.to(x.dtype)
        with torch.no_grad():
            self.total.add_(x.detach().sum(0))
            self.calls.add_(1)
            self.odd.logical_not_()
        return x


class Uncompiled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    @torch.compiler.disable
    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        return self.linear(x)


class Broken(nn.Module):
    """The same weight on both sides of a graph break."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return self.linear(x)


class Dropped(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        return functional.dropout(self.linear(x), 0.5, self.training)


class Normalised(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        return self.norm(x)


BLOCKS: Mapping[str, Callable[[int], nn.Module]] = {
    "plain": Plain,
    "one column": lambda width: Wide(width, 1),
    "wide": lambda width: Wide(width, 11),
    "convolution": Convolution,
    "read twice": ReadTwice,
    "thrice": Thrice,
    "sizes": Sizes,
    "branch": Branch,
    "counted": Counted,
    "uncompiled": Uncompiled,
    "broken": Broken,
    "dropout": Dropped,
    "float64": lambda width: Plain(width, torch.float64),
    "float32": lambda width: Plain(width, torch.float32),
    "bfloat16": lambda width: Plain(width, torch.bfloat16),
    "layer norm": lambda width: Normalised(nn.LayerNorm(width)),
    "rms norm": lambda width: Normalised(nn.RMSNorm(width)),
    "batch norm": lambda width: Normalised(nn.BatchNorm1d(width)),
    # The block before it once more, and a layer of the same weight.
    "repeated": Plain,
    "tied": Plain,
}
# What each rank does on its own: its rows are then not those of a larger batch.
BY_RANK = {"branch", "counted", "dropout", "batch norm"}
ROUNDED = {"float32", "bfloat16", "layer norm", "rms norm", "batch norm"}
# A recomputation changes buffers a second time, in plain torch too.
CHANGES_BUFFERS = {"counted", "batch norm"}
FROZEN = ("never", "first parameter", "always", "first step", "later steps")


@dataclass(frozen=True)
class Block:
    kind: str = "plain"
    frozen: str = "never"
    checkpointed: bool = False


class Stack(nn.Module):
    """The blocks, between a layer or an embedding and a head, which may be the embedding."""

    def __init__(
        self, width: int, blocks: Sequence[Block], tokens: bool, tied_head: bool, two_outputs: bool, activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.first = nn.Embedding(TOKENS, width) if tokens else nn.Linear(3, width)
        self.blocks = nn.ModuleList()
        for block in blocks:
            self.blocks.append(self._built(block.kind, width))
        self.head = nn.Linear(width, TOKENS)
        if tokens and tied_head:
            self.head.weight = self.first.weight
        self.checkpointed = [block.checkpointed for block in blocks]
        self.activation, self.two_outputs = activation, two_outputs

    def _built(self, kind: str, width: int) -> nn.Module:
        if kind == "repeated" and self.blocks:
            return self.blocks[-1]
        built = BLOCKS[kind](width)
        layers = [block for block in self.blocks if isinstance(block, Plain)]
        if kind == "tied" and layers:
            built.linear.weight, built.dtype = layers[0].linear.weight, layers[0].dtype
        return built

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        x = self.first(inputs)
        for block, checkpointed in zip(self.blocks, self.checkpointed, strict=True):
            x = checkpoint(block, x, inputs, use_reentrant=False) if checkpointed else block(x, inputs)
            x = self.activation(x)
        return {"head": self.head(x), "hidden": x} if self.two_outputs else {"head": self.head(x)}


@dataclass(frozen=True)
class Example:
    """A model, how it is trained, and on how many ranks."""

    blocks: tuple[Block, ...]
    width: int
    tokens: bool
    tied_head: bool
    two_outputs: bool
    dtype: torch.dtype
    seed: int
    stage: int
    backend: str
    world: int
    steps: int
    micro_batches: int
    no_sync: bool
    together: bool
    evaluates: bool
    uneven: bool
    growing: bool
    reduce: str
    precision: tuple[torch.dtype | None, torch.dtype | None]
    clip: float | None
    optimizer: str
    zero_in_place: bool
    small_buckets: bool
    keep_whole: bool
    tight_limit: bool
    hardware: str | None
    recompute: str | float | tuple[str, ...] | None

    def has(self, kinds: set[str]) -> bool:
        return any(block.kind in kinds for block in self.blocks)

    @property
    def exact(self) -> bool:
        """All that is computed are integers."""
        return not self.has(ROUNDED) and self.precision == (None, None) and self.clip is None and self.optimizer != "adamw"

    @property
    def by_rank(self) -> bool:
        return self.has(BY_RANK) or self.precision != (None, None)

    @property
    def narrowest(self) -> torch.dtype:
        """The dtype in which most is rounded."""
        dtypes = {self.dtype, *filter(None, self.precision)}
        dtypes |= {getattr(torch, block.kind) for block in self.blocks if block.kind in ("float32", "bfloat16")}
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            model = Stack(self.width, self.blocks, self.tokens, self.tied_head, self.two_outputs, torch.abs if self.exact else torch.tanh)
            if self.exact:
                fill_with_integers(model)
        model.to(self.dtype)
        for block in model.blocks:
            if isinstance(block, Plain) and block.dtype is not None:
                block.to(block.dtype)
        return model

    def batch(self, step: int, micro_batch: int, rank: int) -> tuple[Tensor, Tensor]:
        """The inputs and the targets of one rank."""
        with torch.random.fork_rng():
            torch.manual_seed(1000 * self.seed + 100 * step + 10 * micro_batch + rank)
            rows = (2 + rank if self.uneven else 3) + (step if self.growing else 0)
            values = integers if self.exact else torch.randn
            inputs = torch.randint(0, TOKENS, (rows,)) if self.tokens else values(rows, 3).to(self.dtype)
            return inputs, values(rows, TOKENS).double()

    def loss(self, outputs: dict[str, Tensor], target: Tensor) -> Tensor:
        """A sum over rows, so that the rows of several ranks may be one batch; times the world, which a mean over ranks divides by."""
        output = outputs["head"].double()
        loss = (output * target).sum() if self.exact else (output - target).square().sum()
        if self.two_outputs:
            loss = loss + outputs["hidden"].double().sum()
        return loss * self.world if self.reduce == "mean" else loss

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            # A gradient that is zero but for rounding stays small beside this epsilon.
            return torch.optim.AdamW(model.parameters(), 0.01, eps=1e-2, weight_decay=0.1)
        momentum = 0.5 if self.optimizer == "momentum" else 0.0
        # With 1, integers stay integers up to the last gradient; the last step of momentum halves them once.
        return torch.optim.SGD(model.parameters(), 1.0 if self.exact else 2.0**-6, momentum=momentum)

    def freeze(self, model: Stack, step: int) -> None:
        """Set what is trained in this step; the first layer and the head always are."""
        for block, module in zip(self.blocks, model.blocks, strict=True):
            trained = {"always": False, "first step": step > 0, "later steps": step == 0}.get(block.frozen, True)
            for index, parameter in enumerate(module.parameters()):
                parameter.requires_grad_(trained and not (block.frozen == "first parameter" and index == 0))

    def config(self, memory_limit_bytes: int | None = None) -> Config:
        settings: dict[str, Any] = {}
        if self.small_buckets:
            settings |= {"bucket_max_bytes": 200, "bucket_min_bytes": 0, "prefetch_buckets": 2}
        param_dtype, reduce_dtype = self.precision
        return Config(
            stage=self.stage,
            backend=self.backend,
            reduce=self.reduce,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            memory_limit_bytes=memory_limit_bytes,
            hardware=self.hardware,
            recompute=self.recompute,
            keep_whole_bytes=300 if self.keep_whole else 0,
            hooks=TIGHT if self.small_buckets else HookLimits(),
            **settings,
        )


def _mostly(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([usual] * 2 * len(others) + list(others))


@st.composite
def examples(draw: st.DrawFn) -> Example:
    rounds = draw(st.booleans())
    precision = draw(_mostly((None, None), (torch.bfloat16, torch.float32), (torch.bfloat16, None), (None, torch.float32)))
    precision = precision if rounds else (None, None)
    in_bfloat16 = precision[0] is not None
    # Batch norms compute in fp32 whatever the precision: tests/cases/test_precision.py.
    excluded = ({"batch norm"} if in_bfloat16 else set()) if rounds else ROUNDED
    kinds = [kind for kind in BLOCKS if kind not in excluded]
    blocks = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(kinds))
        blocks.append(Block(kind, draw(_mostly(*FROZEN)), kind not in CHANGES_BUFFERS and draw(_mostly(False, True))))
    # torch knows no infinity norm of nothing, and "sizes" has a parameter without elements.
    norms = [2.0] if any(block.kind == "sizes" for block in blocks) else [2.0, float("inf")]
    # The step of Adam is a ratio: the rounding of a small gradient is as large in it as that of a large one.
    has_digits = rounds and not in_bfloat16 and all(block.kind != "bfloat16" for block in blocks)
    backend = draw(st.sampled_from(["hooks", "aot_eager"]))
    micro_batches = draw(st.sampled_from([1, 1, 2, 3]))
    amounts = [] if backend == "hooks" else [0.5]
    # A checkpoint of the user's own updates the buffers of what it computes again, a second time; within one of ours, at another time.
    kinds_checkpointed = {block.kind for block in blocks if block.checkpointed}
    updates_twice = "repeated" in kinds_checkpointed and any(block.kind in CHANGES_BUFFERS for block in blocks)
    return Example(
        blocks=tuple(blocks),
        width=draw(st.sampled_from([4, 1, 2, 3, 5])),
        tokens=draw(st.booleans()),
        tied_head=draw(st.booleans()),
        two_outputs=draw(_mostly(False, True)),
        dtype=torch.float32 if in_bfloat16 else draw(_mostly(torch.float64, torch.float32)),
        seed=draw(st.integers(0, 9)),
        stage=draw(st.sampled_from([3, 2, 1, 0])),
        backend=backend,
        world=draw(st.sampled_from([2, 3, 2, 3, 1])),
        steps=draw(st.sampled_from([2, 3] if rounds else [2])),
        micro_batches=micro_batches,
        no_sync=micro_batches > 1 and draw(st.booleans()),
        # A batch norm changes what the backward of an earlier forward needs, in plain torch too.
        together=micro_batches > 1 and all(block.kind != "batch norm" for block in blocks) and draw(_mostly(False, True)),
        evaluates=draw(_mostly(False, True)),
        uneven=draw(_mostly(False, True)),
        growing=draw(_mostly(False, True)),
        reduce=draw(_mostly("mean", "sum")),
        precision=precision,
        clip=draw(_mostly(None, *norms)) if rounds else None,
        optimizer=draw(st.sampled_from(["sgd", "momentum", "adamw"] if has_digits else ["sgd", "momentum"])),
        zero_in_place=draw(_mostly(False, True)),
        small_buckets=draw(st.booleans()),
        keep_whole=draw(_mostly(False, True)),
        tight_limit=backend != "hooks" and draw(_mostly(False, True)),
        hardware=draw(_mostly(None, "h100")) if backend != "hooks" else None,
        recompute=None if updates_twice else draw(_mostly(None, "blocks", "selective", ("blocks.[02]",), *amounts)),
    )
