"""The models that every stage must train right, each with the batches it is fed.

An *exact* case holds integers in floats and uses only sums, products, relu and pooling. Every partial sum is then exact, in any order,
so a sharded run must equal a whole one bitwise at any world size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Divides by every world size tested (1-4), and by four micro-batches for worlds 1 and 3.
ROWS = 12


@dataclass(frozen=True)
class Batch:
    """The inputs of one step; tensors have the rows of the batch first, other inputs are equal on all ranks."""

    inputs: tuple[Any, ...]
    target: Tensor
    named: Mapping[str, Any] = field(default_factory=dict)

    def part(self, index: int, parts: int) -> "Batch":
        """Take one of `parts` equal slices of the rows."""
        return self.each(lambda value: value.chunk(parts)[index])

    def to(self, dtype: torch.dtype) -> "Batch":
        """Cast what is floating point."""
        return self.each(lambda value: value.to(dtype) if value.is_floating_point() else value)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Change every tensor."""

        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        return Batch(tuple(map(changed, self.inputs)), changed(self.target), {name: changed(value) for name, value in self.named.items()})


Loss = Callable[[Any, Tensor, int], Tensor]


@dataclass(frozen=True)
class Case:
    """A model, how it is fed (by step and number of rows), and its loss (of output, target, world)."""

    name: str
    build: Callable[[], nn.Module]
    feed: Callable[[int, int], Batch]
    loss: Loss
    exact: bool
    learning_rate: float = 2.0**-1
    # Three steps with two weights in a row need more digits than fp32 has, for some cases.
    dtype: torch.dtype = torch.float32

    def model(self, seed: int = 0) -> nn.Module:
        """Build the model with weights that depend on the seed only."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.build()
            if self.exact:
                fill_with_integers(model)
        return model.to(self.dtype)

    def batch(self, step: int, rows: int = ROWS) -> Batch:
        """The global batch of a step."""
        with torch.random.fork_rng():
            torch.manual_seed(1200 + step)
            return self.feed(step, rows).to(self.dtype)

    def __str__(self) -> str:
        return self.name


def weighted_sum(output: Tensor, target: Tensor, world: int) -> Tensor:
    # Times the world, so that the mean over ranks is an integer again: at world 3 a third of an integer would be rounded.
    return (output * target).sum() * world


def mean_square(output: Tensor, target: Tensor, world: int) -> Tensor:
    return (output - target).square().mean()


def next_token(output: Tensor, target: Tensor, world: int) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


@torch.no_grad()
def fill_with_integers(model: nn.Module) -> None:
    """Overwrite all parameters with -1, 0 and 1."""
    for parameter in model.parameters():
        parameter.copy_(torch.randint(-1, 2, parameter.shape))


def integers(*shape: int, low: int = -1, high: int = 2) -> Tensor:
    return torch.randint(low, high, shape).float()


def feed_integers(inputs: Sequence[int], outputs: Sequence[int]) -> Callable[[int, int], Batch]:
    """Integer inputs and targets of these shapes for one row."""
    return lambda step, rows: Batch((integers(rows, *inputs),), integers(rows, *outputs))


def feed_floats(inputs: Sequence[int], outputs: Sequence[int]) -> Callable[[int, int], Batch]:
    return lambda step, rows: Batch((torch.randn(rows, *inputs),), torch.randn(rows, *outputs))


class TwoConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 5, 3)
        self.second = nn.Conv2d(5, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(functional.relu(self.first(x))))


class TiedMLP(nn.Module):
    """The last layer is the first layer's weight and bias; one more layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.layers[2].bias = self.layers[0].bias
        self.spare = nn.ModuleList([nn.Linear(6, 2)])

    def activation(self, x: Tensor) -> Tensor:
        return functional.relu(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


class SmoothMLP(TiedMLP):
    def activation(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class TiedEmbedding(nn.Module):
    """Embedding and head share a weight that is not the first parameter; one row of it is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.embedding = nn.Embedding(11, 4, padding_idx=9)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(functional.relu(self.hidden(self.embedding(tokens) * self.scale)))


class CalledThreeTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(5, 5)
        self.offset = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = functional.relu(self.shared(x))
        return x + self.offset


class ReadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 5))
        self.bias = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(x @ self.weight + self.bias)
        return hidden @ self.weight.t() - self.bias


class UsedOutsideOwner(nn.Module):
    """The weight of `owner` is used by its parent before `owner` runs; that of `silent` only by its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Linear(5, 5)
        self.silent = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(functional.linear(x, self.owner.weight))
        return functional.linear(self.owner(x), self.silent.weight, self.silent.bias)


class Branch(nn.Module):
    """One of two layers runs, as a Python flag says; the other has no gradient in that step."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(5, 4)
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 3)

    def forward(self, x: Tensor, *, left: bool) -> Tensor:
        x = functional.relu(self.common(x))
        return self.left(x) if left else self.right(x)


class GraphBreak(nn.Module):
    """The middle layer's weight is used on both sides of the break."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.middle = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.middle(self.first(x)))
        torch._dynamo.graph_break()
        return self.last(functional.relu(self.middle(x)))


class Uncompiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(5))

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.linear(x)) * self.scale


class DisabledSubmodule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.uncompiled = Uncompiled()
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.uncompiled(functional.relu(self.first(x))))


class OddSizes(nn.Module):
    """Sizes that no world divides, fewer rows than ranks, one element, no dimension, and no element at all."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
        self.wide = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 1))
        self.thin = nn.Linear(1, 3)
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.single = nn.Parameter(torch.ones(1))
        self.two_by_eight = nn.Parameter(torch.ones(2, 8))
        self.empty = nn.Parameter(torch.ones(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep(x) * self.scalar + self.wide(x) + self.thin(x[:, :1]) * self.single
        return x + self.two_by_eight.sum() + self.empty.sum(0)


class Frozen(nn.Module):
    """A frozen weight beside a trainable bias, a frozen layer, and a trainable low-rank path around it."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(6, 6)
        self.base = nn.Linear(6, 6)
        self.down = nn.Parameter(torch.ones(2, 6))
        self.up = nn.Parameter(torch.ones(6, 2))
        self.mixed.weight.requires_grad_(False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.mixed(x))
        return self.base(x) + x @ self.down.t() @ self.up.t()


class Containers(nn.Module):
    """Parameters in lists and dicts, passed as arguments, and an output that is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(5, 5)) for _ in range(2))
        self.offsets = nn.ParameterDict({"low": nn.Parameter(torch.ones(5)), "high": nn.Parameter(torch.ones(5))})

    def forward(self, x: Tensor, *, name: str = "low") -> dict[str, Tensor]:
        for weight in self.weights:
            x = functional.relu(x @ weight)
        return {"low": x + self.offsets[name], "high": x - self.offsets["high"]}


class Counted(nn.Module):
    """Float, integer and boolean buffers that the forward changes, and one that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("offset", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + self.offset
        if self.training:
            with torch.no_grad():
                self.total.add_(x.detach().sum(0))
                self.calls.add_(1)
                self.seen.logical_or_((x.detach() > 0).any(0))
        return functional.relu(x)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(functional.relu(self.norm(self.convolution(x))).mean((2, 3)))


class Dropped(nn.Module):
    """Returns what dropout let through, so that a test can say which mask the backward must use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.second = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = functional.dropout(self.first(x), 0.5, self.training)
        return self.second(kept), kept


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attention(self.norm_1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_2(x))


class TinyGPT(nn.Module):
    """A GPT whose head is its token embedding."""

    def __init__(self, vocabulary: int = 19, width: int = 16, layers: int = 2, context: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def feed_tokens(step: int, rows: int) -> Batch:
    tokens = torch.randint(0, 19, (rows, 9))
    return Batch((tokens[:, :-1],), tokens[:, 1:])


def feed_embedding(step: int, rows: int) -> Batch:
    return Batch((torch.arange(rows * 4).reshape(rows, 4) % 11,), integers(rows, 4, 11))


def feed_branch(step: int, rows: int) -> Batch:
    # The branch changes after the first step, and back: a stale program of the other branch would show.
    return Batch((integers(rows, 5),), integers(rows, 3), {"left": step != 1})


def weighted_sum_of_values(output: dict[str, Tensor], target: Tensor, world: int) -> Tensor:
    return weighted_sum(output["low"] + output["high"], target, world)


def exact(
    name: str,
    build: Callable[[], nn.Module],
    inputs: Sequence[int] = (5,),
    outputs: Sequence[int] = (3,),
    dtype: torch.dtype = torch.float32,
    loss: Loss = weighted_sum,
) -> Case:
    return Case(name, build, feed_integers(inputs, outputs), loss, exact=True, dtype=dtype)


SEED = exact("seed", TwoConvolutions, (1, 7, 7), (3, 3, 3), torch.float64)
TIED_MLP = exact("tied_mlp", TiedMLP, (6,), (6,), torch.float64)
FROZEN = exact("frozen", Frozen, (6,), (6,), torch.float64)
ODD_SIZES = exact("odd_sizes", OddSizes, (7,), (3,))
BRANCH = Case("branch", Branch, feed_branch, weighted_sum, exact=True)
COUNTED = exact("counted", Counted, (5,), (4,))
GPT = Case("gpt", TinyGPT, feed_tokens, next_token, exact=False, learning_rate=0.1)
SMOOTH_MLP = Case("smooth_mlp", SmoothMLP, feed_floats((6,), (6,)), mean_square, exact=False, learning_rate=0.1)
NORMALISED = Case("normalised", Normalised, feed_floats((1, 6, 6), (2,)), mean_square, exact=False, learning_rate=0.1)

EXACT: tuple[Case, ...] = (
    SEED,
    TIED_MLP,
    Case("tied_embedding", TiedEmbedding, feed_embedding, weighted_sum, exact=True, dtype=torch.float64),
    exact("called_three_times", CalledThreeTimes, (5,), (5,), torch.float64),
    exact("read_twice", ReadTwice, (5,), (5,)),
    exact("used_outside_owner", UsedOutsideOwner, dtype=torch.float64),
    BRANCH,
    exact("graph_break", GraphBreak, dtype=torch.float64),
    exact("disabled_submodule", DisabledSubmodule),
    ODD_SIZES,
    FROZEN,
    exact("containers", Containers, (5,), (5,), loss=weighted_sum_of_values),
)


def case_named(name: str) -> Case:
    """Find a case by its name, which is what a rank's function is given."""
    return next(case for case in (*EXACT, COUNTED, GPT, SMOOTH_MLP, NORMALISED) if case.name == name)
