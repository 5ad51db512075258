"""Models that are sharded as they are built, or have no values when they are compiled; and edits of gathered parameters."""

import copy
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module

import zerofx
from tests.ranks import Failure, Pool
from tests.reference import named_differences, whole, whole_parameters
from tests.test_bad_input import assert_four_parts, failure_of


class Constructor(nn.Module):
    """Whatever constructors do to parameters and constants (row 30 of the public reports)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.Tensor([3])
        self.register_buffer("noise", torch.randn(4))
        self.register_buffer("positions", torch.arange(5))
        self.embedding = nn.Embedding(11, 6, padding_idx=3)
        self.register_buffer("zeros", self.embedding.weight.new_zeros(4))
        self.hidden = nn.Linear(6, 7)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(5, 3)), torch.ones(4)])
        self.named = nn.ParameterDict({"transposed": nn.Parameter(torch.randn(3, 5).t()), "scalar": nn.Parameter(torch.tensor(2.0))})
        self.register_parameter("registered", nn.Parameter(torch.empty(9, 2)))
        self.register_parameter("nothing", None)
        self.recurrent = nn.LSTM(4, 6)
        self.layers = nn.ModuleList(copy.deepcopy(self.hidden) for _ in range(2))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.square = nn.Linear(6, 6)
        self.half = nn.Linear(6, 6).to(torch.bfloat16)
        self.inside = nn.Parameter(torch.randn(13)[1:].view(4, 3))  # a part of more memory
        nn.init.orthogonal_(self.square.weight)
        self.hidden.bias.no_decay = True
        self.apply(self._init_weights)
        nn.init.trunc_normal_(self.layers[0].weight, std=0.02)
        with torch.no_grad():
            self.registered.normal_()
            self.registered[2:4].mul_(3)
            self.hidden.bias.copy_(torch.arange(7.0))
            self.layers[1].weight.data /= 3
            self.recurrent.weight_ih_l0[:2] = 4
            self.square.weight.view(-1)[5] = 9
            self.square.bias.numpy()[:] = 5
            self.register_buffer("copied", torch.empty(7, 6).copy_(self.hidden.weight))
            self.kept = copy.deepcopy(self.embedding.weight.data)
            self.listed[0].copy_(torch.func.vmap(lambda row: row / self.named["scalar"])(self.listed[0]))
        self.drawn_last = torch.rand(3)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and not hasattr(module, "parametrizations") and module is not self.square:
            module.weight.data.normal_(0, 0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
            module.weight.data[module.padding_idx].zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.hidden(self.square(self.embedding(tokens)))
        return self.layers[0](hidden[..., :6]).sum() + self.head(self.embedding(tokens)).square().sum()


def whole_members(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: whole(tensor) for name, tensor in named}


def build(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    plain = Constructor()
    drawn_after = torch.rand(2)
    torch.manual_seed(0)
    with zerofx.init():
        model = Constructor()
    expected = whole_members(plain)
    found = named_differences("built", whole_members(model), expected)
    found += [name for name, tensor in model.named_parameters() if not isinstance(tensor, DTensor)]
    # constants that are no members, ties, the lists that modules keep, and the numbers that come next
    assert torch.equal(model.scale, plain.scale)
    assert torch.equal(model.kept, plain.kept)
    assert torch.equal(model.drawn_last, plain.drawn_last)
    assert torch.equal(torch.rand(2), drawn_after)
    assert model.head.weight is model.embedding.weight
    assert model.recurrent._flat_weights[0] is model.recurrent.weight_ih_l0
    assert {name: tensor.dtype for name, tensor in model.named_parameters()} == {n: t.dtype for n, t in plain.named_parameters()}
    tokens = torch.arange(6)
    plain(tokens).backward()
    for stage in (0, 3):
        compiled = zerofx.compile(copy.deepcopy(model), stage=stage, backend="hooks")
        found += named_differences(f"stage {stage}", whole_members(compiled), expected)
        assert compiled.hidden.bias.no_decay
        compiled(tokens).backward()
        # the same data on every rank, whose mean gradient is that of one; ranks add in another order than one process
        torch.testing.assert_close(whole(compiled.embedding.weight.grad), plain.embedding.weight.grad, rtol=1e-6, atol=1e-6)
    return found


def test_the_weights_are_those_of_plain_construction(ranks: Pool) -> None:
    assert ranks.run(build, 3) == [[]] * 3


def shards_of(model: nn.Module) -> dict[str, int]:
    return {name: tensor.to_local().data_ptr() for name, tensor in model.named_parameters()}


def build_with_seeds_of_their_own(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    plain = nn.Linear(4, 6)
    torch.manual_seed(rank)
    own = torch.get_rng_state()
    with zerofx.init():
        model = nn.Linear(4, 6)
    assert torch.equal(own, torch.get_rng_state()) == (rank > 0)
    before = shards_of(model)
    zerofx.compile(model, stage=3, backend="aot_eager")
    assert shards_of(model) == before, "compile moved the shards"
    return named_differences("rank 0's", whole_parameters(model), dict(plain.named_parameters()))


def test_all_ranks_draw_the_numbers_of_rank_0(ranks: Pool) -> None:
    assert ranks.run(build_with_seeds_of_their_own, 2) == [[]] * 2


WIDTH, LAYERS = 2900, 20  # 32 MiB a weight, which malloc gives back to the system when it is freed


class Large(nn.Module):
    """Most layers are frozen, so that gradients do not make up for what sharding saves at two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def status_bytes(key: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{key}:"))


def build_beyond_the_limit(rank: int, world: int) -> tuple[float, float, bool]:
    weight_bytes = WIDTH * WIDTH * 4
    total_bytes = LAYERS * weight_bytes
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + int(0.95 * total_bytes), limits[1]))
    try:
        with pytest.raises(RuntimeError, match="allocate"):
            [torch.empty(WIDTH, WIDTH) for _ in range(LAYERS)]
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")  # the peak from here on
        resident_bytes = status_bytes("VmRSS")
        with zerofx.init():
            model = Large()
        built_bytes = status_bytes("VmHWM") - resident_bytes
        zerofx.compile(model, stage=3, backend="aot_eager", memory_limit=2 * weight_bytes)
        before = model.head.weight.to_local().clone()
        optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        trained = not torch.equal(before, model.head.weight.to_local())
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    return built_bytes / total_bytes, weight_bytes / total_bytes, trained


def test_a_model_larger_than_the_memory_is_built_and_trained(ranks: Pool) -> None:
    for built, weight, trained in ranks.run(build_beyond_the_limit, 2):
        # the shards and one weight; half a weight more is room for what the process itself takes
        assert built < 1 / 2 + 1.5 * weight
        assert trained


class FailsOn(nn.Module):
    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 4)
        if fails:
            raise LookupError("no such file")


def built(make: Callable[[], Any]) -> None:
    with zerofx.init():
        kept = make()
    del kept


def twice() -> None:
    with zerofx.init():
        nn.Linear(4, 6)


def with_an_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = FailsOn(False)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def with_a_view() -> nn.Module:
    model = FailsOn(False)
    model.register_buffer("rows", model.first.weight.detach()[1:])
    return model


def in_the_same_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(4, 6))
    model[1].weight.data = model[0].weight.data
    return model


def refuse(rank: int, world: int) -> tuple[dict[str, Failure], str]:
    hooks = len(torch_module._global_parameter_registration_hooks), len(torch_module._global_module_registration_hooks)
    generator = torch.Generator().manual_seed(rank)
    ways: dict[str, Callable[[], Any]] = {
        "twice": twice,
        "optimizer": with_an_optimizer,
        "view": with_a_view,
        "same memory": in_the_same_memory,
        "own generator": lambda: own_generator(generator),
    }
    failures = {name: failure_of(lambda make=make: built(make)) for name, make in ways.items()}
    text = ""
    try:
        built(lambda: FailsOn(rank == 0))
    except (LookupError, zerofx.RankMismatchError) as error:
        text = str(error)
    # Nothing stays behind: neither hooks nor modes.
    assert hooks == (len(torch_module._global_parameter_registration_hooks), len(torch_module._global_module_registration_hooks))
    assert type(nn.Linear(4, 6).weight) is nn.Parameter
    return failures, text


def own_generator(generator: torch.Generator) -> nn.Module:
    model = nn.Linear(4, 6)
    with torch.no_grad():
        model.weight.normal_(generator=generator)
    return model


def test_what_cannot_be_built_is_an_error_on_every_rank(ranks: Pool) -> None:
    by_rank = ranks.run(refuse, 2)
    for failures, _ in by_rank:
        assert_four_parts(failures["twice"], "ConfigError", "twice")
        assert_four_parts(failures["optimizer"], "ShardingError", "first.weight", "optimizer")
        assert_four_parts(failures["view"], "ShardingError", "first.weight", "view")
        assert_four_parts(failures["same memory"], "ShardingError", "0.weight and 1.weight", "tie them")
        assert_four_parts(failures["own generator"], "RankMismatchError", "weight", "rank 1")
    assert by_rank[0][1] == "no such file"
    assert "rank 0 cannot build" in by_rank[1][1]
    assert "no such file" in by_rank[1][1]


class Rotary(nn.Module):
    """A table that no state dict has (row 29 of the public reports)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", self._table(), persistent=False)
        self.register_buffer("count", torch.zeros(3))

    def _table(self) -> Tensor:
        return 1.0 / 100 ** (torch.arange(5) / 5)

    def reset_parameters(self) -> None:
        self.table = self._table()
        self.count.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


class WithRotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=2)
        self.widen = nn.Linear(4, 5)
        self.rotary = Rotary()
        self.norm = nn.BatchNorm1d(5)
        self.narrow = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.narrow(self.norm(self.rotary(self.widen(self.embedding(tokens)))))


def fill(model: nn.Module, way: str, values: dict[str, Tensor]) -> list[Failure]:
    """Give values to a model that was compiled without; return the errors of forwards that came too early."""
    tokens = torch.arange(4)
    failures = [failure_of(lambda: model(tokens))]
    if way == "init":
        torch.manual_seed(0)
        with zerofx.init(model):
            for module in model.modules():
                if isinstance(reset := getattr(module, "reset_parameters", None), Callable):
                    reset()
        return failures
    if way == "to_empty":
        model.to_empty(device="cpu")
        failures.append(failure_of(lambda: model(tokens)))
    model.load_state_dict(values, assign=way == "assign")
    failures.append(failure_of(lambda: model(tokens)))
    model.rotary.reset_parameters()
    return failures


def materialise(rank: int, world: int) -> tuple[list[str], list[list[Failure]]]:
    torch.manual_seed(0)
    plain = WithRotary()
    tokens = torch.arange(4)
    values = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    found, failures = [], []
    for way, stage, backend in (("load", 3, "aot_eager"), ("assign", 2, "hooks"), ("to_empty", 1, "aot_eager"), ("init", 3, "hooks")):
        torch._dynamo.reset()
        with torch.device("meta"):
            model = WithRotary()
        zerofx.compile(model, stage=stage, backend=backend)
        failures.append(fill(model, way, values))
        found += named_differences(way, whole_members(model), whole_members(plain))
        expected = copy.deepcopy(plain)(tokens)
        expected.sum().backward()
        actual = model(tokens)
        actual.sum().backward()
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)  # as tests/reference.py: another order of sums
    return found, failures


def test_a_model_on_the_meta_device_gets_values_or_raises(ranks: Pool) -> None:
    for found, (load, assign, to_empty, init) in ranks.run(materialise, 2):
        assert found == []
        for failures in (load, assign, to_empty, init):
            assert_four_parts(failures[0], "ShardingError", "embedding.weight", "meta")
        assert_four_parts(to_empty[1], "ShardingError", "embedding.weight never got values")
        for failures in (load, assign, to_empty):
            assert_four_parts(failures[-1], "ShardingError", "rotary.table never got values", "persistent")


def edited(model: nn.Module, *, writeback: bool, edits: bool, fails: bool = False) -> None:
    """Edit a slice of two gathered weights (row 83 of the public reports)."""
    with zerofx.gathered([model.widen.weight, model.narrow.weight], writeback=writeback) as (widen, narrow), torch.no_grad():
        if edits:
            widen[1:3] = 7
            narrow[:, 0].mul_(2)
        if fails:
            raise LookupError("inside")


def edit(rank: int, world: int) -> tuple[list[str], list[Failure], list[str]]:
    torch.manual_seed(0)
    model = WithRotary()
    expected = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    zerofx.compile(model, stage=2, backend="hooks")
    tokens = torch.arange(4)
    before = model(tokens)
    failures = [
        failure_of(lambda: edited(model, writeback=False, edits=True)),
        failure_of(lambda: edited(model, writeback=True, edits=rank == 1)),
    ]
    texts = []
    for fails in (True, rank == 0):
        try:
            edited(model, writeback=True, edits=True, fails=fails)
        except (LookupError, zerofx.RankMismatchError) as error:
            texts.append(str(error))
    found = named_differences("nothing was written", whole_parameters(model), expected)
    assert torch.equal(model(tokens), before)
    edited(model, writeback=True, edits=rank == 0)
    expected["widen.weight"][1:3] = 7
    expected["narrow.weight"][:, 0] *= 2
    found += named_differences("written back", whole_parameters(model), expected)
    assert not torch.equal(model(tokens), before)
    with zerofx.gathered(model.norm) as norm:
        assert list(norm) == ["weight", "bias"]
    failures.append(failure_of(lambda: zerofx.gathered(nn.Linear(2, 2).weight).__enter__()))
    return found, failures, texts


def test_edits_of_gathered_parameters_are_written_back_or_refused(ranks: Pool) -> None:
    by_rank = ranks.run(edit, 2)
    for found, (without, elsewhere, plain), texts in by_rank:
        assert found == []
        assert_four_parts(without, "ShardingError", "parameter 0 of 2", "writeback=True")
        assert_four_parts(elsewhere, "ShardingError", "rank 1 edited", "rank 0")
        assert_four_parts(plain, "ShardingError", "not sharded")
        assert texts[0] == "inside"
    assert by_rank[0][2][1] == "inside"
    assert "rank 0 left zerofx.gathered with an exception" in by_rank[1][2][1]
