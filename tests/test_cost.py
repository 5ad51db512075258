"""What nodes compute and move, which of them run as one kernel, and the seconds that this takes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.programs import TiedStack, compilation, compiled
from zerofx import _torch
from zerofx.cost import attribute_s, compute_s, kernel_s
from zerofx.hardware import hardware
from zerofx.kernels import FRESH_BYTES, Kernel, kernels
from zerofx.work import flops, is_free, kind_of, run_share

# A flop a nanosecond, a byte a nanosecond, launches free: seconds are counts.
COUNTING = dataclasses.replace(
    hardware("h100"),
    flops_per_s=(("float32", 1e9),),
    achievable=1.0,
    kernel_flops_per_s=(),
    memory_bytes_per_s=1e9,
    launch_s=0.0,
)


def traced(function: Callable[..., Any], *inputs: Tensor, mode: str = "fake") -> list[Node]:
    """Trace a function of tensors; return its nodes."""
    return list(make_fx(function, tracing_mode=mode)(*inputs).graph.nodes)


def shapes(nodes: Sequence[Node]) -> list[list[str]]:
    """Name the ops of each kernel."""
    return [[str(node.target).split(".")[1] for node in kernel.nodes] for kernel in kernels(nodes)]


def only(nodes: Sequence[Node]) -> Kernel:
    (kernel,) = kernels(nodes)
    return kernel


# ---------------------------------------------------------------- flops


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1, groups=1)
        self.up = nn.Linear(8 * 16, 32)
        self.down = nn.Linear(32, 4, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        hidden = functional.relu(self.up(self.conv(image).flatten(1)))
        return (self.down(hidden) @ torch.ones(4, 2)).sum()


def test_flops_are_those_that_torch_counts() -> None:
    model = Net()
    names, params = zip(*model.named_parameters(), strict=True)

    def step(image: Tensor, *params: Tensor) -> Any:
        loss = torch.func.functional_call(model, dict(zip(names, params, strict=True)), image)
        return torch.autograd.grad(loss, params)

    image = torch.randn(2, 3, 8, 8)
    with FlopCounterMode(display=False) as counter:
        step(image, *params)
    nodes = traced(step, image, *params)
    assert counter.get_total_flops() > 0
    assert sum(flops(node) for node in nodes) == counter.get_total_flops()
    assert sum(kernel.flops for kernel in kernels(nodes)) == counter.get_total_flops()


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_counts_on_a_cpu_as_elsewhere(is_causal: bool) -> None:
    inputs = [torch.randn(2, 4, 1024, 16, requires_grad=True) for _ in range(3)]

    def attend(*inputs: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(*inputs, is_causal=is_causal)

    def step(*inputs: Tensor) -> Any:
        return torch.autograd.grad(attend(*inputs).sum(), inputs)

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        attend(*inputs)
    forward, backward = (node for node in traced(step, *inputs) if flops(node))
    assert flops(forward) == counter.get_total_flops()
    # it computes the scores again: five products where the forward has two
    assert flops(backward) == 2.5 * counter.get_total_flops()
    assert (kind_of(forward), kind_of(backward)) == ("attention", "attention_backward")
    # 1024 keys are two blocks; of the four pairs with blocks of queries one is skipped
    assert run_share(forward) == run_share(backward) == (0.75 if is_causal else 1.0)


def test_products_are_told_apart_by_their_layout() -> None:
    def products(left: Tensor, right: Tensor) -> Any:
        return left @ right, left @ right.t(), left.t() @ right, functional.linear(left, right, right[0])

    nodes = traced(products, torch.randn(4, 4), torch.randn(4, 4))
    assert [kind_of(node) for node in nodes if flops(node)] == ["matmul", "matmul_nt", "matmul_tn", "matmul_nt"]


def test_dynamic_sizes_count_as_what_was_traced() -> None:
    def product(left: Tensor, right: Tensor) -> Tensor:
        return torch.relu(left @ right)

    left, right = torch.randn(6, 10), torch.randn(10, 14)
    dynamic, static = (kernels(traced(product, left, right, mode=mode)) for mode in ("symbolic", "fake"))
    assert [(kernel.flops, kernel.moved_bytes) for kernel in dynamic] == [(kernel.flops, kernel.moved_bytes) for kernel in static]
    assert dynamic[0].flops == 2 * 6 * 10 * 14


# ---------------------------------------------------------------- kernels


def test_a_chain_counts_once() -> None:
    kernel = only(traced(lambda x, y: torch.tanh(x * 2 + y).sum(1), torch.randn(8, 16), torch.randn(8, 16)))
    assert kernel.moved_bytes == (2 * 8 * 16 + 8) * 4
    assert kernel.elements == (("tanh", 8 * 16),)
    assert kernel.flops == 0
    assert kernel_s(kernel, COUNTING) == pytest.approx(kernel.moved_bytes * 1e-9)


def test_a_product_parts_chains() -> None:
    nodes = traced(lambda x, w: torch.relu((x * 2 + 1) @ w) * 3, torch.randn(8, 16), torch.randn(16, 4))
    assert shapes(nodes) == [["mul", "add"], ["mm"], ["relu", "mul"]]
    before, product, after = kernels(nodes)
    assert before.moved_bytes == 2 * 8 * 16 * 4
    assert product.moved_bytes == (8 * 16 + 16 * 4 + 8 * 4) * 4
    assert product.flops == 2 * 8 * 16 * 4
    assert after.moved_bytes == 2 * 8 * 4 * 4


def test_a_value_is_computed_where_it_is_read() -> None:
    # what waits for the product computes tanh of the input itself: it is neither written nor read
    nodes = traced(lambda x, w: (x @ w) * torch.tanh(x), torch.randn(8, 8), torch.randn(8, 8))
    assert shapes(nodes) == [["mm"], ["tanh", "mul"]]
    assert kernels(nodes)[1].moved_bytes == 3 * 8 * 8 * 4


def test_rows_go_on_and_columns_end_a_chain() -> None:
    rows = traced(lambda x: torch.softmax(x * 2, 1) + 1, torch.randn(8, 16))
    assert len(kernels(rows)) == 1
    columns = traced(lambda x: (x * 2).sum(0) + 1, torch.randn(8, 16))
    assert shapes(columns) == [["mul", "sum"], ["add"]]
    everything = traced(lambda x: (x * 2).sum() + 1, torch.randn(8, 16))
    assert shapes(everything) == [["mul", "sum"], ["add"]]


def test_a_sum_over_columns_reads_again_what_others_read_too() -> None:
    assert only(traced(lambda x: torch.tanh(x).sum(0), torch.randn(8, 16))).moved_bytes == (8 * 16 + 16) * 4
    both = kernels(traced(lambda x: (y := torch.tanh(x), y.sum(0)), torch.randn(8, 16)))
    assert [kernel.moved_bytes for kernel in both] == [2 * 8 * 16 * 4, (8 * 16 + 16) * 4]


def test_views_and_constants_are_free() -> None:
    nodes = traced(lambda x: x.view(16, 8).t().unsqueeze(0)[0], torch.randn(8, 16))
    assert kernels(nodes) == []
    assert compute_s(nodes, hardware("h100")) == 0.0
    kernel = only(traced(lambda x: x.t() + torch.full((16, 8), 3.0), torch.randn(8, 16)))
    assert kernel.moved_bytes == 2 * 8 * 16 * 4


def test_a_lookup_reads_the_rows_that_it_gives() -> None:
    kernel = only(traced(lambda rows, table: functional.embedding(rows, table), torch.tensor([1, 2, 3]), torch.randn(1000, 16)))
    assert kernel.moved_bytes == 3 * 8 + 2 * 3 * 16 * 4


def test_what_is_expanded_or_sliced_is_read_as_far_as_it_goes() -> None:
    assert only(traced(lambda x: x.expand(100, 16) + 1, torch.randn(1, 16))).moved_bytes == (16 + 100 * 16) * 4
    assert only(traced(lambda x: x[:2] + 1, torch.randn(100, 16))).moved_bytes == 2 * 2 * 16 * 4


def test_only_large_results_need_fresh_memory() -> None:
    rows = FRESH_BYTES // 4
    assert only(traced(lambda x: x + 1, torch.empty(rows))).fresh_bytes == FRESH_BYTES
    assert only(traced(lambda x: x + 1, torch.empty(rows - 1))).fresh_bytes == 0


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_real_program_is_accounted_for_to_the_last_node(phase: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "inductor_compile", lambda module, **_: lambda inputs: module(*inputs))
    model = compiled(TiedStack(2), torch.arange(32).view(4, 8), stage=3, backend=backend)
    program = getattr(compilation(model), phase)
    nodes = list(program.graph.nodes)
    found = [node for kernel in kernels(nodes) for node in kernel.nodes]
    assert len(found) == len(set(found))
    # constants are made where they are read
    missing = [node for node in nodes if not is_free(node) and node not in found]
    assert all(not node.all_input_nodes for node in missing)
    assert sum(flops(node) for node in nodes) == sum(kernel.flops for kernel in kernels(nodes)) > 0
    shares = attribute_s(nodes, hardware("h100"))
    assert shares.keys() == set(nodes)
    assert sum(shares.values()) == pytest.approx(compute_s(nodes, hardware("h100")))
    assert all(shares[node] == 0.0 for node in nodes if is_free(node))
    assert all(shares[node] > 0.0 for node in found)


# ---------------------------------------------------------------- seconds


def a_kernel(**numbers: Any) -> Kernel:
    plain = Kernel((), "matmul", torch.float32, flops=0, run_flops=0.0, moved_bytes=0, elements=(), fresh_bytes=0)
    return dataclasses.replace(plain, **numbers)


@pytest.mark.parametrize(
    ("numbers", "seconds"),
    [
        ({"flops": 5, "run_flops": 5.0, "moved_bytes": 3}, 5e-9),
        ({"flops": 5, "run_flops": 2.0, "moved_bytes": 3}, 3e-9),
        ({"moved_bytes": 3, "elements": (("exp", 4), ("erf", 4))}, 3e-9),  # COUNTING knows neither
    ],
)
def test_the_slower_of_arithmetic_and_memory_counts(numbers: dict[str, Any], seconds: float) -> None:
    assert kernel_s(a_kernel(**numbers), COUNTING) == pytest.approx(seconds)


def test_functions_fresh_memory_and_the_launch_add_up() -> None:
    slow = dataclasses.replace(COUNTING, elements_per_s=(("exp", 1e9), ("erf", 5e8)), page_in_bytes_per_s=1e8, launch_s=1e-6)
    kernel = a_kernel(moved_bytes=3, elements=(("exp", 4), ("erf", 4)), fresh_bytes=2)
    assert kernel_s(kernel, slow) == pytest.approx((4 + 8 + 20 + 1000) * 1e-9)


def test_a_chain_is_shared_out_by_bytes() -> None:
    nodes = traced(lambda x: (x * 2).sum(1), torch.randn(8, 16))
    shares = {str(node.target): share for node, share in attribute_s(nodes, COUNTING).items() if share}
    total = (8 * 16 + 8) * 4 * 1e-9
    assert shares == pytest.approx({"aten.mul.Tensor": total * 16 / 17, "aten.sum.dim_IntList": total / 17})
