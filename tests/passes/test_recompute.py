from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import zerofx
from tests.programs import TiedStack, compilation, compiled
from zerofx.activations import Kept, choose
from zerofx.compilation import Compilation
from zerofx.origins import Call, module_of
from zerofx.program import output_of
from zerofx.recomputing import Extent, outermost
from zerofx.work import storage_bytes

TOKENS = torch.arange(64).view(4, 16)


def _saved(found: Compilation) -> Iterator[tuple[str, int]]:
    """The module and the bytes of each activation that the forward hands to the backward."""
    assert found.forward is not None
    for node in output_of(found.forward.graph).args[0][1:]:
        if node.op == "call_function" and node.meta.get("zerofx", None) is None:
            yield module_of(node), storage_bytes(node)


def _saved_bytes(**settings: object) -> int:
    return sum(size for _, size in _saved(compilation(compiled(TiedStack(4), TOKENS, stage=1, **settings))))


def test_blocks_keep_their_inputs_only() -> None:
    found = compilation(compiled(TiedStack(4), TOKENS, stage=1, recompute="blocks"))
    kept = [(module, size) for module, size in _saved(found) if module.startswith("h.")]
    assert kept == [(f"h.{layer}", TOKENS.numel() * 64 * 4) for layer in range(4)]  # what the next one begins with


def test_cheap_operators_keep_the_products() -> None:
    seen: list[object] = []

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        seen.append(op)
        return CheckpointPolicy.PREFER_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.MUST_RECOMPUTE

    everything, selective, by_policy = _saved_bytes(), _saved_bytes(recompute="selective"), _saved_bytes(recompute=policy)
    assert torch.ops.aten.gelu.default in seen
    assert _saved_bytes(recompute="blocks") < by_policy <= selective < everything


def test_an_amount_is_kept_and_no_less_than_it_takes() -> None:
    most, least = _saved_bytes(), _saved_bytes(recompute="blocks")
    for share in (0.9, 0.5):
        assert least < _saved_bytes(recompute=share) <= share * most
    assert _saved_bytes(recompute=1.0) == most
    with pytest.raises(zerofx.MemoryLimitError, match=r"at most 1 bytes of activations cannot be kept") as failure:
        _saved_bytes(recompute=1)
    smallest = failure.value.smallest_bytes
    assert f"allow {smallest:,} bytes" in failure.value.remedy
    assert _saved_bytes(recompute=smallest) <= smallest


def test_a_forward_without_a_backward_computes_nothing_again() -> None:
    found = compilation(compiled(TiedStack(2), TOKENS, train=False, recompute=0.5))
    assert found.forward is not None
    assert not list(found.forward.marked("recompute"))


def test_the_cheapest_byte_goes_first() -> None:
    first, second = Call("h.0"), Call("h.1")
    nothing = Kept({first: 100, second: 100}, {})
    cheap = Kept({first: 60, second: 60}, {first: 1.0, second: 2.0})
    everything = Kept({first: 10, second: 10}, {first: 100.0, second: 200.0})
    options = {Extent.NOTHING: nothing, Extent.CHEAP: cheap, Extent.ALL: everything}
    assert choose(options, 200).levels == ((first, Extent.NOTHING), (second, Extent.NOTHING))
    assert choose(options, 160).levels == ((first, Extent.CHEAP), (second, Extent.NOTHING))
    assert choose(options, 120).levels == ((first, Extent.CHEAP), (second, Extent.CHEAP))
    assert choose(options, 70).levels == ((first, Extent.ALL), (second, Extent.CHEAP))


@pytest.mark.parametrize(
    ("recompute", "found"),
    [
        ("blocks", ["a.0", "a.1", "head.0"]),
        (("a.*",), ["a.0", "a.1"]),
        (("a.0.up", "a.0*"), ["a.0"]),
        ("selective", ["a.0", "a.1", "head.0", "embed"]),
        (None, []),
    ],
)
def test_the_outermost_modules(recompute: object, found: list[str]) -> None:
    assert outermost(["", "embed", "a", "a.0", "a.0.up", "a.0.inner.0", "a.1", "head", "head.0"], recompute) == found


class Called(nn.Module):
    """One block called twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())])

    def forward(self, x: Tensor) -> Tensor:
        return self.h[0](self.h[0](x)).sum()


def test_each_call_of_a_block_is_a_part() -> None:
    found = compilation(compiled(Called(), torch.ones(4, 64), stage=3, recompute="blocks"))
    (plan,) = (record.plan for record in found.records if record.name == "Recompute" and record.plan)
    assert [(part.module, part.number) for part in plan] == [("h.0", 0), ("h.0", 1)]


class Random(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.h = nn.ModuleList([Attention(dropout), Attention(dropout)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return x.sum()


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(64, 64), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).view(4, 2, 8, 32)
        return torch.tanh(self.dropout(functional.scaled_dot_product_attention(y, y, y).reshape(4, 8, 64)))


class Checkpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = torch.relu(checkpoint(layer, x, use_reentrant=False))
        return x.sum()


def test_blocks_may_be_checkpointed_already() -> None:
    found = compilation(compiled(Checkpoints(), torch.ones(4, 64), stage=3, recompute="blocks"))
    assert [module for module, _ in _saved(found) if module == "h.0"] == []  # its result is the dropout's


@pytest.mark.parametrize(("dropout", "count"), [(0.0, 0), (0.5, 2)])
def test_only_what_draws_random_numbers_saves_the_state_of_their_generator(dropout: float, count: int) -> None:
    found = compilation(compiled(Random(dropout), torch.ones(4, 8, 64), stage=1, world_size=1, recompute="blocks"))
    assert found.backward is not None
    states = [node for node in found.backward.graph.nodes if node.op == "placeholder" and node.name.startswith("rng_state")]
    assert len(states) == count
    assert all("val" in node.meta for node in found.backward.graph.nodes if node.op == "call_function")


def test_the_schedule_says_what_is_computed_again() -> None:
    schedule = str(zerofx.schedule(compiled(TiedStack(4), TOKENS, stage=3, recompute="blocks")))
    lines = [line.split() for line in schedule.splitlines() if line.strip().startswith("recompute")]
    assert [words[1] for words in lines] == ["h.3", "h.2", "h.1", "h.0"]
    # one product of 64 tokens with a matrix of 64 x 256, at two operations an element: what the second one gives is kept
    assert {" ".join(words[3:5]) for words in lines} == {f"{2 * 64 * 64 * 256 / 1e6:.3g} MFLOP"}
