"""This machine: measured once, kept, agreed on by the ranks; a file that makes no sense is measured again."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.programs import fake_ranks
from tests.ranks import Pool
from zerofx import calibrate, measure
from zerofx.errors import ConfigError
from zerofx.groups import resolve_mesh
from zerofx.hardware import hardware
from zerofx.machine import Hardware

FIGURES: dict[str, Any] = {
    "flops_per_s": (("float32", 7e10), ("bfloat16", 1e10)),
    "kernel_flops_per_s": (("attention", "bfloat16", 5e10),),
    "memory_bytes_per_s": 1.5e10,
    "memory_bytes": 2**33,
    "elements_per_s": (("exp", 9e8),),
    "launch_s": 5e-6,
    "page_in_bytes_per_s": 4e9,
    "disk_bytes_per_s": 1e9,
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Keep calibrations in a folder of the test's own; stand in for the measurement and count it."""
    taken: list[dict[str, Any]] = []

    def processor() -> dict[str, Any]:
        taken.append(dict(FIGURES))
        return taken[-1]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "processor", processor)
    return taken


def the_file(folder: Path) -> Path:
    (path,) = (folder / "zerofx").iterdir()
    return path


def test_a_machine_is_measured_once(measured: list[dict[str, Any]], tmp_path: Path) -> None:
    first = hardware("this_machine")
    assert first.name == "this_machine"
    assert first.flops_per_s == FIGURES["flops_per_s"]
    assert hardware("this_machine") == first
    assert len(measured) == 1
    assert the_file(tmp_path).name.startswith("calibration-")


DAMAGES: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut off": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[]",
    "null": lambda text: "null",
    "binary": lambda text: "\0" + text,
    "another field": lambda text: text.replace('"launch_s"', '"launch"'),
    "no link": lambda text: text.replace('"intra_node"', '"inner"'),
    "negative": lambda text: json.dumps(json.loads(text) | {"memory_bytes_per_s": -1.0}),
    "text": lambda text: json.dumps(json.loads(text) | {"memory_bytes_per_s": "fast"}),
    "no rate": lambda text: json.dumps(json.loads(text) | {"flops_per_s": [["float32"]]}),
    "no table": lambda text: json.dumps(json.loads(text) | {"intra_node": 3}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_makes_no_sense_is_measured_again(damage: str, measured: list[dict[str, Any]], tmp_path: Path) -> None:
    first = hardware("this_machine")
    path = the_file(tmp_path)
    good = path.read_text()
    path.write_text(DAMAGES[damage](good))
    assert hardware("this_machine") == first
    assert len(measured) == 2
    assert path.read_text() == good


def test_bytes_that_are_no_text_are_measured_again(measured: list[dict[str, Any]], tmp_path: Path) -> None:
    first = hardware("this_machine")
    the_file(tmp_path).write_bytes(b"\xff\xfe\x00")
    assert hardware("this_machine") == first
    assert len(measured) == 2


def test_threads_and_interface_each_have_a_calibration(
    measured: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware("this_machine")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "another0")
    hardware("this_machine")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    hardware("this_machine")
    assert len(measured) == len(list((tmp_path / "zerofx").iterdir())) == 3


def test_a_folder_that_cannot_be_written_keeps_nothing(
    measured: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert hardware("this_machine").memory_bytes == FIGURES["memory_bytes"]
    assert hardware("this_machine").launch_s == FIGURES["launch_s"]
    assert len(measured) == 2


def test_writers_at_once_leave_one_whole_file(measured: list[dict[str, Any]], tmp_path: Path) -> None:
    machine = hardware("this_machine")
    path = tmp_path / "zerofx" / "calibration-shared.json"
    with ThreadPoolExecutor(8) as pool:
        for kept in [pool.submit(calibrate.save, machine, path) for _ in range(100)]:
            kept.result()
            assert calibrate.load(path) == machine
    assert len(list(path.parent.iterdir())) == 2  # no temporary file stays


def test_ranks_of_accelerators_are_not_measured(measured: list[dict[str, Any]]) -> None:
    with fake_ranks(2):
        mesh, group = resolve_mesh(None, "cpu")
        with pytest.raises(ConfigError, match="fake") as raised:
            hardware("this_machine", mesh, group)
    assert "h100" in raised.value.remedy
    assert not measured


def agree(rank: int, world: int, folder: str) -> list[Any]:
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{rank}"  # as on machines that share no folder
    mesh, group = resolve_mesh(None, "cpu")
    calls = []

    def processor() -> dict[str, Any]:
        calls.append(rank)
        # rank 1 is disturbed, and no two are equal
        return FIGURES | {"memory_bytes_per_s": 1e10 + rank, "flops_per_s": (("float32", 7e10 / (1 + rank % 2)),)}

    original, measure.processor = (measure.processor, measure._BUCKETS_BYTES), processor
    measure._BUCKETS_BYTES = (2**13, 2**16, 2**23)
    try:
        first = calibrate.this_machine(mesh, group)
        if rank == 1:
            for path in Path(folder, "1", "zerofx").iterdir():
                path.write_text("broken")
        dist.barrier()
        again = calibrate.this_machine(mesh, group)
        if rank == 0:
            for path in Path(folder, "0", "zerofx").iterdir():
                path.unlink()
        dist.barrier()
        measured = calibrate.this_machine(mesh, group)
    finally:
        measure.processor, measure._BUCKETS_BYTES = original
        del os.environ["XDG_CACHE_HOME"]
    return [first, again, measured, len(calls)]


def test_ranks_agree_whatever_each_has_measured_or_kept(ranks: Pool, tmp_path: Path) -> None:
    results = ranks.run(agree, 3, str(tmp_path))
    first, again, measured = results[0][:3]
    assert [result[:3] for result in results] == [[first, again, measured]] * 3
    # the first rank's file counts: another's damage makes nobody measure, its own loss makes all
    assert first == again
    assert [result[3] for result in results] == [2, 2, 2]
    assert isinstance(first, Hardware)
    assert first.memory_bytes_per_s == 1e10 + 1  # the median
    assert first.flops_per_s == (("float32", 7e10),)
    assert first.ranks_per_node == 3
    assert first.memory_bytes == FIGURES["memory_bytes"] // 3
    for table in (first.intra_node.rates, first.intra_node.exchange_rates):
        assert len(table) > 1
    assert first.intra_node.latency_s > 0
    assert first.intra_node.cpu_s_per_byte > 0


def test_the_processor_is_measured_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in {
        "_PRODUCTS": ((16, 16, 16), (16, 32, 16)),
        "_ATTENTION": (1, 1, 16, 8),
        "_MEMORY_BYTES": 2**16,
        "_ELEMENTS": 2**8,
        "_FRESH_BYTES": 2**16,
        "_LEAST_S": 0.0,
    }.items():
        monkeypatch.setattr(measure, name, small)
    figures = measure.processor()
    assert {name for name, _ in figures["flops_per_s"]} == {"float32", "bfloat16"}
    link = calibrate._LOOPBACK
    machine = Hardware(name="it", source="", ranks_per_node=1, intra_node=link, inter_node=link, **figures)  # which checks the numbers
    assert machine.memory_bytes > 2**20
    assert dict(machine.elements_per_s).keys() == {"exp", "erf", "log", "sin", "tanh"}
