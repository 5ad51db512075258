"""Mixed precision: compute and gathers in another dtype, parameters and gradients in their own."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerofx
from tests.ranks import Pool
from tests.reference import named_differences, whole_gradients, whole_parameters
from tests.stages import STAGES, at_stage
from zerofx.config import Config
from zerofx.traffic import TrafficCounter


class Classifier(nn.Module):
    """Floating and integer inputs, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.out = nn.Linear(7, 3)

    def forward(self, tokens: Tensor, features: dict[str, Tensor]) -> Tensor:
        x = self.embedding(tokens) + features["x"]
        return self.out(torch.tanh(self.frozen(torch.tanh(self.hidden(x)))))


def train_in_bfloat16(rank: int, world: int, backend: str, policy: dict[str, Any]) -> list[str]:
    """All ranks have the same rows: averaging equal gradients rounds nothing, so one plain bfloat16 model is the exact reference."""
    torch.manual_seed(0)
    masters = Classifier()
    tokens, x = torch.randint(0, 11, (8,)), torch.randn(8, 6)
    found = []
    for stage in STAGES:
        with at_stage(stage):
            model = zerofx.compile(copy.deepcopy(masters), stage=stage, backend=backend, precision=MixedPrecisionPolicy(**policy))
            reference = copy.deepcopy(masters)
            for step in range(2):
                plain = copy.deepcopy(reference).to(torch.bfloat16)
                expected = plain(tokens, {"x": x.to(torch.bfloat16)})
                actual = model(tokens, {"x": x})
                if actual.dtype is not policy.get("output_dtype", torch.bfloat16):
                    found.append(f"stage {stage}: output in {actual.dtype}")
                if not torch.equal(actual.to(torch.bfloat16), expected):
                    found.append(f"stage {stage}, step {step}: output differs")
                expected.square().sum().backward()
                actual.to(torch.bfloat16).square().sum().backward()
                wanted = {name: None if gradient is None else gradient.float() for name, gradient in whole_gradients(plain).items()}
                found += named_differences(f"stage {stage}, step {step}: gradient of", whole_gradients(model), wanted)
                with torch.no_grad():
                    for name, parameter in reference.named_parameters():
                        if (gradient := wanted[name]) is not None:
                            parameter.sub_(gradient, alpha=0.1)
                torch.optim.SGD(model.parameters(), 0.1).step()
                model.zero_grad()
                found += named_differences(f"stage {stage}, step {step}: master", whole_parameters(model), whole_parameters(reference))
    return found


def first_step_with_inductor(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    masters = Classifier()
    tokens, x = torch.randint(0, 11, (8,)), torch.randn(8, 6)
    plain = copy.deepcopy(masters).to(torch.bfloat16)
    plain(tokens, {"x": x.to(torch.bfloat16)}).square().sum().backward()
    wanted = {name: None if gradient is None else gradient.float() for name, gradient in whole_gradients(plain).items()}
    found = []
    for stage in STAGES:
        with at_stage(stage):
            model = zerofx.compile(copy.deepcopy(masters), stage=stage, precision=MixedPrecisionPolicy(torch.bfloat16))
            model(tokens, {"x": x}).square().sum().backward()
            # fused code keeps what eager code rounds to 8 bits after each operation
            found += named_differences(f"stage {stage}: gradient of", whole_gradients(model), wanted, 8 / 256)
    return found


def test_inductor_is_as_near_as_bfloat16_is(ranks: Pool) -> None:
    assert ranks.run(first_step_with_inductor, 2) == [[]] * 2


@pytest.mark.parametrize("backend", ["aot_eager", "hooks"])
@pytest.mark.parametrize(
    "policy",
    [{"param_dtype": torch.bfloat16}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "output_dtype": torch.float32}],
    ids=["bfloat16", "reduced in float32"],
)
def test_bitwise_equal_to_a_plain_bfloat16_model(ranks: Pool, backend: str, policy: dict[str, Any]) -> None:
    assert ranks.run(train_in_bfloat16, 2, backend, policy) == [[]] * 2


class Autocast(nn.Module):
    """Linear layers under autocast, of which one weight is also read as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.scale = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.inner:
                x = torch.tanh(layer(x))
            x = self.scale(x)
        return (x.float() * self.scale.weight.mean()).square().mean()


def train_under_autocast(rank: int, world: int, backend: str) -> tuple[list[str], dict[str, int], dict[str, int]]:
    torch.manual_seed(0)
    plain, x = Autocast(), torch.randn(8, 48)
    model = zerofx.compile(copy.deepcopy(plain), config=Config(stage=3, backend=backend, prefetch_buckets=0))
    found: list[str] = []
    for step in range(2):
        model.zero_grad()
        with TrafficCounter(world) as counter:
            actual = model(x)
            actual.backward()
        plain.zero_grad()
        expected = plain(x)
        expected.backward()
        found += [] if torch.equal(actual, expected) else [f"step {step}: loss {actual} is not {expected}"]
        found += named_differences(f"step {step}: gradient of", whole_gradients(model), whole_gradients(plain))
        for each in (model, plain):
            torch.optim.SGD(each.parameters(), 0.1).step()
    return found, counter.sent_bytes, zerofx.schedule(model).traffic_bytes


def test_autocast_gathers_in_the_narrow_dtype(ranks: Pool) -> None:
    for differences, sent, predicted in ranks.run(train_under_autocast, 2, "aot_eager"):
        assert differences == []
        assert sent == predicted
        # forward: three weights and four biases in two bytes, the weight that is also read as it is in four; it stays for the
        # backward, which gathers two weights again: nothing needs the first's
        narrow, wide, again = 2 * 48 * (3 * 48 + 4), 4 * 48 * 48, 2 * 2 * 48 * 48
        assert sent["all_gather"] == (narrow + wide + again) // 2
        assert sent["reduce_scatter"] == 4 * (4 * 48 * 49) // 2
