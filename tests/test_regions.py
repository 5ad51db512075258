"""Cutting at collectives: equal regions are compiled once, and running them changes nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import zerofx
from benchmarks.workloads import GPT
from tests.programs import TiedStack, compilation, compiled, fake_ranks
from tests.reference import whole
from zerofx import _torch
from zerofx.program import output_of


@pytest.fixture
def compiled_modules(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """Stand in for Inductor: run each region's graph as it is, and keep it."""
    modules: list[GraphModule] = []

    def compile_region(module: GraphModule, **_: Any) -> Callable[[list[Any]], Sequence[Any]]:
        modules.append(module)
        return lambda inputs: module(*inputs)

    monkeypatch.setattr(_torch, "inductor_compile", compile_region)
    return modules


def test_distinct_regions_do_not_grow_with_depth(compiled_modules: list[GraphModule]) -> None:
    counts = {}
    for layers in (4, 8):
        found = compilation(compiled(TiedStack(layers), torch.arange(32).view(4, 8), stage=3, backend="inductor"))
        counts[layers] = found.distinct_count
        assert found.region_count >= 2 * layers  # one of each block in the forward, one in the backward
    assert counts[4] == counts[8]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_regions_compute_what_the_whole_graph_does(compiled_modules: list[GraphModule], stage: int) -> None:
    tokens = torch.arange(32).view(4, 8)
    torch.manual_seed(0)
    plain = TiedStack(2)
    expected = plain(tokens)
    expected.backward()
    torch.manual_seed(0)
    with fake_ranks(1):
        model = zerofx.compile(TiedStack(2), stage=stage)
        loss = model(tokens)
        loss.backward()
    # Inductor's decompositions round differently from eager's kernels
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(whole(parameter.grad), other.grad, rtol=1e-5, atol=1e-7)


def test_no_region_holds_a_collective(compiled_modules: list[GraphModule]) -> None:
    compiled(TiedStack(3), torch.arange(32).view(4, 8), stage=3, backend="inductor")
    targets = {str(node.target) for module in compiled_modules for node in module.graph.nodes}
    assert targets
    assert not [target for target in targets if "c10d" in target or "zerofx" in target]
    # nor the buffer that one fills
    assert not [target for target in targets if "empty" in target]


def test_each_region_makes_the_constants_that_it_reads(compiled_modules: list[GraphModule]) -> None:
    tokens = torch.arange(32).view(4, 8)
    compiled(GPT(3, 64, 2, 64, 8), tokens, stage=3, backend="inductor", recompute="blocks")
    results = [source for module in compiled_modules for source in output_of(module.graph).all_input_nodes]
    assert len(compiled_modules) > 3
    # what the partitioner keeps for the backward, positions, is a result of the forward; the zeros around the attention's gradients are not
    assert not [node for node in results if node.target is torch.ops.aten.full.default]
    zeros = [node for module in compiled_modules for node in module.graph.nodes if node.target is torch.ops.aten.full.default]
    assert max(node.meta["val"].dim() for node in zeros) == 5


def test_a_product_does_not_wait_for_the_sum_that_it_is_a_part_of(compiled_modules: list[GraphModule]) -> None:
    compiled(TiedStack(2), torch.arange(32).view(4, 8), world_size=1, stage=3, backend="inductor")
    nodes = [node for module in compiled_modules for node in module.graph.nodes]
    # of the head's weight, that is the embedding's too: the sum comes last, and has been told to stand behind the product
    pinned = [before for node in nodes if str(node.target) == "control_deps" for before in node.args[0]]
    assert [node.target for node in pinned] == [torch.ops.aten.mm.default]
