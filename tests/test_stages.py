"""What users do between forwards, backwards and steps, at every stage, beside one process that does the same."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.models import FROZEN, TIED_MLP, Batch, Case, case_named
from tests.ranks import Pool
from tests.reference import backward, named_differences, sgd, train, whole, whole_gradients, whole_parameters
from tests.stages import STAGES, TIGHT, at_stage, compiled
from zerofx.config import Config

# Divides by worlds 2 and 3, each part again by four micro-batches.
ROWS = 24


@dataclass
class Record:
    """What a scenario shows: tensors with the rows of this rank, and whole tensors that all ranks share."""

    rows: list[Tensor] = field(default_factory=list)
    shared: list[dict[str, Tensor | None]] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """One model on its way through a scenario: a rank's compiled one, or the whole one of the reference."""

    model: nn.Module
    case: Case
    rank: int = 0
    world: int = 1
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext

    def batch(self, step: int, rows: int = ROWS) -> Batch:
        """This rank's rows of a step's batch."""
        return self.case.batch(step, rows).part(self.rank, self.world)

    def micro(self, step: int, index: int, count: int = 4) -> Batch:
        """This rank's rows of one of the micro-batches that a step's batch is cut into."""
        return self.case.batch(step, ROWS).part(index, count).part(self.rank, self.world)

    def loss(self, batch: Batch) -> Tensor:
        return self.case.loss(self.model(*batch.inputs), batch.target, self.world)

    def backward(self, batch: Batch) -> None:
        backward(self.model, self.case, batch, self.world)


Scenario = Callable[[Run, Record], None]


@contextmanager
def step_after(run: Run, record: Record) -> Iterator[None]:
    """Record the gradients that the block leaves, take an optimizer step, and record the parameters."""
    yield
    record.shared.append(whole_gradients(run.model))
    optimizer = sgd(run.model, run.case.learning_rate)
    optimizer.step()
    optimizer.zero_grad()
    record.shared.append(dict(whole_parameters(run.model)))


def accumulate_under_no_sync(run: Run, record: Record) -> None:
    for step in range(2):
        with step_after(run, record):
            with run.no_sync():
                for index in range(3):
                    run.backward(run.micro(step, index))
            run.backward(run.micro(step, 3))


def accumulate_with_only_backward_under_no_sync(run: Run, record: Record) -> None:
    for step in range(2):
        with step_after(run, record):
            losses = [run.loss(run.micro(step, index)) for index in range(4)]
            with run.no_sync():
                for loss in losses[:3]:
                    loss.backward()
            losses[3].backward()


def accumulate_by_plain_backwards(run: Run, record: Record) -> None:
    for step in range(2):
        with step_after(run, record):
            for index in range(4):
                run.backward(run.micro(step, index))
                # After a backward outside no_sync the gradient is right at once, not only at the last micro-batch.
                record.shared.append(whole_gradients(run.model))


def accumulate_in_alternation(run: Run, record: Record) -> None:
    with step_after(run, record):
        for index in range(4):
            with run.no_sync() if index in (0, 2) else nullcontext():
                run.backward(run.micro(0, index))
    with step_after(run, record):
        run.backward(run.batch(1))


def forget_what_was_accumulated(run: Run, record: Record) -> None:
    with run.no_sync():
        run.backward(run.batch(0))
    run.model.zero_grad()
    with step_after(run, record):
        run.backward(run.batch(1))


def leave_no_sync_by_an_exception(run: Run, record: Record) -> None:
    with step_after(run, record):
        with suppress(KeyError), run.no_sync():
            run.backward(run.micro(0, 0, 2))
            raise KeyError
        run.backward(run.micro(0, 1, 2))


def zero_in_place(run: Run, record: Record) -> None:
    for step in range(2):
        with step_after(run, record):
            run.backward(run.batch(2))
            run.model.zero_grad(set_to_none=False)
            run.backward(run.batch(step))


def two_forwards_then_two_backwards(run: Run, record: Record) -> None:
    for step, order in enumerate((1, -1)):
        with step_after(run, record):
            losses = [run.loss(run.micro(step, index, 2)) for index in range(2)]
            for loss in losses[::order]:
                loss.backward()
    with step_after(run, record):
        first, second = (run.loss(run.micro(2, index, 2)) for index in range(2))
        (first + second).backward()


def evaluate_between_steps(run: Run, record: Record) -> None:
    for step, context in enumerate((torch.inference_mode, torch.no_grad, torch.enable_grad)):
        run.model.eval()
        with context():
            # The very first call of the model is in inference mode: what it leaves must serve training.
            record.rows.append(run.model(*run.batch(3).inputs).detach().clone())
        run.model.train()
        with step_after(run, record):
            run.backward(run.batch(step))
    with torch.no_grad():
        record.rows.append(run.model(*run.batch(3).inputs).clone())


def evaluate_between_forward_and_backward(run: Run, record: Record) -> None:
    for step in range(2):
        with step_after(run, record):
            loss = run.loss(run.batch(step))
            with torch.no_grad():
                record.rows.append(run.model(*run.batch(3).inputs).clone())
            loss.backward()


def change_the_batch_size(run: Run, record: Record) -> None:
    for step, rows in enumerate((12, 24, 6, 24, 36)):
        run.backward(run.batch(step, rows))
        record.shared.append(whole_gradients(run.model))
        if step != 1:
            run.model.zero_grad()
        else:
            with step_after(run, record):
                run.backward(run.batch(step, rows=18))


def edit_parameters_in_place(run: Run, record: Record) -> None:
    for step in range(2):
        with step_after(run, record):
            run.backward(run.batch(step))
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(-1)
            record.rows.append(run.model(*run.batch(3).inputs).clone())


def differentiate_the_input(run: Run, record: Record) -> None:
    with step_after(run, record):
        batch = run.batch(0)
        batch.inputs[0].requires_grad_()
        run.backward(batch)
        gradient = batch.inputs[0].grad
        assert gradient is not None
        # The loss of a rank is times the world, the gradient of its own input is not averaged.
        record.rows.append(gradient / run.world)


SCENARIOS: tuple[Scenario, ...] = (
    accumulate_under_no_sync,
    accumulate_with_only_backward_under_no_sync,
    accumulate_by_plain_backwards,
    accumulate_in_alternation,
    forget_what_was_accumulated,
    leave_no_sync_by_an_exception,
    zero_in_place,
    two_forwards_then_two_backwards,
    evaluate_between_steps,
    evaluate_between_forward_and_backward,
    change_the_batch_size,
    edit_parameters_in_place,
    differentiate_the_input,
)


def records_at_stages(
    rank: int, world: int, name: str, scenario: Scenario, stages: tuple[int, ...], settings: dict[str, Any]
) -> list[Record]:
    case = case_named(name)
    records = []
    for stage in stages:
        with at_stage(stage), warnings.catch_warnings():
            # a scenario that changes the order of submodules is told so once
            warnings.filterwarnings("ignore", "zerofx hooks: ")
            model = zerofx.compile(case.model(), config=Config(stage=stage, **settings))
            record = Record()
            scenario(Run(model, case, rank, world, lambda model=model: zerofx.no_sync(model)), record)
            records.append(record)
    return records


def record_differences(records: list[Record], expected: Record) -> list[str]:
    """Compare bitwise, with the rows of all ranks put together."""
    found = []
    for rank, record in enumerate(records):
        for index, (actual, wanted) in enumerate(zip(record.shared, expected.shared, strict=True)):
            found += named_differences(f"rank {rank}, record {index},", actual, wanted)
    for index, (parts, total) in enumerate(zip(zip(*(record.rows for record in records), strict=True), expected.rows, strict=True)):
        found += named_differences(f"record {index},", {"rows": torch.cat(parts)}, {"rows": total})
    return found


@pytest.mark.parametrize("settings", [{"backend": "aot_eager"}, {"backend": "hooks", "hooks": TIGHT}], ids=["compiled", "hooks"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario_is_bitwise_equal_to_one_process(ranks: Pool, scenario: Scenario, settings: dict[str, Any]) -> None:
    # Three ranks have uneven shards: of whole copies at stage 1, of gathered parameters at stage 3.
    for world, case, stages in ((2, FROZEN, STAGES), (3, TIED_MLP, (1, 3))):
        expected = Record()
        scenario(Run(case.model(), case), expected)
        by_rank = ranks.run(records_at_stages, world, case.name, scenario, stages, settings)
        for stage, records in zip(stages, zip(*by_rank, strict=True), strict=True):
            assert record_differences(list(records), expected) == [], f"world {world}, stage {stage}"


@pytest.mark.parametrize("settings", [{"backend": "aot_eager"}, {"backend": "hooks", "hooks": TIGHT}], ids=["compiled", "hooks"])
def test_parameters_that_stay_whole_change_nothing(ranks: Pool, settings: dict[str, Any]) -> None:
    for scenario in (accumulate_by_plain_backwards, evaluate_between_forward_and_backward, edit_parameters_in_place):
        for world, case in ((2, FROZEN), (3, TIED_MLP)):
            expected = Record()
            scenario(Run(case.model(), case), expected)
            half = sum(param.nbytes for param in case.model().parameters()) // 2
            by_rank = ranks.run(records_at_stages, world, case.name, scenario, (3,), {**settings, "keep_whole_bytes": half})
            assert record_differences([records[0] for records in by_rank], expected) == [], f"{scenario.__name__}, world {world}"


class Twice(nn.Module):
    """Two layers whose gradients are equal, which a graph computes once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def add_up_equal_gradients(rank: int, world: int) -> list[list[Tensor]]:
    found = []
    for stage in (0, 1, 3):
        model = zerofx.compile(Twice(), stage=stage, backend="aot_eager")
        for index in range(4):
            with nullcontext() if index == 3 else zerofx.no_sync(model):
                model(torch.ones(1, 2)).sum().backward()
        found.append([gradient for gradient in whole_gradients(model).values() if gradient is not None])
    return found


def test_equal_gradients_add_up_apart(ranks: Pool) -> None:
    for world in (1, 2):
        for gradients in itertools.chain(*ranks.run(add_up_equal_gradients, world)):
            assert [gradient.unique().tolist() for gradient in gradients] == [[4.0]] * 4, f"world {world}"


def train_at_changing_stages(rank: int, world: int) -> list[list[Tensor]]:
    """Train two models at different stages in turn, step by step."""
    models = [compiled(TIED_MLP, stage) for stage in STAGES]
    runs = [Run(model, TIED_MLP, rank, world) for model in models]
    for step in range(3):
        for run in runs:
            with step_after(run, Record()):
                run.backward(run.batch(step, 12))
    return [list(whole_parameters(model).values()) for model in models]


def test_models_at_different_stages_do_not_meet(ranks: Pool) -> None:
    expected = list(train(TIED_MLP.model(), TIED_MLP).parameters[-1].values())
    for models in ranks.run(train_at_changing_stages, 2):
        for parameters in models:
            assert all(torch.equal(actual, wanted) for actual, wanted in zip(parameters, expected, strict=True))


def add_to_reduced(rank: int, world: int) -> list[str]:
    """Gather up under ``no_sync``, on one rank only, beside gradients that are reduced already, and beside zeros; then reduce."""
    found = []
    for backend, stage in itertools.product(("hooks", "aot_eager"), (0, 1)):
        torch._dynamo.reset()
        model = zerofx.compile(nn.Linear(4, 3, bias=False), config=Config(stage=stage, backend=backend))
        for before in (1.0, 0.0) if stage == 1 else (0.0,):
            model.zero_grad(set_to_none=False)
            model(torch.full((1, 4), before)).sum().backward()
            with zerofx.no_sync(model) if rank == 0 else nullcontext():
                if rank == 0:
                    model(torch.full((1, 4), 2.0)).sum().backward()
            model(torch.full((1, 4), 4.0)).sum().backward()
            expected = torch.full((3, 4), before + 2.0 / world + 4.0)
            found += [] if whole(model.weight.grad).equal(expected) else [f"{backend}, stage {stage}, {before}: {whole(model.weight.grad)}"]
    return found


def test_gradients_that_gather_up_take_reduced_ones_along(ranks: Pool) -> None:
    assert ranks.run(add_to_reduced, 2, timeout_s=60.0) == [[]] * 2
