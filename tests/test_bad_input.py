"""Bad input is an error with four parts on every rank, and leaves the model as it was."""

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerofx
from tests.conftest import ENVIRONMENT
from tests.models import SEED, TIED_MLP
from tests.ranks import Failure, Pool, WarningFilter
from tests.reference import Trace, differences, train, whole
from tests.stages import compiled


def failure_of(action: Callable[[], Any]) -> Failure:
    """The zerofx error that the action raises; any other error, or none, fails the test."""
    try:
        action()
    except zerofx.ZerofxError as error:
        return Failure.of(error)
    raise AssertionError("no error was raised")


def assert_four_parts(failure: Failure, kind: str, *words: str) -> None:
    """The error is of this kind, says what, where, why and the remedy, and contains the words."""
    assert kind in failure.bases, failure.traceback
    assert all(failure.parts[part].strip() for part in ("what", "where", "why", "remedy")), failure.parts
    for word in words:
        assert word in failure.text


def signature(model: nn.Module) -> list[tuple[Any, ...]]:
    """What a failed compile must not change: classes, parameter objects, buffers, and their values."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    values = [None if tensor.is_meta or tensor.device.type != "cpu" else tensor.detach().clone() for _, tensor in tensors]
    classes = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    return [*classes, *((name, id(tensor), type(tensor), value) for (name, tensor), value in zip(tensors, values, strict=True))]


def same_signature(before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]) -> bool:
    return len(before) == len(after) and all(map(same_entry, before, after))


def same_entry(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    pairs = zip(before, after, strict=True)
    return all(torch.equal(old, new) if isinstance(old, Tensor) else old == new for old, new in pairs)


def refuse(model: nn.Module, **settings: Any) -> Failure:
    """Compile with bad settings, and check that the model is untouched."""
    before = signature(model)
    failure = failure_of(lambda: zerofx.compile(model, **{"backend": "aot_eager", **settings}))
    assert same_signature(before, signature(model)), "the model was changed by a compile that failed"
    return failure


def train_after(model: nn.Module, rank: int, world: int) -> Trace:
    """The model that was refused can still be compiled, and trains right."""
    return train(zerofx.compile(model, stage=3, backend="aot_eager"), TIED_MLP, rank, world)


BAD_SETTINGS: dict[str, dict[str, Any]] = {
    "stage 4": {"stage": 4},
    "stage -1": {"stage": -1},
    "stage text": {"stage": "3"},
    "stage bool": {"stage": True},
    "stage none": {"stage": None},
    "stage 2.0": {"stage": 2.0},
    "backend": {"backend": "no such backend"},
    "limit 0": {"memory_limit": 0},
    "limit negative": {"memory_limit": -5},
    "limit text": {"memory_limit": "a lot"},
    "hardware": {"hardware": "tpu"},
    "hardware of a wrong type": {"hardware": 5},
    "recompute text": {"recompute": "block"},
    "recompute pattern": {"recompute": ("layer.*",)},
    "recompute above 1": {"recompute": 1.5},
    "recompute negative": {"recompute": -1},
    "recompute of a wrong type": {"recompute": {"layers"}},
}


def refuse_bad_settings(rank: int, world: int) -> tuple[dict[str, Failure], Trace]:
    model = TIED_MLP.model()
    failures = {name: refuse(model, **settings) for name, settings in BAD_SETTINGS.items()}
    return failures, train_after(model, rank, world)


def test_bad_settings(ranks: Pool) -> None:
    by_rank = ranks.run(refuse_bad_settings, 2)
    for failures, _ in by_rank:
        for name, failure in failures.items():
            ((setting, value),) = BAD_SETTINGS[name].items()
            assert_four_parts(failure, "ConfigError", setting, repr(value))
            assert "ValueError" in failure.bases
    assert differences([trace for _, trace in by_rank], train(TIED_MLP.model(), TIED_MLP)) == []


def mesh_of_wrong_type(rank: int, world: int) -> Failure:
    return refuse(TIED_MLP.model(), stage=3, mesh="cpu")


def test_mesh_of_wrong_type(ranks: Pool) -> None:
    for failure in ranks.run(mesh_of_wrong_type, 2):
        assert_four_parts(failure, "ConfigError", "mesh", "str")


class WithoutParameters(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def partly_on_meta() -> nn.Module:
    model = TIED_MLP.model()
    model.get_submodule("layers.1").to("meta")
    return model


def on_two_devices() -> nn.Module:
    """One layer claims to be on a GPU: a fake tensor has a device and needs none."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with FakeTensorMode():
        model[1].weight = nn.Parameter(torch.empty(4, 4, device="cuda"))
    return model


def partly_scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))


def in_the_same_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    return model


BAD_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "no parameters": (WithoutParameters, ("no parameters",)),
    "partly meta": (partly_on_meta, ("layers.1.weight", "meta")),
    "two devices": (on_two_devices, ("1.weight", "cuda", "cpu")),
    "script": (partly_scripted, ("1 is a ScriptModule",)),
    "same memory": (in_the_same_memory, ("0.weight and 1.weight", "tie them")),
}


def refuse_bad_models(rank: int, world: int) -> tuple[dict[str, Failure], float]:
    failures = {name: refuse(build(), stage=3) for name, (build, _) in BAD_MODELS.items()}
    # No rank is left in the middle of an exchange: the next collective is matched.
    count = torch.ones(1)
    dist.all_reduce(count)
    return failures, count.item()


def test_bad_models(ranks: Pool) -> None:
    for failures, count in ranks.run(refuse_bad_models, 2):
        assert count == 2
        for name, failure in failures.items():
            assert_four_parts(failure, "ShardingError", *BAD_MODELS[name][1])


def not_a_module(rank: int, world: int) -> Failure:
    return failure_of(lambda: zerofx.compile(torch.nn.functional.relu, backend="aot_eager"))


def test_not_a_module(ranks: Pool) -> None:
    for failure in ranks.run(not_a_module, 2):
        assert_four_parts(failure, "ZerofxError", "torch.nn.Module")


def refuse_bad_meshes(rank: int, world: int) -> tuple[list[Failure], Trace]:
    model = TIED_MLP.model()
    meshes = [init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (1, 4)), init_device_mesh("cpu", (4, 1), mesh_dim_names=("a", "b"))]
    return [refuse(model, stage=3, mesh=mesh) for mesh in meshes], train_after(model, rank, world)


def test_mesh_of_wrong_dimension(ranks: Pool) -> None:
    by_rank = ranks.run(refuse_bad_meshes, 4)
    for failures, _ in by_rank:
        for failure in failures:
            assert_four_parts(failure, "ConfigError", "mesh", "2")
    assert differences([trace for _, trace in by_rank], train(TIED_MLP.model(), TIED_MLP)) == []


def train_on_mesh(rank: int, world: int) -> Trace:
    return train(compiled(TIED_MLP, 3, mesh=init_device_mesh("cpu", (world,))), TIED_MLP, rank, world)


def test_mesh_of_right_dimension(ranks: Pool) -> None:
    assert differences(ranks.run(train_on_mesh, 2), train(TIED_MLP.model(), TIED_MLP)) == []


def mesh_without_this_rank(rank: int, world: int) -> Failure | None:
    """Only ranks 0 and 1 are in the mesh; rank 2 must hear so, and the others must not wait for it."""
    mesh = DeviceMesh("cpu", [0, 1])
    if rank == 2:
        return refuse(TIED_MLP.model(), stage=3, mesh=mesh)
    zerofx.compile(TIED_MLP.model(), stage=3, mesh=mesh, backend="aot_eager")
    return None


def test_mesh_that_leaves_a_rank_out(ranks: Pool) -> None:
    failures = ranks.run(mesh_without_this_rank, 3)
    assert failures[:2] == [None, None]
    assert_four_parts(failures[2], "ConfigError", "mesh")


def no_process_group(rank: int, world: int) -> tuple[Failure, bool]:
    os.environ.update(WORLD_SIZE="2", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    return refuse(TIED_MLP.model(), stage=3), dist.is_initialized()


def test_no_process_group_where_there_should_be_one(ranks: Pool) -> None:
    ((failure, initialized),) = ranks.run(no_process_group, 1, group=False)
    assert_four_parts(failure, "ConfigError", "WORLD_SIZE", "init_process_group")
    assert not initialized


def step(model: nn.Module, rank: int, world: int) -> None:
    batch = TIED_MLP.batch(0).part(rank, world)
    TIED_MLP.loss(model(*batch.inputs), batch.target, world).backward()


def compile_and_step(rank: int, world: int, limit_bytes: int) -> None:
    step(compiled(TIED_MLP, 3, memory_limit=limit_bytes), rank, world)


def limits(rank: int, world: int) -> tuple[list[Failure], int, Trace]:
    """A limit of one byte, the limit that its message gives less one, and training with the limit that it gives."""
    first = failure_of(lambda: compile_and_step(rank, world, 1))
    smallest_bytes = max(int(word) for word in first.text.replace(",", "").replace("=", " ").split() if word.isdigit())
    second = failure_of(lambda: compile_and_step(rank, world, smallest_bytes - 1))
    trace = train(compiled(TIED_MLP, 3, memory_limit=smallest_bytes), TIED_MLP, rank, world)
    return [first, second], smallest_bytes, trace


def test_memory_limit_below_the_smallest_possible(ranks: Pool) -> None:
    by_rank = ranks.run(limits, 2)
    weight_bytes = 6 * 6 * 8
    for failures, smallest_bytes, _ in by_rank:
        # The largest single use is one layer; the model has three whole ones and cannot need them all at once.
        assert weight_bytes <= smallest_bytes < 3 * (weight_bytes + 6 * 8)
        for failure in failures:
            assert_four_parts(failure, "MemoryLimitError", str(smallest_bytes))
    assert differences([trace for *_, trace in by_rank], train(TIED_MLP.model(), TIED_MLP)) == []


def limit_after_the_fact(rank: int, world: int) -> list[Failure]:
    """A forward that cannot be scheduled raises every time it is called, and the shards are still there."""
    model = compiled(TIED_MLP, 3, memory_limit=1)
    failures = [failure_of(lambda: step(model, rank, world)) for _ in range(2)]
    with zerofx.gathered(model) as wholes:
        for name, parameter in TIED_MLP.model().named_parameters():
            assert torch.equal(wholes[name], parameter), name
    return failures


def test_a_refused_forward_is_refused_again(ranks: Pool) -> None:
    for failures in ranks.run(limit_after_the_fact, 2):
        assert failures[0].text == failures[1].text
        assert_four_parts(failures[0], "MemoryLimitError")


def other_width(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Sequential(nn.Linear(4, 5 + rank)), {}


def other_names(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.ModuleDict({f"layer_{rank}": nn.Linear(4, 4)}), {}


def one_more_layer(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + rank))), {}


def other_dtype(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(4, 4).to(torch.float64 if rank else torch.float32), {}


def other_requires_grad(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(4, 4).requires_grad_(rank == 0), {}


def other_buffers(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False) if rank else nn.Identity()), {}


def other_ties(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if rank:
        model[1].weight = model[0].weight
    return model, {}


def other_stage(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(4, 4), {"stage": 2 + rank}


def other_limit(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(4, 4), {"memory_limit": None if rank else 10**6}


def other_recompute(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Sequential(nn.Linear(4, 4)), {"recompute": "blocks" if rank else "selective"}


def bad_stage_on_one_rank(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(4, 4), {"stage": 7 if rank else 3}


def bad_model_on_one_rank(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return WithoutParameters() if rank else nn.Linear(4, 4), {}


def meta_on_one_rank(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(4, 4).to("meta") if rank else nn.Linear(4, 4), {}


DIFFERENT: tuple[Callable[[int], tuple[nn.Module, dict[str, Any]]], ...] = (
    other_width,
    other_names,
    one_more_layer,
    other_dtype,
    other_requires_grad,
    other_buffers,
    other_ties,
    other_stage,
    other_recompute,
    other_limit,
    meta_on_one_rank,
)
BAD_ON_ONE_RANK = (bad_stage_on_one_rank, bad_model_on_one_rank)


def refuse_ranks_that_differ(rank: int, world: int, make: Callable[[int], tuple[nn.Module, dict[str, Any]]]) -> Failure:
    """Only the last rank differs: all must hear of it, also those that agree with rank 0."""
    model, settings = make(1 if rank == world - 1 else 0)
    return refuse(model, **settings)


@pytest.mark.parametrize("make", DIFFERENT, ids=lambda make: make.__name__)
def test_ranks_that_differ(ranks: Pool, make: Callable[[int], tuple[nn.Module, dict[str, Any]]]) -> None:
    for failure in ranks.run(refuse_ranks_that_differ, 3, make):
        assert_four_parts(failure, "RankMismatchError", "rank 2")


@pytest.mark.parametrize("make", BAD_ON_ONE_RANK, ids=lambda make: make.__name__)
def test_bad_input_on_one_rank(ranks: Pool, make: Callable[[int], tuple[nn.Module, dict[str, Any]]]) -> None:
    *others, faulty = ranks.run(refuse_ranks_that_differ, 3, make)
    for failure in others:
        assert_four_parts(failure, "RankMismatchError", "rank 2", faulty.parts["what"])
    # The rank with the fault hears of the fault itself.
    assert "RankMismatchError" not in faulty.bases


def mismatch_names_the_difference(rank: int, world: int) -> Failure:
    model, settings = other_width(rank)
    return refuse(model, **settings)


def test_mismatch_names_the_parameter_that_differs(ranks: Pool) -> None:
    for failure in ranks.run(mismatch_names_the_difference, 2):
        assert_four_parts(failure, "RankMismatchError", "0.weight", "5", "6")


def inductor_without_compiler(rank: int, world: int) -> tuple[Failure, Trace]:
    model = TIED_MLP.model()
    return refuse(model, stage=3, backend="inductor"), train_after(model, rank, world)


def test_no_compiler_for_inductor(warning_filters: list[WarningFilter], tmp_path_factory: pytest.TempPathFactory) -> None:
    """In processes that never had a compiler: no other test's cache or answer can help them."""
    nowhere = tmp_path_factory.mktemp("nowhere")
    without = {"PATH": str(nowhere), "CXX": str(nowhere / "c++"), "CC": str(nowhere / "cc"), "TORCHINDUCTOR_CACHE_DIR": str(nowhere)}
    pool = Pool(warning_filters, ENVIRONMENT | without, forked=False)
    try:
        by_rank = pool.run(inductor_without_compiler, 2)
    finally:
        pool.close()
    for failure, _ in by_rank:
        assert_four_parts(failure, "CompilerError", 'backend="aot_eager"', "C++")
    assert differences([trace for _, trace in by_rank], train(TIED_MLP.model(), TIED_MLP)) == []


def assign_a_parameter(model: nn.Module, way: str) -> None:
    layer = model.get_submodule("layers.1")
    if way == "attribute":
        layer.weight = nn.Parameter(torch.zeros(6, 6, dtype=TIED_MLP.dtype))
    elif way == "register":
        layer.register_parameter("weight", nn.Parameter(torch.zeros(6, 6, dtype=TIED_MLP.dtype)))
    elif way == "delete":
        del layer.weight
    else:
        model.layers[1] = nn.Linear(6, 6, dtype=TIED_MLP.dtype)


def reassign(rank: int, world: int, way: str) -> tuple[Failure, Trace]:
    """Re-assign a parameter in one of the ways there are; then put the old one back and train."""
    model = compiled(TIED_MLP, 3)
    layer = model.get_submodule("layers.1")
    kept = dict(layer._parameters)

    def assign_and_use() -> None:
        assign_a_parameter(model, way)
        step(model, rank, world)

    failure = failure_of(assign_and_use)
    model.layers[1] = layer
    layer._parameters.clear()
    layer._parameters.update(kept)
    return failure, train(model, TIED_MLP, rank, world)


@pytest.mark.parametrize("way", ["attribute", "register", "delete", "module"])
def test_a_parameter_re_assigned_after_compile(ranks: Pool, way: str) -> None:
    by_rank = ranks.run(reassign, 2, way)
    for failure, _ in by_rank:
        assert_four_parts(failure, "ShardingError", "layers.1")
    assert differences([trace for _, trace in by_rank], train(TIED_MLP.model(), TIED_MLP)) == []


def before_compile(rank: int, world: int) -> list[Failure]:
    model = SEED.model()
    failures = [failure_of(lambda: zerofx.schedule(model)), failure_of(lambda: zerofx.no_sync(model).__enter__())]
    failures.append(failure_of(lambda: zerofx.gathered(model).__enter__()))
    zerofx.compile(model, stage=3, backend="aot_eager")
    failures.append(failure_of(lambda: zerofx.schedule(model)))
    return failures


def test_calls_that_need_a_compiled_model(ranks: Pool) -> None:
    for failures in ranks.run(before_compile, 2):
        for failure in failures:
            assert_four_parts(failure, "ShardingError")
        assert ["zerofx.compile" in failure.text for failure in failures] == [True, True, True, False]


def test_errors_can_be_sent_between_processes() -> None:
    import pickle

    error = zerofx.ConfigError("what", where="where", why="why", remedy="remedy")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.what, again.where, again.why, again.remedy) == (zerofx.ConfigError, "what", "where", "why", "remedy")
    assert isinstance(again, ValueError)
    assert all(part in str(again) for part in ("what", "where", "why", "remedy"))
    assert sys.exc_info() == (None, None, None)


class Listed(nn.Module):
    """Reads its parameter through a list, which holds what the parameter was."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.weights = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0]


class ListedInPrivate(Listed):
    def __init__(self) -> None:
        super().__init__()
        self._weights = self.__dict__.pop("weights")

    def forward(self, x: Tensor) -> Tensor:
        return x @ self._weights[0]


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return self.linear(x) + penalty


def read_shards_in_forward(rank: int, world: int) -> list[Failure]:
    x = torch.randn(4, 6)
    backends = ("aot_eager", "hooks")
    models = [zerofx.compile(kind(), stage=3, backend=backend) for kind in (Listed, ListedInPrivate, Penalised) for backend in backends]
    return [failure_of(lambda model=model: model(x).sum().backward()) for model in models]


def test_shards_in_forward_are_refused(ranks: Pool) -> None:
    for failures in ranks.run(read_shards_in_forward, 2):
        for failure in failures:
            assert_four_parts(failure, "ShardingError", "meets a shard", "by its name")


def convert_after_compile(rank: int, world: int) -> list[Failure]:
    x = torch.randn(4, 6, dtype=torch.float64)
    models = [zerofx.compile(nn.Linear(6, 6), stage=3, backend=backend).double() for backend in ("aot_eager", "hooks")]
    return [failure_of(lambda model=model: model(x)) for model in models]


def test_another_dtype_after_compile_is_refused(ranks: Pool) -> None:
    for failures in ranks.run(convert_after_compile, 2):
        for failure in failures:
            assert_four_parts(failure, "ShardingError", "weight", "float64", "precision")


def backwards_twice(rank: int, world: int) -> list[bool]:
    """A backward with retain_graph may run again, also behind one without."""
    found = []
    for stage in (1, 3):
        model = compiled(TIED_MLP, stage)
        batch = TIED_MLP.batch(0)
        model(*batch.inputs).sum().backward()
        once = [whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        loss = model(*batch.inputs).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        twice = [whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        found.append(bool(once) and all(torch.equal(2 * a, b) for a, b in zip(once, twice, strict=True)))
    return found


def test_a_backward_may_run_twice(ranks: Pool) -> None:
    assert ranks.run(backwards_twice, 2) == [[True, True]] * 2
