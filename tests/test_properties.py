"""Whatever the model and the settings: sharded training is single-process training.

``pytest tests/test_properties.py --hypothesis-profile=thorough`` runs many examples instead of the few and always equal ones of CI.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from hypothesis import given, settings
from torch import nn

import zerofx
from tests.generated import Example, examples
from tests.ranks import Pool
from tests.reference import Trace, differences, largest_element, named_differences, whole_gradients, whole_parameters

# Ranks sum in another order than one process does, and a norm of nearly equal values enlarges what that rounds 300 times (its epsilon).
TOLERANCES = {torch.float64: 1e-10, torch.float32: 3e-4, torch.bfloat16: 2**-4}
# Gradients in bfloat16 that nearly cancel have no digits of their own: there, the largest of all is the measure.
FLOORS = {torch.float64: 1e-2, torch.float32: 1.0, torch.bfloat16: 1.0}


class Reference:
    """The plain model in one process, which does what every rank would: its rows, its buffers, its random numbers."""

    def __init__(self, example: Example) -> None:
        self.example = example
        self.model = example.model()
        self.parts = [(rank,) for rank in range(example.world)] if example.by_rank else [tuple(range(example.world))]
        self.buffers = [{name: buffer.clone() for name, buffer in self.model.named_buffers()} for _ in self.parts]

    def train(self) -> Trace:
        def micro_batch(step: int, index: int) -> float:
            return sum(self.backward(step, index, part) for part in range(len(self.parts))) / self.example.world

        return train(self.example, self.model, micro_batch, self.average)

    @torch.no_grad()
    def average(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None and self.example.reduce == "mean":
                parameter.grad /= self.example.world

    def backward(self, step: int, index: int, part: int) -> float:
        dtype = self.example.precision[0]
        model = self.model if dtype is None else cast(self.model, dtype)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(self.buffers[part][name])
        loss = backward(self.example, model, step, index, self.parts[part], dtype)
        self.buffers[part] = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for parameter, computed in zip(self.model.parameters(), model.parameters(), strict=True):
            if parameter is not computed and computed.grad is not None:
                gradient = computed.grad.to(parameter.dtype)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return loss


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy whose parameters are in another dtype; its buffers keep theirs."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data, parameter.grad = parameter.data.to(dtype), None
    return copied


def backward(example: Example, model: nn.Module, step: int, index: int, ranks: Sequence[int], dtype: torch.dtype | None = None) -> float:
    """One forward and backward on the rows of some ranks, with the random numbers of the first of them."""
    inputs, targets = (torch.cat(values) for values in zip(*(example.batch(step, index, rank) for rank in ranks), strict=True))
    if dtype is not None and inputs.is_floating_point():
        inputs = inputs.to(dtype)
    torch.manual_seed(100 * step + 10 * index + ranks[0])
    loss = example.loss(model(inputs), targets)
    loss.backward()
    return loss.item()


def train(example: Example, model: nn.Module, micro_batch: Callable[[int, int], float], average: Callable[[], None]) -> Trace:
    optimizer = example.optimizer_of(model)
    trace = Trace()
    for step in range(example.steps):
        example.freeze(model, step)
        trace.losses.append(sum(micro_batch(step, index) for index in range(example.micro_batches)))
        average()
        trace.gradients.append(whole_gradients(model))
        if example.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, example.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not example.zero_in_place)
        trace.parameters.append(whole_parameters(model))
    trace.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return trace


def train_sharded(rank: int, world: int, example: Example) -> Trace:
    warnings.filterwarnings("ignore", "zerofx hooks: ")  # a branch changes the order of submodules, and that is said once
    limit = 1 if example.tight_limit else None
    while True:
        model = zerofx.compile(example.model(), config=example.config(limit))

        def micro_batch(step: int, index: int, model: nn.Module = model) -> float:
            silent = example.no_sync and index < example.micro_batches - 1
            with zerofx.no_sync(model) if silent else nullcontext():
                return backward(example, model, step, index, [rank])

        try:
            return train(example, model, micro_batch, lambda: None)
        except zerofx.MemoryLimitError as error:
            if limit is None or error.smallest_bytes <= limit:
                raise
            limit = error.smallest_bytes


def tolerance_for(example: Example, expected: Trace) -> float:
    """0 where every partial sum has digits enough: the values themselves leave 8 bits to sums that cancel, and to halves."""
    tensors = [tensor for named in (*expected.gradients, *expected.parameters) for tensor in named.values()]
    if example.exact and max(map(largest_element, tensors)) * 2**8 < 2 / torch.finfo(example.dtype).eps:
        return 0.0
    return TOLERANCES[example.narrowest]


few = settings.get_current_profile_name() == "shared machine"


@settings(max_examples=25, derandomize=True) if few else settings()
@given(example=examples())
def test_sharded_training_is_single_process_training(ranks: Pool, example: Example) -> None:
    reference = Reference(example)
    expected = reference.train()
    traces = ranks.run(train_sharded, example.world, example)
    tolerance, floor = tolerance_for(example, expected), FLOORS[example.narrowest]
    found = differences(traces, expected, tolerance, floor=floor)
    assert not found, "\n".join(found)
    if example.by_rank:
        for trace, buffers in zip(traces, reference.buffers, strict=True):
            assert named_differences("buffer", trace.buffers, buffers, tolerance, floor) == []
