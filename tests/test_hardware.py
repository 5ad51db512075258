"""Machines: names, numbers that cannot be, and what a link takes for a message."""

import dataclasses

import pytest
import torch

from zerofx.errors import ConfigError
from zerofx.hardware import PRESETS, Hardware, Link, hardware

BENT = Link(1.0, rates=((100, 10.0), (1000, 50.0)), exchange_rates=((100, 5.0),))


def test_presets_have_the_names_that_the_documentation_gives() -> None:
    assert {name: hardware(name).name for name in ("a100", "h100", "h200")} == {name: name for name in PRESETS}


def test_hardware_is_returned_as_it_is() -> None:
    mine = dataclasses.replace(hardware("h100"), name="mine", ranks_per_node=4)
    assert hardware(mine) is mine


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(ConfigError) as raised:
        hardware("h1000")
    assert "h1000" in raised.value.what
    for name in ("a100", "h100", "h200", "this_machine"):
        assert name in raised.value.why
    assert raised.value.remedy


@pytest.mark.parametrize(
    "numbers",
    [
        {"memory_bytes_per_s": 0.0},
        {"memory_bytes": -1},
        {"ranks_per_node": 0},
        {"launch_s": -1e-6},
        {"achievable": 1.1},
        {"flops_per_s": ()},
        {"flops_per_s": (("float32", -1.0),)},
        {"elements_per_s": (("exp", 0.0),)},
    ],
)
def test_numbers_that_cannot_be_are_refused(numbers: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(hardware("a100"), **numbers)


@pytest.mark.parametrize(
    "numbers",
    [
        {"latency_s": -1.0, "rates": ((1, 1.0),)},
        {"latency_s": 0.0, "rates": ()},
        {"latency_s": 0.0, "rates": ((10, 1.0), (5, 1.0))},
        {"latency_s": 0.0, "rates": ((10, 1.0), (20, 4.0))},  # 20 bytes in half the time of 10
        {"latency_s": 0.0, "rates": ((10, 1.0),), "exchange_rates": ((10, -1.0),)},
        {"latency_s": 0.0, "rates": ((10, 1.0),), "cpu_s_per_byte": -1.0},
    ],
)
def test_links_that_cannot_be_are_refused(numbers: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Link(**numbers)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [(0, 0.0), (50, 5.0), (100, 10.0), (550, 15.0), (1000, 20.0), (2000, 40.0)],
)
def test_a_message_lies_on_the_line_between_two_sizes(size: int, seconds: float) -> None:
    assert BENT.transfer_s(size) == pytest.approx(seconds)


def test_an_exchange_has_rates_of_its_own_where_the_link_has_them() -> None:
    assert BENT.transfer_s(100, exchange=True) == pytest.approx(20.0)
    assert hardware("h100").intra_node.transfer_s(2**20, exchange=True) == hardware("h100").intra_node.transfer_s(2**20)


def test_rates_fall_back_from_kind_to_dtype_to_fp32() -> None:
    machine = dataclasses.replace(
        hardware("a100"),
        flops_per_s=(("bfloat16", 100.0), ("float32", 10.0)),
        achievable=0.5,
        kernel_flops_per_s=(("attention", "bfloat16", 70.0),),
    )
    assert machine.rate_flops_per_s("attention", torch.bfloat16) == 70.0
    assert machine.rate_flops_per_s("attention", torch.float32) == 5.0
    assert machine.rate_flops_per_s("matmul", torch.bfloat16) == 50.0
    assert machine.rate_flops_per_s("matmul", torch.float64) == 5.0
    assert machine.peak_flops_per_s(torch.bfloat16) == 100.0


def test_later_machines_are_faster() -> None:
    a100, h100, h200 = (PRESETS[name] for name in ("a100", "h100", "h200"))
    assert a100.rate_flops_per_s("matmul", torch.bfloat16) < h100.rate_flops_per_s("matmul", torch.bfloat16)
    assert a100.memory_bytes_per_s < h100.memory_bytes_per_s < h200.memory_bytes_per_s
    for size in (2**10, 2**20, 2**30):
        assert h100.intra_node.transfer_s(size) <= a100.intra_node.transfer_s(size)
        assert h100.inter_node.transfer_s(size) < a100.inter_node.transfer_s(size)


def test_all_fields_carry_a_unit_or_are_counts() -> None:
    units = ("_s", "_bytes", "_per_s", "_per_byte", "rates", "_per_node", "name", "source", "achievable", "_node")
    for field in (*dataclasses.fields(Hardware), *dataclasses.fields(Link)):
        assert field.name.endswith(units), field.name
