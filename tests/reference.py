"""Training in one process on the concatenated batch: what every stage must reproduce, and how near."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tests.models import ROWS, Batch, Case

Named = dict[str, Tensor]
MakeOptimizer = Callable[[nn.Module, float], torch.optim.Optimizer]

# Ranks sum in another order than one process does, and fp32 rounds each partial sum to 6e-8 of itself. 1e-6 leaves room for about
# sixteen such roundings, and a wrong factor, a lost term or a stale weight is far outside.
FP32_TOLERANCE = 1e-6
# The same in fp64, with room for operations whose own result depends on how many rows they are given.
FP64_TOLERANCE = 1e-12
# A gradient that is zero but for rounding (the bias of an attention's keys) has no digits of its own: differences are measured
# against at least this part of the largest element of all gradients or parameters.
FLOOR = 1e-2


@dataclass
class Trace:
    """What a training run shows, with whole tensors: one entry a step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: list[Named] = field(default_factory=list)
    buffers: Named = field(default_factory=dict)


def sgd(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), learning_rate)


def momentum(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    # A momentum of one half keeps integer data exact.
    return torch.optim.SGD(model.parameters(), learning_rate, momentum=0.5)


def adamw(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW that decays matrices only, chosen by shape: a parameter that hides its logical shape lands in the wrong group."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, learning_rate)


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor. Collective for a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    (placement,) = tensor.placements
    if not isinstance(placement, Shard) or tensor.device_mesh.size() == 1:
        replicated: Tensor = tensor.full_tensor()
        return replicated.detach().clone()
    # full_tensor would gather in the form that crashes on gloo now and then (zerofx/collectives.py)
    local, dim = tensor.to_local().detach(), placement.dim
    rows = -(-tensor.shape[dim] // tensor.device_mesh.size())
    room = local.new_zeros([*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :]])
    room.narrow(dim, 0, local.shape[dim]).copy_(local)
    parts = [torch.empty_like(room) for _ in range(tensor.device_mesh.size())]
    dist.all_gather(parts, room, group=tensor.device_mesh.get_group())
    return torch.cat(parts, dim).narrow(dim, 0, tensor.shape[dim]).contiguous()


def whole_parameters(model: nn.Module) -> Named:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if parameter.grad is None else whole(parameter.grad) for name, parameter in model.named_parameters()}


def train(
    model: nn.Module,
    case: Case,
    rank: int = 0,
    world: int = 1,
    *,
    steps: int = 3,
    rows: Callable[[int], int] = lambda step: ROWS,
    make_optimizer: MakeOptimizer = sgd,
    after_backward: Callable[[nn.Module], object] = lambda model: None,
) -> Trace:
    """Train on this rank's rows of each step's batch. With world 1 and a plain model this is the reference."""
    optimizer = make_optimizer(model, case.learning_rate)
    trace = Trace()
    for step in range(steps):
        batch = case.batch(step, rows(step)).part(rank, world)
        trace.losses.append(backward(model, case, batch, world))
        after_backward(model)
        trace.gradients.append(whole_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        trace.parameters.append(whole_parameters(model))
    trace.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return trace


def backward(model: nn.Module, case: Case, batch: Batch, world: int) -> float:
    """One forward and backward; the loss of these rows."""
    loss = case.loss(model(*batch.inputs, **batch.named), batch.target, world)
    loss.backward()
    return loss.item()


def differences(
    actual: Iterable[Trace], expected: Trace, tolerance: float = 0.0, *, loss_tolerance: float | None = None, floor: float = FLOOR
) -> list[str]:
    """Say where the traces of all ranks differ from the reference; empty when they agree.

    A difference is measured against the largest element of the whole tensor: an element that nearly cancels has no digits of its own.
    """
    traces = list(actual)
    found = []
    for step, loss in enumerate(expected.losses):
        mean = sum(trace.losses[step] for trace in traces) / len(traces)
        if not abs(mean - loss) <= (tolerance if loss_tolerance is None else loss_tolerance) * abs(loss):
            found.append(f"step {step}: mean loss {mean!r} instead of {loss!r}")
        for rank, trace in enumerate(traces):
            where = f"rank {rank}, step {step}"
            found += named_differences(f"{where}: gradient of", trace.gradients[step], expected.gradients[step], tolerance, floor)
            found += named_differences(f"{where}: parameter", trace.parameters[step], expected.parameters[step], tolerance, floor)
    return found


def named_differences(
    what: str, actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], tolerance: float = 0.0, floor: float = FLOOR
) -> list[str]:
    if list(actual) != list(expected):
        return [f"{what}: names {list(actual)} instead of {list(expected)}"]
    least = floor * max((largest_element(tensor) for tensor in expected.values()), default=0.0)
    found = ((name, difference(actual[name], expected[name], tolerance, least)) for name in expected)
    return [f"{what} {name}: {text}" for name, text in found if text]


def difference(actual: Tensor | None, expected: Tensor | None, tolerance: float = 0.0, floor: float = 0.0) -> str:
    """Say how two tensors differ; empty when they agree within the tolerance (0: bitwise)."""
    if actual is None or expected is None:
        return "" if actual is expected else f"{describe(actual)} instead of {describe(expected)}"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{describe(actual)} instead of {describe(expected)}"
    if torch.equal(actual, expected):
        return ""
    largest = largest_element(actual.double() - expected.double())
    scale = max(largest_element(expected), floor)
    return "" if largest <= tolerance * scale else f"differs by {largest:.3g} where the largest element is {scale:.3g}"


def largest_element(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None or tensor.numel() == 0 else tensor.double().abs().max().item()


def describe(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"


def drift(traces: list[Trace]) -> list[str]:
    """Say where whole gradients or parameters differ from those of the first trace, bitwise."""
    first = traces[0]
    found = []
    for index, trace in enumerate(traces[1:], start=1):
        for step in range(len(first.gradients)):
            found += named_differences(f"trace {index}, step {step}: gradient of", trace.gradients[step], first.gradients[step])
            found += named_differences(f"trace {index}, step {step}: parameter", trace.parameters[step], first.parameters[step])
    return found
