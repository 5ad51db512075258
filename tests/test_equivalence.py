"""Stage 0 = 1 = 2 = 3 = one process on the concatenated batch."""

import copy
import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.models import COUNTED, EXACT, FROZEN, GPT, NORMALISED, ODD_SIZES, SMOOTH_MLP, TIED_MLP, Case, Dropped, case_named
from tests.ranks import Pool
from tests.reference import (
    FP32_TOLERANCE,
    MakeOptimizer,
    Trace,
    adamw,
    difference,
    differences,
    drift,
    momentum,
    named_differences,
    sgd,
    train,
    whole_gradients,
)
from tests.stages import STAGES, at_stage, compiled
from zerofx.hardware import Link, hardware


def train_at_stages(
    rank: int, world: int, name: str, make_optimizer: MakeOptimizer, stages: tuple[int, ...], backend: str = "aot_eager"
) -> list[Trace]:
    case = case_named(name)
    traces = []
    for stage in stages:
        with at_stage(stage):
            traces.append(train(compiled(case, stage, backend=backend), case, rank, world, make_optimizer=make_optimizer))
    return traces


def traces_by_stage(
    ranks: Pool, case: Case, world: int, make_optimizer: MakeOptimizer = sgd, stages: tuple[int, ...] = STAGES, backend: str = "aot_eager"
) -> dict[int, list[Trace]]:
    """For each stage, the traces of all ranks."""
    by_rank = ranks.run(train_at_stages, world, case.name, make_optimizer, stages, backend)
    return {stage: [traces[index] for traces in by_rank] for index, stage in enumerate(stages)}


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_exact_cases_are_bitwise_equal(ranks: Pool, case: Case) -> None:
    expected = train(case.model(), case)
    for stage, traces in traces_by_stage(ranks, case, 2).items():
        assert differences(traces, expected) == [], f"world 2, stage {stage}"
    (traces,) = traces_by_stage(ranks, case, 3, stages=(3,)).values()
    assert differences(traces, expected) == [], "world 3, stage 3"


def train_for_hardware(rank: int, world: int, name: str) -> list[Trace]:
    """Train as scheduled for a fast and for a slow link, with and without memory to spare."""
    case, traces = case_named(name), []
    slow = Link(0.0, ((1, 1e3),), cpu_s_per_byte=1e-9)
    machines = [hardware("h100"), dataclasses.replace(hardware("h100"), intra_node=slow, inter_node=slow)]
    for machine, limit in itertools.product(machines, (None, "1MiB")):
        with at_stage(3):
            traces.append(train(compiled(case, 3, hardware=machine, memory_limit=limit), case, rank, world))
    return traces


@pytest.mark.parametrize("case", [TIED_MLP, ODD_SIZES], ids=str)
def test_a_schedule_for_hardware_is_bitwise_equal(ranks: Pool, case: Case) -> None:
    expected = train(case.model(), case)
    for traces in zip(*ranks.run(train_for_hardware, 2, case.name), strict=True):
        assert differences(list(traces), expected) == []


@pytest.mark.parametrize(
    ("case", "world"),
    [(TIED_MLP, 1), (TIED_MLP, 3), (TIED_MLP, 4), (FROZEN, 2), (ODD_SIZES, 1), (ODD_SIZES, 3), (ODD_SIZES, 4)],
    ids=str,
)
def test_momentum_is_bitwise_equal_at_every_world(ranks: Pool, case: Case, world: int) -> None:
    # What differs between worlds is in the sizes (no communication, uneven shards, ranks without rows), not in the models.
    expected = train(case.model(), case, make_optimizer=momentum)
    for stage, traces in traces_by_stage(ranks, case, world, momentum).items():
        assert differences(traces, expected) == [], f"stage {stage}"


@pytest.mark.parametrize("world", [2, 3])
def test_adamw_with_decay_groups(ranks: Pool, world: int) -> None:
    expected = train(SMOOTH_MLP.model(), SMOOTH_MLP, make_optimizer=adamw)
    for stage, traces in traces_by_stage(ranks, SMOOTH_MLP, world, adamw).items():
        assert differences(traces, expected, FP32_TOLERANCE) == [], f"stage {stage}"
        assert drift(traces) == [], f"stage {stage}"


def test_gpt_at_two_ranks(ranks: Pool) -> None:
    expected = train(GPT.model(), GPT)
    by_stage = traces_by_stage(ranks, GPT, 2)
    for stage, traces in by_stage.items():
        assert differences(traces, expected, FP32_TOLERANCE) == [], f"stage {stage}"
        assert drift(traces) == [], f"stage {stage}"
    for traces in zip(by_stage[1], by_stage[2], by_stage[3], strict=True):
        # A sum of two has no order, so the stages cannot differ even on floats.
        assert drift(list(traces)) == []
        assert traces[0].losses == traces[1].losses == traces[2].losses


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (3, 3), (4, 2)])
def test_gpt_at_other_worlds(ranks: Pool, world: int, stage: int) -> None:
    expected = train(GPT.model(), GPT)
    (traces,) = traces_by_stage(ranks, GPT, world, stages=(stage,)).values()
    assert differences(traces, expected, FP32_TOLERANCE) == []
    assert drift(traces) == []


def test_inductor_is_bitwise_equal_on_integers(ranks: Pool) -> None:
    expected = train(TIED_MLP.model(), TIED_MLP)
    for stage, traces in traces_by_stage(ranks, TIED_MLP, 2, backend="inductor").items():
        assert differences(traces, expected) == [], f"stage {stage}"


def test_inductor_trains_gpt(ranks: Pool) -> None:
    expected = train(GPT.model(), GPT)
    (traces,) = traces_by_stage(ranks, GPT, 2, stages=(3,), backend="inductor").values()
    assert differences(traces, expected, FP32_TOLERANCE) == []


def compare_with_average_by_hand(rank: int, world: int, name: str, tolerance: float) -> list[str]:
    case = case_named(name)
    # A whole copy on this rank's rows: for what each rank does on its own, such as buffers.
    expected = train(case.model(), case, rank, world, after_backward=lambda model: averaged(gradients(model), world))
    found = []
    for stage in STAGES:
        with at_stage(stage):
            model = compiled(case, stage)
            trace = train(model, case, rank, world)
            found += [f"stage {stage}, {text}" for text in differences([trace], expected, tolerance)]
            found += [f"stage {stage}, {text}" for text in named_differences("buffer", trace.buffers, expected.buffers, tolerance)]
            model.eval()
            whole_copy = case.model().eval()
            whole_copy.load_state_dict({**expected.parameters[-1], **expected.buffers}, strict=False)
            inputs = case.batch(3).part(rank, world).inputs
            text = difference(model(*inputs), whole_copy(*inputs), tolerance)
            found += [f"stage {stage}, output in eval: {text}"] if text else []
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_changed_buffers_are_those_of_each_rank(ranks: Pool, world: int) -> None:
    assert ranks.run(compare_with_average_by_hand, world, COUNTED.name, 0.0) == [[]] * world


def test_batch_norm(ranks: Pool) -> None:
    assert ranks.run(compare_with_average_by_hand, 2, NORMALISED.name, FP32_TOLERANCE) == [[]] * 2


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def averaged(gradients: dict[str, Tensor | None], world: int) -> dict[str, Tensor | None]:
    for gradient in gradients.values():
        assert gradient is not None
        dist.all_reduce(gradient)
        gradient /= world
    return gradients


def gradients_under_dropout(rank: int, world: int) -> list[tuple[list[str], Tensor]]:
    """At each stage, compare with autograd through the mask that the compiled forward drew; also give that mask."""
    torch.manual_seed(0)
    plain = Dropped()
    torch.manual_seed(100 + rank)
    x = torch.randn(8, 6)
    found = []
    for stage in STAGES:
        with at_stage(stage):
            model = zerofx.compile(copy.deepcopy(plain), stage=stage, backend="aot_eager")
            output, kept = model(x)
            output.square().mean().backward()
            mask = (kept != 0).float()
            plain.second(plain.first(x) * mask * 2).square().mean().backward()
            expected = averaged(whole_gradients(plain), world)
            plain.zero_grad()
            found.append((named_differences("gradient of", whole_gradients(model), expected, FP32_TOLERANCE), mask))
    return found


def test_backward_uses_the_dropout_mask_of_its_forward(ranks: Pool) -> None:
    for first, second in zip(*ranks.run(gradients_under_dropout, 2), strict=True):
        assert first[0] == second[0] == []
        assert all(0.35 < mask.mean() < 0.65 for mask in (first[1], second[1]))
        assert not torch.equal(first[1], second[1])
