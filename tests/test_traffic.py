"""What moves is what D4's table says and what the schedule predicts: counted in the running step, and in the graph."""

import functools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerofx
from tests.ranks import Pool
from tests.stages import STAGES, at_stage
from zerofx.config import Config
from zerofx.program import Program
from zerofx.regions import is_boundary
from zerofx.traffic import TrafficCounter

_WIDTH = 48  # divides by every world size here, so that no shard is padded


def _model() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())], nn.Linear(_WIDTH, 24))


def _optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int, hold: bool) -> None:
    for number in range(micro_batches):
        loss = model(torch.randn(4, _WIDTH)).square().mean()
        if hold and number < micro_batches - 1:
            with zerofx.no_sync(model):
                loss.backward()
        else:
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _collectives(program: Program) -> dict[str, int]:
    nodes = [node for node in program.graph.nodes if is_boundary(node) and isinstance(node.target, torch._ops.OpOverload)]
    return dict(Counter(node.target._schema.name.rpartition("::")[2] for node in nodes))


def _count(rank: int, world: int, micro_batches: int) -> list[dict[str, object]]:
    found = []
    for stage in STAGES:
        with at_stage(stage):
            torch.manual_seed(0)
            model = zerofx.compile(_model(), stage=stage, backend="aot_eager")
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            _optimizer_step(model, optimizer, micro_batches, hold=True)
            with TrafficCounter(world) as counter:
                _optimizer_step(model, optimizer, micro_batches, hold=True)
            (compilation,) = model._zerofx.runtime.compilations
            graphs = {
                phase: Counter(
                    node.target._schema.name.rpartition("::")[2]
                    for node in program.graph.nodes
                    if is_boundary(node) and hasattr(node.target, "_schema")
                )
                for phase, program in compilation.lowered.items()
            }
            found.append(
                {
                    "sent": counter.sent_bytes,
                    "predicted": zerofx.schedule(model).traffic_bytes,
                    "launches": counter.launches,
                    "graphs": graphs,
                    "bytes": sum(parameter.numel() * 4 for parameter in model.parameters()),
                }
            )
    return found


ByRank = list[list[dict[str, object]]]


@pytest.fixture(scope="module")
def counted(ranks: Pool) -> Callable[[int, int], ByRank]:
    """What `_count` finds, to be read only: every test that asks for the same ranks and micro-batches gets the same."""
    return functools.cache(lambda world, micro_batches: ranks.run(_count, world, micro_batches))


@pytest.mark.parametrize(("world", "micro_batches"), [(2, 1), (2, 4), (4, 4)])
def test_bytes_sent_are_those_of_the_table(counted: Callable[[int, int], ByRank], world: int, micro_batches: int) -> None:
    for by_stage in counted(world, micro_batches):
        for stage, found in zip(STAGES, by_stage, strict=True):
            share = found["bytes"] * (world - 1) // world
            sent = found["sent"]
            assert sent["all_reduce"] == (2 * share if stage == 0 else 0), stage
            assert sent["reduce_scatter"] == {0: 0, 1: share, 2: micro_batches * share, 3: micro_batches * share}[stage], stage
            if stage < 3:
                assert sent["all_gather"] == (share if stage else 0), stage
            else:
                assert micro_batches * share < sent["all_gather"] <= 2 * micro_batches * share


def test_prediction_is_exact(counted: Callable[[int, int], ByRank]) -> None:
    for by_stage in counted(2, 1):
        for found in by_stage:
            assert found["sent"] == found["predicted"]


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_launches_are_those_of_the_graphs(counted: Callable[[int, int], ByRank], micro_batches: int) -> None:
    kinds = {"all_gather_into_tensor_out": "all_gather", "all_to_all_single": "reduce_scatter", "all_reduce": "all_reduce"}
    for by_stage in counted(2, micro_batches):
        for stage, found in zip(STAGES, by_stage, strict=True):
            graphs, launches = found["graphs"], dict(found["launches"])
            refreshes = launches.pop("all_gather", 0) if stage in (1, 2) else 0
            assert (refreshes > 0) is (stage in (1, 2))
            expected: Counter[str] = Counter()
            for phase, times in _runs(stage, micro_batches, set(graphs)).items():
                for name, count in graphs[phase].items():
                    if name in kinds:
                        expected[kinds[name]] += times * count
            assert Counter(launches) == expected, stage


def _runs(stage: int, micro_batches: int, phases: set[str]) -> dict[str, int]:
    """How often each lowered graph runs in one optimizer step under ``_optimizer_step``."""
    if stage >= 2 or micro_batches == 1:
        return {"forward": micro_batches, "backward": micro_batches}
    assert phases == {"forward", "backward", "backward, keep", "backward, reduce_kept"}
    return {"forward": micro_batches, "backward, keep": micro_batches - 1, "backward, reduce_kept": 1}


def _with_whole(rank: int, world: int, backend: str, keep_whole_bytes: int) -> tuple[object, object, int]:
    torch.manual_seed(0)
    model = zerofx.compile(_model(), config=Config(stage=3, backend=backend, keep_whole_bytes=keep_whole_bytes))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _optimizer_step(model, optimizer, 4, hold=False)
    with TrafficCounter(world) as counter:
        _optimizer_step(model, optimizer, 4, hold=False)
    return counter.sent_bytes, zerofx.schedule(model).traffic_bytes, zerofx.schedule(model).peak_whole_bytes


def test_parameters_that_stay_whole_are_gathered_once_in_a_step(ranks: Pool) -> None:
    most = 4 * 2 * (_WIDTH + 1) * _WIDTH  # the first two layers
    for sent, predicted, peak_bytes in ranks.run(_with_whole, 2, "aot_eager", most + 100):
        options = {"world_size": 2, "stage": 3, "backend": "aot_eager", "micro_batches": 4}
        plans = {size: zerofx.plan(_model(), (torch.randn(4, _WIDTH),), keep_whole_bytes=size, **options) for size in (0, most)}
        assert sent == plans[most].traffic_bytes
        # the second layer's weight is read in four forwards and four backwards, the others of the two in four forwards
        saved = 3 * most + 4 * 4 * _WIDTH * _WIDTH
        assert plans[0].traffic_bytes["all_gather"] - sent["all_gather"] == saved // 2
        assert predicted["all_gather"] == plans[most].schedule.traffic_bytes["all_gather"]
        assert peak_bytes == plans[most].schedule.peak_whole_bytes


def _eval_moves_nothing(rank: int, world: int) -> list[int]:
    moved = []
    for stage in (1, 2):
        with at_stage(stage):
            model = zerofx.compile(_model(), stage=stage, backend="aot_eager")
            _optimizer_step(model, torch.optim.SGD(model.parameters(), 0.1), 1, hold=False)
            with torch.no_grad():
                model(torch.randn(4, _WIDTH))
                with TrafficCounter(dist.get_world_size()) as counter:
                    model(torch.randn(4, _WIDTH))
            moved.append(sum(counter.sent_bytes.values()))
    return moved


def test_fresh_whole_copies_move_nothing(ranks: Pool) -> None:
    assert ranks.run(_eval_moves_nothing, 2) == [[0, 0], [0, 0]]


def _bytes_by_dtype(
    rank: int, world: int, stage: int, backend: str, param: torch.dtype | None, reduce: torch.dtype
) -> tuple[object, object]:
    with at_stage(stage):
        precision = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        model = zerofx.compile(_model(), stage=stage, backend=backend, precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        _optimizer_step(model, optimizer, 1, hold=False)
        with TrafficCounter(world) as counter:
            _optimizer_step(model, optimizer, 1, hold=False)
        return counter.sent_bytes, zerofx.schedule(model).traffic_bytes


@pytest.mark.parametrize("backend", ["aot_eager", "hooks"])
@pytest.mark.parametrize(("param", "reduce"), [(torch.bfloat16, torch.float32), (None, torch.bfloat16)])
def test_reductions_are_predicted_in_their_own_dtype(ranks: Pool, backend: str, param: torch.dtype | None, reduce: torch.dtype) -> None:
    for stage in (0, 3):
        for sent, predicted in ranks.run(_bytes_by_dtype, 2, stage, backend, param, reduce):
            assert sent == predicted, stage
