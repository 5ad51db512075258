"""Checkpoints: what broke in public reports, and the right answer. Each test names its reports."""

import io
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import zerofx
from tests.models import Case, case_named
from tests.ranks import Failure, Pool
from tests.reference import adamw, backward, named_differences, sgd, train, whole_parameters
from tests.stages import STAGES, at_stage, compiled
from tests.test_bad_input import assert_four_parts, failure_of

TIED = case_named("tied_embedding")


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, numbers: range, rank: int = 0, world: int = 1) -> None:
    for number in numbers:
        backward(model, case, case.batch(number).part(rank, world), world)
        optimizer.step()
        optimizer.zero_grad()


def export_tied(rank: int, world: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    found = []
    for stage, backend in ((0, "hooks"), (1, "hooks"), (2, "hooks"), (3, "aot_eager")):
        with at_stage(stage):
            model = compiled(TIED, stage, backend=backend)
            train(model, TIED, rank, world, steps=2)
            with torch.inference_mode():
                state = zerofx.full_state_dict(model)
                found.append((state, model(*TIED.batch(5).inputs).clone()))
    return found


def test_a_tied_head_is_in_the_export_under_both_names(ranks: Pool) -> None:
    """DeepSpeed issue 1896 (the tied key is missing, or holds another tensor); accelerate PR 4171, NeMo RL issue 227 (untied)."""
    expected = TIED.model()
    train(expected, TIED, steps=2)
    for found in ranks.run(export_tied, 2):
        for state, logits in found:
            plain = TIED.model(1)
            plain.load_state_dict(state, strict=True)
            assert list(state) == list(plain.state_dict())
            assert torch.equal(state["head.weight"], state["embedding.weight"])
            assert torch.equal(state["embedding.weight"], expected.embedding.weight)
            assert torch.equal(plain(*TIED.batch(5).inputs), logits)
            assert not any(value.is_inference() for value in state.values())


def two_values_for_one_parameter(rank: int, world: int, directory: str) -> list[Any]:
    found: list[Any] = []
    state = dict(TIED.model(3).state_dict())
    differing = {**state, "head.weight": state["head.weight"] + 1}
    equal = {**state, "head.weight": state["head.weight"].clone()}
    untied = TIED.model(3)
    untied.head.weight = nn.Parameter(untied.head.weight.detach() + 1)
    zerofx.save(f"{directory}/untied", zerofx.compile(untied, stage=3, backend="hooks"))
    for stage in STAGES:
        model = zerofx.compile(TIED.model(), stage=stage, backend="hooks")
        before = whole_parameters(model)
        found.append(failure_of(lambda model=model: model.load_state_dict(differing)))
        found.append(failure_of(lambda model=model: zerofx.load(f"{directory}/untied", model)))
        found.append(named_differences("after errors", whole_parameters(model), before))
        model.load_state_dict(equal)
        assert model.head.weight is model.embedding.weight
        found.append(named_differences("equal", whole_parameters(model), dict(TIED.model(3).named_parameters())))
    return found


def test_a_tied_parameter_takes_one_value(ranks: Pool, tmp_path: Path) -> None:
    """accelerate issue 3870: a checkpoint with two tensors for what the model ties."""
    for found in ranks.run(two_values_for_one_parameter, 2, str(tmp_path)):
        for index in range(0, len(found), 4):
            for failure in found[index : index + 2]:
                assert_four_parts(failure, "CheckpointError", "embedding.weight", "head.weight")
            assert found[index + 2 : index + 4] == [[], []]


def stay_tied(rank: int, world: int, directory: str) -> list[tuple[bool, int]]:
    found = []
    for stage in (1, 2, 3):
        models = [zerofx.compile(TIED.model(seed), stage=stage, backend="hooks") for seed in (0, 1)]
        optimizers = [adamw(model, 0.1) for model in models]
        steps(models[0], optimizers[0], TIED, range(4), rank, world)
        zerofx.save(f"{directory}/{stage}", models[0], optimizers[0])
        zerofx.load(f"{directory}/{stage}", models[1], optimizers[1])
        steps(models[1], optimizers[1], TIED, range(4, 5), rank, world)
        state = zerofx.full_state_dict(models[1])
        found.append((torch.equal(state["head.weight"], state["embedding.weight"]), len(optimizers[1].state)))
    return found


def test_tied_parameters_stay_tied_with_one_optimizer_state(ranks: Pool, tmp_path: Path) -> None:
    """NeMo RL issue 227."""
    count = len(list(TIED.model().parameters()))
    assert ranks.run(stay_tied, 2, str(tmp_path)) == [[(True, count)] * 3] * 2


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.nn.functional.dropout(self.first(x), 0.5, self.training))


def continue_twice(rank: int, world: int, directory: str) -> list[list[str]]:
    found = []
    for stage, backend in ((3, "aot_eager"), (2, "hooks")):
        torch.manual_seed(3)
        model = zerofx.compile(Dropping(), stage=stage, backend=backend)
        optimizer = sgd(model, 0.1)
        torch.manual_seed(rank)
        torch.rand(5 * rank + 1)
        zerofx.save(f"{directory}/{stage}", model, optimizer)

        def go_on(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> dict[str, Tensor]:
            for _ in range(2):
                model(torch.ones(4, 6)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return {**whole_parameters(model), "mask": torch.rand(4)}

        first = go_on()
        zerofx.load(f"{directory}/{stage}", model, optimizer)
        found.append(named_differences(f"stage {stage}", go_on(), first))
    return found


def test_every_rank_gets_its_own_random_state_back(ranks: Pool, tmp_path: Path) -> None:
    """miles PR 3187: the random state of rank 0 on all ranks."""
    assert ranks.run(continue_twice, 2, str(tmp_path)) == [[[], []], [[], []]]


def freeze(model: nn.Module, frozen: bool) -> None:
    model.layers[1].requires_grad_(not frozen)


def train_then_freeze(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, rank: int = 0, world: int = 1) -> None:
    steps(model, optimizer, case, range(1), rank, world)
    freeze(model, True)
    steps(model, optimizer, case, range(1, 2), rank, world)


def make_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.5, momentum=0.5)


def save_while_frozen(rank: int, world: int, directory: str) -> list[str]:
    case, found = case_named("tied_mlp"), []
    for stage in (1, 3):
        model = zerofx.compile(case.model(), stage=stage, backend="hooks")
        optimizer = make_momentum(model)
        train_then_freeze(model, optimizer, case, rank, world)
        zerofx.save(f"{directory}/{stage}", model, optimizer)
        again = zerofx.compile(case.model(1), stage=4 - stage, backend="hooks")
        other = make_momentum(again)
        freeze(again, True)
        zerofx.load(f"{directory}/{stage}", again, other)
        freeze(again, False)
        steps(again, other, case, range(2, 3), rank, world)
        expected = case.model()
        reference = make_momentum(expected)
        train_then_freeze(expected, reference, case)
        freeze(expected, False)
        steps(expected, reference, case, range(2, 3))
        found += named_differences(f"stage {stage}", whole_parameters(again), whole_parameters(expected))
    return found


def test_state_of_what_was_frozen_after_training_survives(ranks: Pool, tmp_path: Path) -> None:
    """pytorch issue 192202."""
    assert ranks.run(save_while_frozen, 2, str(tmp_path)) == [[], []]


def continue_adam(rank: int, world: int, directory: str) -> list[Any]:
    case = case_named("smooth_mlp")
    model = zerofx.compile(case.model(), stage=3, backend="hooks")
    optimizer = adamw(model, 0.1)
    zerofx.save(f"{directory}/fresh", model, optimizer)
    assert not optimizer.state, "a save made state, and with it a step"
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    steps(model, optimizer, case, range(3), rank, world)
    scheduler.step()
    zerofx.save(f"{directory}/model", model, optimizer, scheduler=scheduler)
    again = zerofx.compile(case.model(1), stage=2, backend="hooks")
    other = adamw(again, 7.0)
    extras = zerofx.load(f"{directory}/fresh", again, other)
    fresh = dict(other.state)
    extras = zerofx.load(f"{directory}/model", again, other)
    later = torch.optim.lr_scheduler.ExponentialLR(other, 0.1)
    later.load_state_dict(extras["scheduler"])
    counts = {state["step"].item() for state in other.state.values()}
    options = [(group["lr"], group["weight_decay"]) for group in other.param_groups]
    for one, held in ((model, optimizer), (again, other)):
        steps(one, held, case, range(3, 4), rank, world)
    later.step()
    return [fresh, counts, options, named_differences("", whole_parameters(again), whole_parameters(model)), later.get_last_lr()]


def test_step_counters_and_options_come_back_exactly(ranks: Pool, tmp_path: Path) -> None:
    """accelerate issue 3971, DeepSpeed PR 4396 (no step counter); Megatron-LM PR 5976 (a counter ahead by a dummy step)."""
    for found in ranks.run(continue_adam, 2, str(tmp_path)):
        assert found == [{}, {3.0}, [(0.05, 0.1), (0.05, 0.0)], [], [0.025, 0.025]]


def half_frozen() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(torch.bfloat16)
    model[0].requires_grad_(False)
    return model


def export_half_frozen(rank: int, world: int) -> list[Any]:
    found: list[Any] = []
    for stage in (0, 1, 3):
        model = zerofx.compile(half_frozen(), stage=stage, backend="hooks")
        found.append([zerofx.full_state_dict(model, dtype=dtype) for dtype in (None, torch.float32)])
        only_first = zerofx.full_state_dict(model, rank0_only=True)
        found[-1].append(only_first if rank == 0 else found[-1][0])
        assert rank == 0 or only_first == {}
    return found


def test_frozen_weights_are_exported_whole_and_in_the_dtype_asked_for(ranks: Pool) -> None:
    """DeepSpeed PR 3205 (frozen weights of size 0), PR 8378 (bf16 in the fp32 export)."""
    plain = half_frozen().state_dict()
    for found in ranks.run(export_half_frozen, 2):
        for own, single, only_first in found:
            for state, dtype in ((own, torch.bfloat16), (single, torch.float32), (only_first, torch.bfloat16)):
                assert list(state) == list(plain)
                for name, value in plain.items():
                    expected = value.to(dtype) if value.is_floating_point() else value
                    assert (state[name].dtype, torch.equal(state[name], expected)) == (expected.dtype, True), name
                half_frozen().to(dtype).load_state_dict(state, strict=True)


def keys_after_compile(rank: int, world: int) -> list[tuple[list[str], list[str]]]:
    found = []
    for backend in ("hooks", "aot_eager"):
        model = compiled(TIED, 3, backend=backend)
        model.load_state_dict(TIED.model(2).state_dict(), strict=True)
        model(*TIED.batch(0).inputs)
        outer = torch.compile(model, backend="zerofx")
        plain = TIED.model()
        plain.load_state_dict(zerofx.full_state_dict(model), strict=True)
        assert isinstance(outer, nn.Module)
        found.append(
            (list(model.state_dict()), named_differences("", dict(plain.named_parameters()), dict(TIED.model(2).named_parameters())))
        )
    return found


def test_keys_are_those_of_the_plain_model(ranks: Pool) -> None:
    """torchtitan issue 2622, nanoGPT issue 325, pytorch issue 101107: prefixes of wrappers in keys."""
    for found in ranks.run(keys_after_compile, 2):
        assert found == [(list(TIED.model().state_dict()), [])] * 2


def save_in_dtypes(rank: int, world: int) -> dict[torch.dtype | None, int]:
    torch.manual_seed(0)
    model = zerofx.compile(nn.Linear(256, 256), stage=3, backend="hooks")
    sizes = {}
    for dtype in (None, torch.bfloat16, torch.float64):
        file = io.BytesIO()
        torch.save(zerofx.full_state_dict(model, dtype=dtype), file)
        sizes[dtype] = len(file.getvalue())
        file.seek(0)
        nn.Linear(256, 256, dtype=dtype).load_state_dict(torch.load(file), strict=True)
    return sizes


def test_an_export_has_the_size_of_its_dtype(ranks: Pool) -> None:
    """transformers issue 33780, PR 34524; accelerate issue 2289: fp32 files of bf16 models, and files without weights."""
    count = 256 * 257
    for sizes in ranks.run(save_in_dtypes, 2):
        for dtype, itemsize in ((None, 4), (torch.bfloat16, 2), (torch.float64, 8)):
            assert count * itemsize < sizes[dtype] < count * itemsize + 4096


def load_full_state(rank: int, world: int) -> list[Any]:
    found: list[Any] = []
    full = dict(TIED.model(4).state_dict())
    wrong = {**full, "scale": torch.ones(5)}
    lacking = {name: value for name, value in full.items() if name != "hidden.bias"} | {"extra": torch.ones(1)}
    for stage in STAGES:
        model = zerofx.compile(TIED.model(), stage=stage, backend="hooks")
        for state in (wrong, lacking):
            try:
                model.load_state_dict(state)
            except RuntimeError as error:
                found.append(str(error))
        found.append(tuple(model.load_state_dict(lacking, strict=False)))
        model.load_state_dict(full)
        found.append(named_differences("", whole_parameters(model), dict(TIED.model(4).named_parameters())))
    return found


def test_a_full_state_dict_loads_in_place_with_torchs_own_errors(ranks: Pool) -> None:
    """DeepSpeed issue 3574 (size mismatch with an empty shard); pytorch issue 148252 (strict=False)."""
    for found in ranks.run(load_full_state, 2):
        for index in range(0, len(found), 4):
            shape, keys, lists, differences = found[index : index + 4]
            assert "scale" in shape
            assert "torch.Size([5])" in shape
            assert "torch.Size([4])" in shape
            assert "hidden.bias" in keys
            assert "extra" in keys
            assert lists == (["hidden.bias"], ["extra"])
            assert differences == []


def save_alone(rank: int, world: int, directory: str) -> tuple[Failure | None, float, dict[str, Any]]:
    """One rank saves alone, while the others go on without a save; then all save, at the same names of steps."""
    model = zerofx.compile(TIED.model(), stage=3, backend="hooks")
    failures = []
    seconds = 0.0
    for alone in (0, 2):
        if rank == alone:
            started = time.monotonic()
            failures.append(failure_of(lambda: zerofx.save(f"{directory}/alone", model, timeout_s=0.5)))
            seconds = time.monotonic() - started
        torch.distributed.barrier()
    zerofx.save(f"{directory}/together", model, step=1)
    return (failures[0] if failures else None), seconds, zerofx.load(f"{directory}/together", model)


def test_a_save_by_one_rank_alone_is_an_error_in_time(ranks: Pool, tmp_path: Path) -> None:
    """DeepSpeed PR 801, issue 797: it hangs."""
    by_rank = ranks.run(save_alone, 3, str(tmp_path))
    for rank, missing in ((0, "ranks 1, 2"), (2, "ranks 0, 1")):
        failure, seconds, _ = by_rank[rank]
        assert failure is not None
        assert_four_parts(failure, "RankMismatchError", missing, "zerofx.save")
        # Half a second is what was asked for; the rest is for a machine that others use too.
        assert 0.5 <= seconds < 30
    assert [extras for *_, extras in by_rank] == [{"step": 1}] * 3


class Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that an operator gives."""

    def __init__(self) -> None:
        super().__init__()
        self.total_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not isinstance(result, DTensor):
            self.total_bytes = max(self.total_bytes, result.numel() * result.itemsize)
        return result


def export_from_shards(rank: int, world: int, directory: str) -> tuple[int, int]:
    model = zerofx.compile(nn.Linear(256, 250), stage=3, backend="hooks")
    zerofx.save(f"{directory}/model", model)
    with Largest() as export:
        zerofx.full_state_dict(model, rank0_only=True)
    with Largest() as load:
        zerofx.load(f"{directory}/model", model)
    return export.total_bytes, load.total_bytes


def test_other_ranks_hold_no_more_than_shards(ranks: Pool, tmp_path: Path) -> None:
    """fairscale issue 844, DeepSpeed issues 3582 and 1111: whole models in the memory of every rank while one of them saves."""
    shard_bytes = 63 * 256 * 4  # 250 rows on four ranks, the last with padding
    first, *others = ranks.run(export_from_shards, 4, str(tmp_path))
    assert first[0] == 4 * shard_bytes
    assert all(exported <= shard_bytes and loaded <= shard_bytes for exported, loaded in others)
