"""What a compiled model is made of: its shards, names, ties and buffers, and what is left of the whole model."""

import copy
import gc
import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import zerofx
from tests.models import COUNTED, FROZEN, ODD_SIZES, SEED, TIED_MLP, Counted, TiedMLP, case_named
from tests.ranks import Failure, Pool
from tests.reference import Trace, difference, differences, named_differences, train, whole, whole_gradients, whole_parameters
from tests.stages import STAGES, at_stage, compiled
from zerofx.params import choose_dim

SHARDED_STAGES = (1, 2, 3)
# Whole copies that a copy must not share, and none.
COPIED_STAGES = (1, 3)


def layout_at_stages(rank: int, world: int, name: str) -> list[dict[str, tuple[object, ...]]]:
    """For each stage: name -> (type, placement, logical shape, local shape, dtype, requires_grad)."""
    case = case_named(name)
    found = []
    for stage in STAGES:
        with at_stage(stage):
            layout = {}
            for parameter_name, parameter in compiled(case, stage).named_parameters():
                assert isinstance(parameter, DTensor)
                assert isinstance(parameter, nn.Parameter)
                local = parameter.to_local()
                shapes = tuple(parameter.shape), tuple(local.shape)
                layout[parameter_name] = (parameter.placements, *shapes, parameter.dtype, parameter.requires_grad)
            found.append(layout)
    return found


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", [TIED_MLP.name, FROZEN.name, ODD_SIZES.name])
def test_parameters_are_dtensors_of_the_old_names_shapes_and_dtypes(ranks: Pool, name: str, world: int) -> None:
    plain = dict(case_named(name).model().named_parameters())
    for by_stage in ranks.run(layout_at_stages, world, name):
        for layout in by_stage:
            assert list(layout) == list(plain)
            for parameter_name, (_, shape, _, dtype, requires_grad) in layout.items():
                parameter = plain[parameter_name]
                assert (shape, dtype, requires_grad) == (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shards_cover_a_parameter_once(ranks: Pool, world: int) -> None:
    by_rank = ranks.run(layout_at_stages, world, ODD_SIZES.name)
    for stage in SHARDED_STAGES:
        for name in by_rank[0][stage]:
            placements, shape, *_ = by_rank[0][stage][name]
            local_shapes = [by_stage[stage][name][2] for by_stage in by_rank]
            (placement,) = placements
            if placement.is_shard():
                assert sum(local[placement.dim] for local in local_shapes) == shape[placement.dim]
            else:
                assert local_shapes == [shape] * world


@pytest.mark.parametrize("world", [1, 3, 4])
def test_placements(ranks: Pool, world: int) -> None:
    replicated = {"scalar", "single", "empty", *(("thin.bias", "deep.0.bias") if world > 3 else ())}
    for by_stage in ranks.run(layout_at_stages, world, ODD_SIZES.name):
        assert {layout[0] for layout in by_stage[0].values()} == {(Replicate(),)}
        for stage in SHARDED_STAGES:
            placements = {name: layout[0][0] for name, layout in by_stage[stage].items()}
            if world == 1:
                assert set(placements.values()) == {Replicate()}
                continue
            assert {name: placements[name] for name in replicated} == dict.fromkeys(replicated, Replicate())
            assert placements["wide.0.weight"] == placements["wide.0.bias"] == Shard(0)
            # Five rows for four ranks would leave one without; of the seven columns each has one.
            assert placements["deep.0.weight"] == Shard(1 if world > 3 else 0)
            # Two rows for three or four ranks, eight columns: the columns are what every rank can have a share of.
            assert placements["two_by_eight"] == Shard(1)


@pytest.mark.parametrize(
    ("shape", "world", "dim"),
    [
        ((33, 7), 4, 0),
        ((5, 7), 4, 1),  # five rows are two, two, one and none
        ((2, 8, 9), 4, 1),  # eight divides, nine would leave a rank without
        ((5,), 4, None),
        ((2, 3), 4, None),
        ((1000, 4096), 64, 1),
        ((1000, 1000), 64, 0),  # too large to stay whole: one rank of 64 has no row
    ],
)
def test_every_rank_gets_a_share_where_it_can(shape: tuple[int, ...], world: int, dim: int | None) -> None:
    assert choose_dim(shape, world) == dim


def bytes_of_rank(rank: int, world: int) -> list[tuple[int, int]]:
    """For each stage: bytes of this rank's shards, and bytes of the storages that hold them."""
    found = []
    for stage in STAGES:
        with at_stage(stage):
            shards = [parameter.to_local() for parameter in compiled(SEED, stage).parameters()]
            storages = {StorageWeakRef(shard.untyped_storage()).cdata: shard.untyped_storage().nbytes() for shard in shards}
            found.append((sum(shard.nbytes for shard in shards), sum(storages.values())))
    return found


def test_each_rank_holds_its_share_and_no_more(ranks: Pool) -> None:
    parameters = list(SEED.model().parameters())
    total = sum(parameter.nbytes for parameter in parameters)
    # Five and three channels on two ranks: an uneven shard may be padded to the size of the largest.
    padded = sum(-(-parameter.shape[0] // 2) * parameter[0].nbytes for parameter in parameters)
    by_rank = ranks.run(bytes_of_rank, 2)
    for stage, shares in zip(STAGES, zip(*by_rank, strict=True), strict=True):
        assert sum(share for share, _ in shares) == (2 * total if stage == 0 else total), f"stage {stage}"
        assert all(held <= (total if stage == 0 else padded) for _, held in shares), f"stage {stage}"


def ties(rank: int, world: int) -> list[bool]:
    found = []
    for stage in STAGES:
        with at_stage(stage):
            model = compiled(TIED_MLP, stage)
            first, last = model.get_submodule("layers.0"), model.get_submodule("layers.2")
            optimizer = torch.optim.AdamW(model.parameters(), 0.1)
            for _ in range(2):
                TIED_MLP.loss(model(*TIED_MLP.batch(0).inputs), TIED_MLP.batch(0).target, world).backward()
                optimizer.step()
                optimizer.zero_grad()
            found += [first.weight is last.weight, first.bias is last.bias]
            found.append(len(list(model.parameters())) == len(list(TIED_MLP.model().parameters())))
            # One state for the tied weight, one for its bias, two for the middle layer; the spare layer was never used.
            found.append(len(optimizer.state) == 4)
            tied = zerofx.gathered(model)
            with tied as wholes:
                found.append(torch.equal(wholes["layers.0.weight"], wholes["layers.2.weight"]))
    return found


def test_tied_parameters_stay_one_parameter(ranks: Pool) -> None:
    for found in ranks.run(ties, 2):
        assert found == [True] * (5 * len(STAGES))


def broadcast_results(rank: int, world: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Build a model with another seed and other buffers on each rank."""
    found = []
    for stage in STAGES:
        with at_stage(stage):
            model = COUNTED.model(seed=rank)
            for value, buffer in enumerate(model.buffers()):
                buffer.fill_(10 * rank + value)
            zerofx.compile(model, stage=stage, backend="aot_eager")
            found.append((whole_parameters(model), {name: buffer.clone() for name, buffer in model.named_buffers()}))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_start_from_rank_0(ranks: Pool, world: int) -> None:
    expected = dict(COUNTED.model(seed=0).named_parameters())
    for by_stage in ranks.run(broadcast_results, world):
        for parameters, buffers in by_stage:
            assert named_differences("parameter", parameters, expected) == []
            assert {name: buffer.double().unique().tolist() for name, buffer in buffers.items()} == {
                "total": [0.0],
                "calls": [1.0],
                "seen": [1.0],
                "offset": [3.0],
            }
            assert [buffer.dtype for buffer in buffers.values()] == [torch.float32, torch.int64, torch.bool, torch.float32]


def state_dict_keys(rank: int, world: int) -> list[tuple[str, list[str], bool]]:
    found = []
    for stage in STAGES:
        with at_stage(stage):
            model = COUNTED.model()
            same = zerofx.compile(model, stage=stage, backend="aot_eager")
            model.train()
            model(*COUNTED.batch(0).part(rank, world).inputs).sum().backward()
            found.append((type(model).__name__, list(model.state_dict()), same is model and isinstance(model, Counted)))
    return found


def test_object_class_and_state_dict_keys_are_kept(ranks: Pool) -> None:
    expected = ("Counted", list(COUNTED.model().state_dict()), True)
    for found in ranks.run(state_dict_keys, 2):
        assert found == [expected] * len(STAGES)


class Wide(nn.Module):
    """Layers of different sizes, so that a whole parameter can be told from anything else by its number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 97), nn.ReLU(), nn.Linear(97, 89), nn.ReLU(), nn.Linear(89, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def whole_tensors_alive(sizes: set[int]) -> list[tuple[int, ...]]:
    """Shapes of all plain tensors in this process whose storage is that of a whole parameter. Fake tensors hold no bytes."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter)]
    return [tuple(tensor.shape) for tensor in tensors if tensor.untyped_storage().nbytes() // 4 in sizes]


def what_is_left_of_the_whole(rank: int, world: int) -> dict[str, object]:
    model = Wide()
    sizes = {parameter.numel() for parameter in model.parameters() if parameter.ndim == 2}
    assert len(whole_tensors_alive(sizes)) == 3, "the search finds whole parameters where there are some"
    storages = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    zerofx.compile(model, stage=3, backend="aot_eager")
    gc.collect()
    found: dict[str, object] = {"expired": [storage.expired() for storage in storages], "after compile": whole_tensors_alive(sizes)}
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
    found["after backward"] = whole_tensors_alive(sizes)
    with torch.no_grad():
        model(torch.randn(4, 8))
    found["after no_grad"] = whole_tensors_alive(sizes)
    return found


def test_nothing_whole_is_left_at_stage_3(ranks: Pool) -> None:
    for found in ranks.run(what_is_left_of_the_whole, 2):
        assert found == {"expired": [True] * 6, "after compile": [], "after backward": [], "after no_grad": []}


def train_alone(rank: int, world: int, name: str) -> list[Trace]:
    assert not dist.is_initialized()
    case = case_named(name)
    return [train(compiled(case, stage), case) for stage in STAGES]


@pytest.mark.parametrize("name", [TIED_MLP.name, ODD_SIZES.name])
def test_world_1_needs_no_process_group(ranks: Pool, name: str) -> None:
    case = case_named(name)
    (traces,) = ranks.run(train_alone, 1, name, group=False)
    for stage, trace in zip(STAGES, traces, strict=True):
        assert differences([trace], train(case.model(), case)) == [], f"stage {stage}"


def copies_train_alike(rank: int, world: int) -> list[list[Trace]]:
    """Train a model that was pickled, one that was copied, and the one they come from, after a common step."""
    found = []
    for stage in COPIED_STAGES:
        with at_stage(stage):
            model = compiled(TIED_MLP, stage)
            train(model, TIED_MLP, rank, world, steps=1)
            copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model), copy.deepcopy(compiled(TIED_MLP, stage)), model]
            found.append([train(each, TIED_MLP, rank, world, steps=2) for each in copies])
            ties_kept = [each.layers[0].weight is each.layers[2].weight for each in copies]
            assert ties_kept == [True] * 4, f"stage {stage}: {ties_kept}"
            shared = {id(parameter) for each in copies for parameter in each.parameters()}
            assert len(shared) == 4 * len(list(model.parameters())), f"stage {stage}: a copy shares a parameter"
    return found


def test_pickle_and_deepcopy(ranks: Pool) -> None:
    trained = TIED_MLP.model()
    train(trained, TIED_MLP, steps=1)
    expected = train(trained, TIED_MLP, steps=2)
    fresh = train(TIED_MLP.model(), TIED_MLP, steps=2)
    by_rank = ranks.run(copies_train_alike, 2)
    for stage, runs in zip(COPIED_STAGES, zip(*by_rank, strict=True), strict=True):
        unpickled, copied, copied_fresh, original = ([by_copy[index] for by_copy in runs] for index in range(4))
        assert differences(original, expected) == [], f"stage {stage}, the original"
        assert differences(unpickled, expected) == [], f"stage {stage}, unpickled"
        assert differences(copied, expected) == [], f"stage {stage}, copied"
        assert differences(copied_fresh, fresh) == [], f"stage {stage}, copied before it ran"


def two_models(rank: int, world: int) -> tuple[list[Trace], list[Tensor]]:
    """Train two models of one class, the second on the output of the first."""
    first, second = compiled(TIED_MLP, 3, seed=0), compiled(TIED_MLP, 3, seed=1)
    batch = TIED_MLP.batch(0).part(rank, world)
    TIED_MLP.loss(second(first(*batch.inputs)), batch.target, world).backward()
    gradients = [whole(parameter.grad) for model in (first, second) for parameter in model.parameters() if parameter.grad is not None]
    for model in (first, second):
        model.zero_grad()
    return [train(model, TIED_MLP, rank, world) for model in (first, second)], gradients


def test_two_models_in_one_process(ranks: Pool) -> None:
    first, second = TIED_MLP.model(0), TIED_MLP.model(1)
    batch = TIED_MLP.batch(0)
    TIED_MLP.loss(second(first(*batch.inputs)), batch.target, 1).backward()
    expected = [parameter.grad for model in (first, second) for parameter in model.parameters() if parameter.grad is not None]
    by_rank = ranks.run(two_models, 2)
    for _, gradients in by_rank:
        assert [difference(actual, wanted) for actual, wanted in zip(gradients, expected, strict=True)] == [""] * 8
    for index in range(2):
        traces = [traces[index] for traces, _ in by_rank]
        assert differences(traces, train(TIED_MLP.model(index), TIED_MLP)) == [], f"model {index}"


def gathered_values(rank: int, world: int) -> list[str]:
    found = []
    plain = ODD_SIZES.model()
    for stage in STAGES:
        with at_stage(stage):
            model = compiled(ODD_SIZES, stage)
            with zerofx.gathered(model) as wholes:
                found += named_differences(f"stage {stage}: gathered", wholes, dict(plain.named_parameters()))
            with zerofx.gathered(model, writeback=True) as wholes, torch.no_grad():
                for whole in wholes.values():
                    # Only rank 0's edit counts.
                    whole.mul_(-1 if rank == 0 else 5)
            edited = {name: -parameter.detach() for name, parameter in plain.named_parameters()}
            found += named_differences(f"stage {stage}: written back", whole_parameters(model), edited)
            plain_edited = ODD_SIZES.model()
            plain_edited.load_state_dict(edited)
            inputs = ODD_SIZES.batch(0).inputs
            text = difference(model(*inputs).detach(), plain_edited(*inputs).detach())
            found += [f"stage {stage}: forward after writeback: {text}"] if text else []
    return found


def test_gathered(ranks: Pool) -> None:
    assert ranks.run(gathered_values, 3) == [[]] * 3


class Gathers(TorchDispatchMode):
    """The gathers that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "gather_into_tensor" in str(func):
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def gathers_outside_of_graphs(rank: int, world: int) -> set[str]:
    with Gathers() as gathers:
        with zerofx.init():
            built = TIED_MLP.model()
            torch.nn.init.orthogonal_(built.get_parameter("layers.0.weight"))  # reads what was cut already
        model = zerofx.compile(built, stage=3, backend="hooks")
        with zerofx.gathered(model, writeback=True):
            pass
        model(*TIED_MLP.batch(0).inputs).sum().backward()
        zerofx.full_state_dict(model)
    return gathers.names


def test_gathers_are_of_the_form_that_gloo_bears(ranks: Pool) -> None:
    """The one that allocates its result, DTensor's own, crashes under load now and then (zerofx/collectives.py)."""
    assert ranks.run(gathers_outside_of_graphs, 2) == [{"_c10d_functional.all_gather_into_tensor_out.default"}] * 2


def compile_twice(rank: int, world: int) -> tuple[Failure, list[str]]:
    model = compiled(TIED_MLP, 3)
    try:
        zerofx.compile(model, stage=2, backend="aot_eager")
    except zerofx.ZerofxError as error:
        failure = Failure.of(error)
    trace = train(model, TIED_MLP, rank, world)
    expected = train(TIED_MLP.model(), TIED_MLP)
    return failure, named_differences("parameter", trace.parameters[-1], expected.parameters[-1])


def compile_a_parent_of_compiled(rank: int, world: int) -> Failure:
    inner = compiled(TIED_MLP, 3)
    try:
        zerofx.compile(nn.Sequential(nn.Linear(6, 6), inner), stage=3, backend="aot_eager")
    except zerofx.ZerofxError as error:
        return Failure.of(error)
    raise AssertionError("no error")


def test_compiling_twice_is_an_error_that_changes_nothing(ranks: Pool) -> None:
    for failure, changed in ranks.run(compile_twice, 2):
        assert "already" in failure.parts["what"]
        assert failure.parts["remedy"]
        assert changed == []
    for failure in ranks.run(compile_a_parent_of_compiled, 2):
        assert "already" in failure.parts["what"]


def environment_and_flags(rank: int, world: int) -> list[object]:
    before = [os.environ.copy(), torch.get_default_dtype(), torch.is_grad_enabled(), TiedMLP.forward, nn.Module.__call__, Tensor.backward]
    train(compiled(TIED_MLP, 3), TIED_MLP, rank, world)
    after = [os.environ.copy(), torch.get_default_dtype(), torch.is_grad_enabled(), TiedMLP.forward, nn.Module.__call__, Tensor.backward]
    return [earlier == later for earlier, later in zip(before, after, strict=True)]


def test_nothing_global_changes(ranks: Pool) -> None:
    assert ranks.run(environment_and_flags, 2) == [[True] * 6] * 2


class Viewed(nn.Module):
    """Fewer rows than three ranks, columns that three do not divide; and a forward that needs them contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0).view(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight.view(16)).sum()


def view_whole(rank: int, world: int) -> list[str]:
    found, line = [], torch.arange(16.0)
    for backend in ("aot_eager", "hooks"):
        for stage in STAGES:
            model = zerofx.compile(Viewed(), stage=stage, backend=backend)
            loss = model(line)
            loss.backward()
            if not torch.equal(loss.detach(), (line * line).sum()) or not torch.equal(whole(model.weight.grad).flatten(), line):
                found.append(f"{backend}, stage {stage}")
    return found


def test_whole_parameters_are_contiguous(ranks: Pool) -> None:
    assert ranks.run(view_whole, 3) == [[]] * 3


class Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.weight = nn.Parameter(torch.randn(4, width))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.weight).sum()


def other_sizes(rank: int, world: int) -> list[str]:
    found, x = [], torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for stage in STAGES:
        for width in (6, 8, 10, 12):
            torch.manual_seed(0)
            plain = Scaled(width)
            model = zerofx.compile(copy.deepcopy(plain), stage=stage, backend="aot_eager")
            for trained in (plain, model):
                trained(x).backward()
            found += named_differences(f"stage {stage}, width {width}", whole_gradients(model), whole_gradients(plain))
    return found


def test_models_of_one_class_and_other_sizes(ranks: Pool) -> None:
    assert ranks.run(other_sizes, 2) == [[]] * 2
