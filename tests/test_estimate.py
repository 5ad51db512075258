"""ZeRO's closed forms: the paper's figures, symbols, what a compiled model sends, and bad input."""

import json
import math
import subprocess
import sys
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zerofx
from tests.programs import fake_ranks
from zerofx import formulas
from zerofx.__main__ import main
from zerofx.formulas import OPTIMIZER_STATES, PRECISIONS

# Table 1 of the paper: GB of model states of one device, by model and DP degree, at stages 1 / 2 / 3.
TABLE_1 = {
    7.5e9: {
        1: "120/120/120",
        4: "52.5/41.3/30",
        16: "35.6/21.6/7.5",
        64: "31.4/16.6/1.88",
        256: "30.4/15.4/0.47",
        1024: "30.1/15.1/0.12",
    },
    128e9: {
        1: "2048/2048/2048",
        4: "896/704/512",
        16: "608/368/128",
        64: "536/284/32",
        256: "518/263/8",
        1024: "513/257/2",
    },
    1e12: {
        1: "16000/16000/16000",
        4: "7000/5500/4000",
        16: "4750/2875/1000",
        64: "4187/2218/250",
        256: "4046/2054/62.5",
        1024: "4011/2013/15.6",
    },
}
SIZES = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "total_bytes", "host_bytes", "sent_bytes")


def totals_gb(params: float, world_size: int, **settings: Any) -> list[float]:
    return [found.total_bytes / 1e9 for found in zerofx.estimate(params, world_size, **settings).stages]


def as_printed(size_gb: float, published: str) -> str:
    """Write a size as the paper does, to the digits that it prints there: rounded below 100 GB, cut off above."""
    rounding = ROUND_HALF_UP if size_gb < 100 else ROUND_DOWN
    return str(Decimal(size_gb).quantize(Decimal(published), rounding))


def test_the_figures_of_the_paper() -> None:
    found = zerofx.estimate(7.5e9, world_size=64)
    rows = [line.split("  ") for line in str(found).splitlines() if line[:1].isdigit()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [row[0] for row in cells] == ["0", "1", "2", "3"]
    assert [row[4] for row in cells] == ["120 GB", "31.4 GB", "16.6 GB", "1.9 GB"]
    assert [row[-1] for row in cells] == ["1x", "1x", "1x", "1.5x"]
    assert [stage.traffic_ratio for stage in found.stages] == [1, 1, 1, 1.5]
    assert found.setup.multiplier == 12


@pytest.mark.parametrize("params", TABLE_1)
def test_table_1_of_the_paper(params: float) -> None:
    for world_size, row in TABLE_1[params].items():
        published = row.split("/")
        found = totals_gb(params, world_size)
        assert [as_printed(size, text) for size, text in zip(found[1:], published, strict=True)] == published, world_size
        assert found[0] == 16 * params / 1e9


@pytest.mark.parametrize(
    ("params", "world_size", "expected_gb"),
    [
        (7.5e9, 2, [120, 75, 67.5, 60]),
        (7.5e9, 8, [120, 41.25, 28.125, 15]),
        (128e9, 2, [2048, 1280, 1152, 1024]),
        (128e9, 8, [2048, 704, 480, 256]),
        (1e12, 2, [16000, 10000, 9000, 8000]),
        (1e12, 8, [16000, 5500, 3750, 2000]),
    ],
)
def test_worlds_that_the_table_leaves_out(params: float, world_size: int, expected_gb: list[float]) -> None:
    assert totals_gb(params, world_size) == expected_gb


@pytest.mark.parametrize(
    ("settings", "expected_gb"),
    [
        ({"precision": "fp32"}, [16, 10, 7, 4]),  # parameters and gradients 4 + 4, Adam 8, no masters
        ({"precision": torch.float32, "optimizer": "sgd"}, [8, 8, 5, 2]),
        ({"precision": "fp16", "optimizer": "SGD"}, [8, 5, 3.5, 2]),  # the master stays
        ({"precision": torch.bfloat16, "optimizer": "lion"}, [12, 6, 4.5, 3]),
        ({"precision": "fp32", "optimizer": "momentum"}, [12, 9, 6, 3]),
        ({"optimizer": 6}, [10, 5.5, 4, 2.5]),
        ({"optimizer": 0}, [4, 4, 2.5, 1]),
        ({"offload": "optimizer"}, [16, 4, 2.5, 1]),
        ({"offload": ("gradients", "optimizer")}, [16, 4, 2, 0.5]),
        ({"offload": ("optimizer", "parameters")}, [16, 4, 2.5, 0.5]),
    ],
    ids=str,
)
def test_precisions_optimizers_and_offload(settings: dict[str, Any], expected_gb: list[float]) -> None:
    assert totals_gb(1e9, 4, **settings) == expected_gb


@pytest.mark.parametrize("offload", ["optimizer", "gradients", "parameters"])
def test_what_leaves_the_device_is_on_the_host(offload: str) -> None:
    here, there = zerofx.estimate(1e9, 4), zerofx.estimate(1e9, 4, offload=offload)
    for before, after in zip(here.stages, there.stages, strict=True):
        moves = before.stage >= {"optimizer": 1, "gradients": 2, "parameters": 3}[offload]
        assert after.host_bytes == (getattr(before, f"{offload}_bytes") if moves else 0)
        assert after.total_bytes + after.host_bytes == before.total_bytes
        assert after.sent_bytes == before.sent_bytes
    assert "host" in str(there)
    assert "host" not in str(here)


@settings(deadline=None)  # sympy's caches fill in the first examples
@given(
    params=st.integers(1, 10**13),
    world_size=st.integers(1, 5000),
    optimizer=st.fractions(0, 16, max_denominator=8),
    micro_batches=st.integers(1, 64),
)
def test_symbols_give_what_numbers_give(params: int, world_size: int, optimizer: Fraction, micro_batches: int) -> None:
    symbols = sympy.symbols("P N K g", positive=True)
    values = dict(zip(symbols, (params, world_size, sympy.Rational(optimizer), micro_batches), strict=True))
    numbers = zerofx.estimate(params, world_size, optimizer=optimizer, micro_batches=micro_batches)
    for opened, closed in zip(SYMBOLIC.stages, numbers.stages, strict=True):
        for name in (*SIZES, "traffic_ratio"):
            assert float(sympy.sympify(getattr(opened, name)).subs(values)) == getattr(closed, name), name


SYMBOLIC = zerofx.estimate(
    *sympy.symbols("P N", positive=True),
    optimizer=sympy.Symbol("K", positive=True),
    micro_batches=sympy.Symbol("g", positive=True),
)


def test_what_depends_on_no_symbol_is_a_number() -> None:
    ranks = sympy.Symbol("N", positive=True, integer=True)
    first, second, *_ = zerofx.estimate(7.5e9, ranks).stages
    assert first.total_bytes == 120e9
    assert isinstance(first.total_bytes, float)
    assert second.total_bytes == 30 * 10**9 + 90 * 10**9 / ranks
    assert zerofx.estimate(sympy.Integer(7), sympy.Integer(2)) == zerofx.estimate(7, 2)
    layers, width = sympy.symbols("L H", positive=True)
    assert zerofx.estimate(12 * layers * width**2, 4, stage=3).stages[0].total_bytes == 48 * layers * width**2


def test_formulas_take_symbols_for_all_they_take() -> None:
    total, ranks, steps = sympy.symbols("B N g")
    assert formulas.parameters_bytes(3, total, ranks) == total / ranks
    assert sum(formulas.sent_bytes(3, total, ranks, steps).values()) == 3 * steps * total * (ranks - 1) / ranks
    assert formulas.parameters_bytes(3, 10, 4) == 2.5
    assert formulas.sent_bytes(2, 10, 4) == {"all_gather": 7.5, "reduce_scatter": 7.5, "all_reduce": 0}


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("world_size", [1, 2, 4, 1000])
def test_traffic_is_that_of_the_design(world_size: int, micro_batches: int) -> None:
    found = zerofx.estimate(6e9, world_size, micro_batches=micro_batches).by_stage
    once, g = 12e9 * (world_size - 1) / world_size, micro_batches
    expected = {0: (0, 0, 2), 1: (1, 1, 0), 2: (1, g, 0), 3: (2 * g, g, 0)}
    for stage, times in expected.items():
        assert tuple(found[stage].traffic_bytes.values()) == tuple(once * number for number in times), stage
        assert found[stage].sent_bytes == once * sum(times)
    assert [found[stage].traffic_ratio for stage in range(4)] == [1, 1, (1 + g) / 2, 3 * g / 2]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_compiled_model_sends_what_the_estimate_says(world_size: int) -> None:
    for stage in range(4):
        model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(48, 48), nn.Tanh())])
        params = sum(parameter.numel() for parameter in model.parameters())
        with fake_ranks(world_size):
            zerofx.compile(model, stage=stage, backend="aot_eager")
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(2):  # the first step finds nothing to refresh
                model(torch.ones(2, 48)).sum().backward()
                optimizer.step()
            scheduled = zerofx.schedule(model).traffic_bytes
        estimated = zerofx.estimate(params, world_size, stage=stage, precision="fp32", optimizer="sgd").stages[0].traffic_bytes
        if stage == 3:  # the block that the backward starts with is gathered once
            assert estimated["all_gather"] / 2 < scheduled.pop("all_gather") <= estimated["all_gather"]
        assert scheduled == {kind: estimated[kind] for kind in scheduled}, stage


X = sympy.Symbol("x", negative=True)
BAD: dict[str, dict[str, Any]] = {
    "params=0": {"params": 0},
    "params=-1": {"params": -1},
    "params=nan": {"params": math.nan},
    "params=inf": {"params": math.inf},
    "params=1e+30": {"params": 1e30},
    "params=7.5": {"params": 7.5},
    "params=True": {"params": True},
    "params='7b'": {"params": "7b"},
    "params=None": {"params": None},
    "params=oo": {"params": sympy.oo},
    "params=I": {"params": sympy.I},
    "params=x": {"params": X},
    "params=an int of 16610 bits": {"params": -(10**5000)},
    "world_size=0": {"world_size": 0},
    "world_size=2.5": {"world_size": 2.5},
    "world_size=n + 1/2": {"world_size": sympy.Symbol("n", integer=True) + sympy.Rational(1, 2)},
    "world_size=1e+20": {"world_size": 1e20},
    "micro_batches=0": {"micro_batches": 0},
    "micro_batches=1.5": {"micro_batches": 1.5},
    "optimizer=-1": {"optimizer": -1},
    "optimizer=nan": {"optimizer": math.nan},
    "optimizer=1000000.0": {"optimizer": 1e6},
    "optimizer='adamm'": {"optimizer": "adamm"},
    "precision='fp7'": {"precision": "fp7"},
    "precision='int8'": {"precision": torch.int8},
    "offload='disk'": {"offload": ("optimizer", "disk")},
    "offload=1": {"offload": 1},
    "stage=4": {"stage": 4},
    "stage='3'": {"stage": "3"},
    "stage=True": {"stage": True},
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_has_four_parts(words: str) -> None:
    with pytest.raises(zerofx.ConfigError) as caught:
        zerofx.estimate(**{"params": 1000, "world_size": 4, **BAD[words]})
    error = caught.value
    assert words in error.what
    assert all(part.strip() for part in (error.what, error.where, error.why, error.remedy))


@pytest.mark.parametrize(
    ("argument", "names"),
    [("optimizer", OPTIMIZER_STATES), ("precision", PRECISIONS), ("offload", ("optimizer", "gradients", "parameters"))],
)
def test_an_unknown_name_is_told_the_known_ones(argument: str, names: Any) -> None:
    with pytest.raises(zerofx.ConfigError) as caught:
        zerofx.estimate(1000, 4, **{argument: "no such name"})
    assert caught.value.why == f"known are {', '.join(names)}"
    for name in names:
        assert zerofx.estimate(1000, 4, **{argument: name}).stages


def test_json_holds_every_figure() -> None:
    found = zerofx.estimate(7.5e9, sympy.Symbol("N"), stage=1, optimizer=0.5)
    written = json.loads(found.to_json())
    assert written["setup"] == {
        "params": 7_500_000_000,
        "world_size": "N",
        "precision": "bf16",
        "optimizer": "",
        "multiplier": 0.5,
        "offload": [],
        "micro_batches": 1,
    }
    (stage,) = written["stages"]
    assert (stage["stage"], stage["parameters_bytes"], stage["optimizer_bytes"]) == (1, 15e9, "3750000000/N")
    assert stage["traffic_bytes"]["all_reduce"] == 0


def test_sizes_are_printed_in_their_unit() -> None:
    def cell(params: int) -> str:
        return zerofx.estimate(params, 1, stage=0, precision="fp16").stages[0].cells()["parameters"]

    assert [cell(count) for count in (1, 499, 500, 49_960, 49_990, 499_700, 499_800)] == [
        "2 B",
        "998 B",
        "1.0 kB",
        "99.9 kB",
        "100 kB",
        "999 kB",
        "1.0 MB",
    ]


def test_the_command_prints_what_the_function_returns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    assert main(["estimate", "--params", "7.5e9", "--world-size", "64"]) == 0
    assert capsys.readouterr().out == f"{zerofx.estimate(7.5e9, 64)}\n"
    options = "--stage 3 --optimizer 8 --precision fp32 --micro-batches 4 --offload optimizer parameters --json"
    assert main(["estimate", "--params", "125000000", "--world-size", "8", *options.split(), str(figures)]) == 0
    expected = zerofx.estimate(125_000_000, 8, stage=3, optimizer=8, precision="fp32", micro_batches=4, offload=("optimizer", "parameters"))
    assert capsys.readouterr().out == f"{expected}\n"
    assert figures.read_text() == f"{expected.to_json()}\n"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--params nan", "params=nan is not a whole number from 1 to 1e+18: it is a count of parameters"),
        ("--world-size 2.5", "world_size=2.5 is not a whole number from 1 to 1e+09: it is a count of ranks"),
        ("--optimizer adamm", "optimizer='adamm' is not known: known are adagrad, adam,"),
        ("--deepspeed no_such_file", "'no_such_file' is not a JSON file: "),
    ],
)
def test_the_command_says_in_a_sentence_what_is_wrong(options: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--params", "1e9", "--world-size", "4", *options.split()]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"zerofx estimate: {complaint}")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_the_command_refuses_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["estimate", "--params", "7.5 billion", "--world-size", "4"])
    assert stopped.value.code == 2
    assert "'7.5 billion' is not a number" in capsys.readouterr().err


def test_the_command_waits_for_neither_torch_nor_sympy() -> None:
    code = (
        "import sys; from zerofx.__main__ import main; "
        "status = main(['estimate', '--params', '7.5e9', '--world-size', '64']); "
        "print({'torch', 'sympy'} & set(sys.modules), status)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert printed.splitlines()[-1] == "set() 0"
