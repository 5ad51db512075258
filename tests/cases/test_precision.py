"""Public reports of mixed precision that broke elsewhere: buffers, batch norms, norms kept in fp32, dtypes within one module."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zerofx
from tests.ranks import Pool
from tests.reference import named_differences, whole_gradients, whole_parameters
from tests.stages import at_stage

BOTH = (("aot_eager", 3), ("hooks", 2))
# fused code keeps what eager code rounds to 8 bits after each operation
FUSED = 8 / 256


class Norms(nn.Module):
    """Layers of every kind that a norm may sit between, in bf16; ``as_reference`` says by casts what ``keep_fp32`` has to mean."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.into = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8)) for _ in range(depth))
        self.frozen = nn.GroupNorm(2, 8).requires_grad_(False)
        self.out = nn.Linear(8, 4)
        self.in_fp32 = (self.norm, self.frozen, *(block[0] for block in self.blocks[1:]))
        self.as_reference = False

    def norms(self, module: nn.Module, x: Tensor) -> Tensor:
        return module(x.float()).to(x.dtype) if self.as_reference and module in self.in_fp32 else module(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms(self.norm, self.into(x))
        for norm, linear in self.blocks:
            x = x + linear(self.norms(norm, x))
        return self.out(self.norms(self.frozen, x))


KEPT = ("LayerNorm", "froz*", "blocks.1.0")


def train_with_norms_in_fp32(rank: int, world: int, backends: tuple[tuple[str, int], ...], depth: int, tolerance: float) -> list[str]:
    """All ranks have the same rows, so that averaging rounds nothing and one plain module is the exact reference."""
    torch.manual_seed(0)
    masters = Norms(depth)
    for norm in masters.in_fp32:  # weights that bf16 would round
        nn.init.normal_(norm.weight)
    x = torch.randn(5, 6)
    found = []
    for backend, stage in backends:
        with at_stage(stage):
            model = zerofx.compile(copy.deepcopy(masters), stage=stage, backend=backend, precision="bf16", keep_fp32=KEPT[: 2 + depth // 2])
            reference = copy.deepcopy(masters)
            where = f"{backend}, stage {stage}"
            for step in range(2 if tolerance == 0 else 1):
                plain = copy.deepcopy(reference).to(torch.bfloat16)
                plain.as_reference = True
                for norm, master in zip(plain.in_fp32, reference.in_fp32, strict=True):
                    norm.float().load_state_dict(master.state_dict())
                expected, actual = plain(x.bfloat16()), model(x)
                found += named_differences(f"{where}, step {step}:", {"output": actual}, {"output": expected}, tolerance)
                expected.float().square().sum().backward()
                actual.float().square().sum().backward()
                wanted = {name: None if gradient is None else gradient.float() for name, gradient in whole_gradients(plain).items()}
                found += named_differences(f"{where}, step {step}: gradient of", whole_gradients(model), wanted, tolerance)
                with torch.no_grad():
                    for name, parameter in reference.named_parameters():
                        if (gradient := wanted[name]) is not None:
                            parameter.sub_(gradient, alpha=0.1)
                torch.optim.SGD(model.parameters(), 0.1).step()
                model.zero_grad()
                if tolerance == 0:
                    found += named_differences(f"{where}, step {step}: master", whole_parameters(model), whole_parameters(reference))
            if tolerance == 0 and not torch.equal(copy.deepcopy(model)(x), model(x)):
                found.append(f"{where}: a copy gives another output")
    return found


def test_norms_kept_in_fp32_are_as_if_the_module_cast(ranks: Pool) -> None:
    assert ranks.run(train_with_norms_in_fp32, 2, BOTH, 2, 0.0) == [[]] * 2


def test_norms_kept_in_fp32_with_inductor(ranks: Pool) -> None:
    assert ranks.run(train_with_norms_in_fp32, 2, (("inductor", 3),), 0, FUSED) == [[]] * 2


class Statistics(nn.Module):
    """Convolution, batch norms with both kinds of momentum, and buffers of three dtypes, one of which is not saved (case 27)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.cumulative = nn.BatchNorm2d(4, momentum=None)
        self.register_buffer("scale", torch.tensor([1.2345678, 2.0]))
        self.register_buffer("steps", torch.tensor([2**40 + 1]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("table", torch.tensor([0.1]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.conv(x)))
        if self.training:
            self.steps += 1
        return self.cumulative(x) * self.scale[0].to(x.dtype)


def train_with_statistics(rank: int, world: int) -> list[str]:
    """Cases 27 and 28: three steps on rows of this rank only, then an eval; autocast in one process on the same rows is the reference."""
    torch.manual_seed(0)
    masters = Statistics()
    x = torch.randn(3, 4, 2, 6, 6, generator=torch.Generator().manual_seed(rank))
    found = []
    for backend, stage in BOTH:
        with at_stage(stage):
            model = zerofx.compile(copy.deepcopy(masters), stage=stage, backend=backend, precision="bf16")
            reference = copy.deepcopy(masters)
            where = f"{backend}, stage {stage}"
            for step in range(3):
                with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                    expected = reference(x[step])
                actual = model(x[step])
                actual.float().sum().backward()
                found += named_differences(f"{where}, step {step}:", {"output": actual.float()}, {"output": expected.float()}, FUSED)
            state, wanted = model.state_dict(), reference.state_dict()
            buffers = [name for name in wanted if name not in dict(model.named_parameters())]
            if list(state) != list(wanted) or model.table.dtype is not torch.float32:
                found.append(f"{where}: a state of {list(state)}")
            # one pass of sums or two: 2^-20 of a value, far below bf16's 2^-8
            found += named_differences(
                f"{where}: buffer", {name: state[name] for name in buffers}, {name: wanted[name] for name in buffers}, 2**-18
            )
            if model.norm.num_batches_tracked != 3:
                found.append(f"{where}: {model.norm.num_batches_tracked} batches")
            model.eval()
            with torch.no_grad():
                model(x[0])
            found += named_differences(
                f"{where}: after eval, buffer", {n: model.state_dict()[n] for n in buffers}, {n: state[n] for n in buffers}
            )
    return found


def test_statistics_and_buffers_keep_their_dtype(ranks: Pool) -> None:
    assert ranks.run(train_with_statistics, 2) == [[]] * 2


class Mixed(nn.Module):
    """Case 69: an fp32 norm, a bf16 layer and a frozen int8 weight in one block; no precision is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.base = nn.Parameter(torch.randint(-3, 4, (8, 8), dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.norm(x).bfloat16())
        return x @ self.base.to(torch.bfloat16)


def train_mixed(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    masters = Mixed()
    x = torch.randn(4, 8)
    found = []
    for backend, stage in BOTH:
        with at_stage(stage):
            config = zerofx.Config(stage=stage, backend=backend, reduce_dtype=torch.float32)
            model, reference = zerofx.compile(copy.deepcopy(masters), config=config), copy.deepcopy(masters)
            where = f"{backend}, stage {stage}"
            for step in range(2):
                for one in (model, reference):
                    one(x).float().square().mean().backward()
                found += named_differences(f"{where}, step {step}: gradient of", whole_gradients(model), whole_gradients(reference))
                for one in (model, reference):
                    torch.optim.SGD([p for p in one.parameters() if p.requires_grad], 0.1, foreach=False).step()
                    one.zero_grad()
                found += named_differences(f"{where}, step {step}: parameter", whole_parameters(model), whole_parameters(reference))
    return found


def test_parameters_of_several_dtypes_in_one_module_keep_them(ranks: Pool) -> None:
    assert ranks.run(train_mixed, 2) == [[]] * 2


def clip_where_the_scale_grows(rank: int, world: int) -> list[str]:
    """Case 44: with an interval of one step the scale grows on the very step that clips; case 71: eval in between, compiled step."""
    torch.manual_seed(0)
    masters = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    x = torch.randn(4, 6)
    model = zerofx.compile(copy.deepcopy(masters), backend="aot_eager", precision="fp16")
    reference = copy.deepcopy(masters)
    scaler = zerofx.GradScaler(zerofx.LossScale(initial_scale=64.0, growth_interval_steps=1), device="cpu")
    optimizers = [torch.optim.SGD(one.parameters(), torch.tensor(0.1), foreach=True) for one in (model, reference)]
    found = []
    for step in range(3):
        scaler.scale(model(x).float().square().sum()).backward()
        reference(x).square().sum().backward()
        scaler.unscale_(optimizers[0])
        dtypes = {parameter.grad.dtype for parameter in model.parameters()}
        if dtypes != {torch.float32}:
            found.append(f"step {step}: gradients in {dtypes}")
        norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5) for one in (model, reference)]
        norms[0] = norms[0].full_tensor()
        # fp16 has 11 bits, and a few operations round to them
        found += named_differences(f"step {step}:", {"norm": norms[0]}, {"norm": norms[1]}, 8 / 2048)
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[1].step()
        for one in (model, reference):
            one.zero_grad()
        found += named_differences(f"step {step}: parameter", whole_parameters(model), whole_parameters(reference), 8 / 2048)
        if scaler.get_scale() != 64.0 * 2 ** (step + 1):
            found.append(f"step {step}: a scale of {scaler.get_scale()}")
        with torch.no_grad():
            model.eval()(x)
        model.train()
    return found


def test_clipping_uses_the_scale_of_its_own_step(ranks: Pool) -> None:
    assert ranks.run(clip_where_the_scale_grows, 2) == [[]] * 2


def refuse(rank: int, world: int, what: dict[str, Any]) -> list[str]:
    found = []
    for options in what.values():
        try:
            zerofx.compile(Norms(2), backend="aot_eager", **options)
        except zerofx.ZerofxError as error:
            found.append(str(error))
    tied = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    tied[1].bias = tied[0].bias
    try:
        zerofx.compile(tied, backend="aot_eager", precision="bf16", keep_fp32="LayerNorm")
    except zerofx.ShardingError as error:
        found.append(str(error))
    return found


def test_names_that_mean_nothing_are_refused_on_every_rank(ranks: Pool) -> None:
    what = {
        "did you mean 'LayerNorm'": {"precision": "bf16", "keep_fp32": ("LayerNrom",)},
        "keep_fp32='LayerNomr' matches no module": {"keep_fp32": "LayerNomr"},
        "is the model itself": {"precision": "bf16", "keep_fp32": "Norms"},
        "did you mean 'bf16'": {"precision": "bf61"},
        "bf16, fp16, fp32": {"precision": torch.bfloat16},
    }
    first, second = ranks.run(refuse, 2, what)
    assert first == second
    words = [*what, "0 computes in fp32 and shares bias with 1, which does not"]
    assert len(first) == len(words)
    assert all(word in told for word, told in zip(words, first, strict=True))


@pytest.mark.parametrize(
    ("name", "compute", "reduce"),
    [("fp16", torch.float16, torch.float32), ("fp32", None, None)],
)
def test_a_plan_takes_the_same_names(name: str, compute: torch.dtype | None, reduce: torch.dtype | None) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.zeros(2, 8)
    found = zerofx.plan(model, (x,), world_size=4, precision=name)
    expected = zerofx.plan(model, (x,), world_size=4, param_dtype=compute, reduce_dtype=reduce)
    assert found.traffic_bytes == expected.traffic_bytes
    kept = zerofx.plan(model, (x,), world_size=4, precision=name, keep_fp32=("LayerNorm",))
    # sizes are those of this plan, whatever was planned before
    zerofx.plan(model, (torch.zeros(6, 8),), world_size=4, precision=name)
    # what is kept in fp32 is gathered in it
    grows = kept.traffic_bytes["all_gather"] > found.traffic_bytes["all_gather"]
    assert grows is (name != "fp32")
