"""Whatever the model and the settings: sharded training is single-process training.

``pytest tests/test_properties.py --hypothesis-profile=thorough`` runs many examples instead of the few and always equal ones of CI.
"""

import copy
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from torch import Tensor, nn

import zerofx
from tests.generated import Example, examples
from tests.ranks import Pool
from tests.reference import Trace, differences, largest_element, named_differences, whole_gradients, whole_parameters
from zerofx.errors import MemoryLimitError, RankMismatchError

# Ranks sum in another order than one process does, and a norm of nearly equal values enlarges what that rounds 300 times (its epsilon).
TOLERANCES = {torch.float64: 1e-10, torch.float32: 3e-4, torch.bfloat16: 2**-4}
# Gradients in bfloat16 that nearly cancel have no digits of their own: there, the largest of all is the measure.
FLOORS = {torch.float64: 1e-2, torch.float32: 1.0, torch.bfloat16: 1.0}


class Reference:
    """The plain model in one process, which does what every rank would: its rows, its buffers, its random numbers."""

    def __init__(self, example: Example) -> None:
        self.example, self.model = example, example.model()
        self.parts = [(rank,) for rank in range(example.world)] if example.by_rank else [tuple(range(example.world))]
        self.buffers = [{name: buffer.clone() for name, buffer in self.model.named_buffers()} for _ in self.parts]

    def train(self) -> Trace:
        return train(self.example, self.model, self.step, self.evaluate)

    def step(self, step: int) -> float:
        total = sum(self.on(part, step, index) for index in range(self.example.micro_batches) for part in range(len(self.parts)))
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None and self.example.reduce == "mean":
                    parameter.grad /= self.example.world
        return total / self.example.world

    @torch.no_grad()
    def evaluate(self, step: int) -> float:
        return sum(self.on(part, step, self.example.micro_batches) for part in range(len(self.parts))) / self.example.world

    def on(self, part: int, step: int, index: int) -> float:
        """The loss of a part of the ranks, and where gradients are on its backward."""
        dtype = self.example.precision[0]
        model = self.model if dtype is None else cast(self.model, dtype)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(self.buffers[part][name])
        loss = loss_of(self.example, model, step, index, self.parts[part], dtype)
        if torch.is_grad_enabled():
            loss.backward()
        self.buffers[part] = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for parameter, computed in zip(self.model.parameters(), model.parameters(), strict=True):
            if parameter is not computed and computed.grad is not None:
                gradient = computed.grad.to(parameter.dtype)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return loss.item()


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy whose parameters are in another dtype; its buffers keep theirs."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data, parameter.grad = parameter.data.to(dtype), None
    return copied


def loss_of(example: Example, model: nn.Module, step: int, index: int, ranks: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """The loss of the rows of some ranks, with the random numbers of the first of them."""
    inputs, targets = (torch.cat(values) for values in zip(*(example.batch(step, index, rank) for rank in ranks), strict=True))
    if dtype is not None and inputs.is_floating_point():
        inputs = inputs.to(dtype)
    torch.manual_seed(100 * step + 10 * index + ranks[0])
    return example.loss(model(inputs), targets)


def train(example: Example, model: nn.Module, run_step: Callable[[int], float], evaluate: Callable[[int], float]) -> Trace:
    optimizer = example.optimizer_of(model)
    trace = Trace()
    for step in range(example.steps):
        example.freeze(model, step)
        trace.losses.append(run_step(step))
        trace.gradients.append(whole_gradients(model))
        if example.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, example.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not example.zero_in_place)
        trace.parameters.append(whole_parameters(model))
        if example.evaluates:
            model.eval()
            trace.losses[-1] += evaluate(step)
            model.train()
    trace.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return trace


def train_sharded(rank: int, world: int, example: Example) -> Trace:
    warnings.filterwarnings("ignore", "zerofx hooks: ")  # a branch changes the order of submodules, and that is said once
    limit = 1 if example.tight_limit else None
    config = example.config(limit)
    while True:
        model = zerofx.compile(example.model(), config=config)
        try:
            return train(example, model, *on_rank(example, model, rank))
        except (MemoryLimitError, RankMismatchError) as error:  # of ranks in different branches one alone may need more
            if config.keeps_at_most and "of activations cannot be kept" in str(error):
                config = replace(config, recompute="blocks")  # which keeps the least
                continue
            smallest = re.search(r"smallest that works is (\d+) bytes", str(error))
            needed = most_of(0 if smallest is None else int(smallest[1]), world)
            if limit is None or needed <= limit:
                raise
            limit = needed
            config = replace(config, memory_limit_bytes=limit)


def most_of(value: int, world: int) -> int:
    """The largest value of any rank."""
    values = [value] * world
    if world > 1:
        dist.all_gather_object(values, value)
    return max(values)


def on_rank(example: Example, model: nn.Module, rank: int) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """How one rank runs a step of all its micro-batches, and an evaluation."""
    last = example.micro_batches - 1

    def forward(step: int, index: int) -> Tensor:
        with zerofx.no_sync(model) if example.no_sync and index < last else nullcontext():
            return loss_of(example, model, step, index, [rank])

    def backward(loss: Tensor, index: int) -> float:
        with zerofx.no_sync(model) if example.no_sync and index < last else nullcontext():
            loss.backward()
        return loss.item()

    def run_step(step: int) -> float:
        indices = range(example.micro_batches)
        if example.together:
            losses = [forward(step, index) for index in indices]
            return sum(backward(loss, index) for index, loss in enumerate(losses))
        return sum(backward(forward(step, index), index) for index in indices)

    @torch.no_grad()
    def evaluate(step: int) -> float:
        return loss_of(example, model, step, example.micro_batches, [rank]).item()

    return run_step, evaluate


def largest_of(trace: Trace) -> float:
    """The largest absolute value of a whole run: infinite, or not a number, where it overflows."""
    tensors = [tensor for named in (*trace.gradients, *trace.parameters) for tensor in named.values()]
    return torch.tensor([*map(largest_element, tensors), *map(abs, trace.losses)], dtype=torch.float64).max().item()


def tolerance_for(example: Example, largest: float) -> float:
    """0 where every partial sum has digits enough: what it sums may be 2^8 times what comes out."""
    is_exact = example.exact and largest * 2**8 < 2 / torch.finfo(example.dtype).eps
    return 0.0 if is_exact else TOLERANCES[example.narrowest]


few = settings.get_current_profile_name() == "shared machine"


@settings(max_examples=25, derandomize=True) if few else settings()
@given(example=examples())
def test_sharded_training_is_single_process_training(ranks: Pool, example: Example) -> None:
    reference = Reference(example)
    expected = reference.train()
    largest = largest_of(expected)
    assume(largest < 1e30)  # a few deep models outgrow fp32
    traces = ranks.run(train_sharded, example.world, example)
    tolerance, floor = tolerance_for(example, largest), FLOORS[example.narrowest]
    # A mean over three ranks is rounded, whatever it is the mean of.
    found = differences(traces, expected, tolerance, loss_tolerance=max(tolerance, 1e-12), floor=floor)
    if example.by_rank:
        for trace, buffers in zip(traces, reference.buffers, strict=True):
            found += named_differences("buffer", trace.buffers, buffers, tolerance, floor)
    assert not found, "\n".join(found)
