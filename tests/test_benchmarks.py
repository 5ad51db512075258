"""The benchmarks' own machinery: the slow link, ranks that die, steps that others disturb, tables and picture."""

import json
import os
import shutil
import signal
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import link, measure, memory, picture, report
from benchmarks.contestants import CONTESTANTS, FLOOR, Setting
from benchmarks.link import Link, burst_bytes, parse_rate, slow_link
from benchmarks.measure import Step
from benchmarks.options import Options, parse, parser
from benchmarks.ranks import RankError, on_link
from benchmarks.results import timings
from benchmarks.workloads import WORKLOADS
from zerofx.__main__ import main

HAS_LINK = os.geteuid() == 0 and all(shutil.which(program) for program in ("ip", "tc"))


# ---------------------------------------------------------------- the link


def test_rates_are_read_in_bits() -> None:
    assert [parse_rate(text) for text in ("500mbit", "2gbit", "1.5kbit", "loopback")] == [500_000_000, 2_000_000_000, 1_500, None]
    for text in ("fast", "0mbit", "1 gbit", ""):
        with pytest.raises(ValueError, match="neither a rate"):
            parse_rate(text)


def test_a_burst_is_a_millisecond_and_holds_two_large_packets() -> None:
    assert burst_bytes(500_000_000) == burst_bytes(1_000_000_000) == 131_072
    assert burst_bytes(2_000_000_000) == 250_000
    assert burst_bytes(10_000_000_000) == 1_250_000


def _sends(joined: Link, size: int) -> dict[str, Any]:
    """Send tensors from rank 0 to rank 1 at two rates that are set meanwhile."""
    took = []
    for rate_bits in (800_000_000, 80_000_000) if joined.is_limited else (None,):
        if dist.get_rank() == 0:
            joined.set_rate(rate_bits)
        dist.barrier()
        before, start = joined.sent_bytes(), time.perf_counter()
        tensor = torch.ones(size, dtype=torch.uint8)
        dist.send(tensor, 1) if dist.get_rank() == 0 else dist.recv(tensor, 0)
        dist.barrier()
        took.append((time.perf_counter() - start, joined.sent_bytes() - before))
    return {"took": took, "cores": sorted(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}


def test_ranks_talk_over_the_link_at_its_rate_and_nothing_is_left() -> None:
    size = 2_000_000
    with slow_link(2) as joined:
        names = [*joined.namespaces, *filter(None, [joined.bridge])]
        assert set(names) <= set(link.namespaces())
        first, second = on_link(_sends, joined, 2, size, timeout_s=60)
    assert not set(names) & set(link.namespaces())
    assert first["threads"] == second["threads"] == 1
    assert len(first["cores"]) == 1
    assert os.cpu_count() == 1 or first["cores"] != second["cores"]
    if HAS_LINK:
        assert joined.is_limited, joined.note
        (fast_s, fast_bytes), (slow_s, _) = first["took"]
        assert 1.0 < fast_bytes / size < 1.1
        assert slow_s > 8 * (size - 131_072) / 80_000_000 > fast_s
    else:
        assert joined.interface == "lo"


def test_without_root_or_iproute2_a_sentence_says_so_and_loopback_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link.shutil, "which", lambda program: None if program == "tc" else f"/sbin/{program}")
    monkeypatch.setattr(link.os, "geteuid", lambda: 0)
    with slow_link(2) as joined:
        assert joined.note == "No slow link, loopback instead: iproute2 is not installed (tc not found)."
        assert joined.interface == "lo"
        assert not joined.is_limited
    monkeypatch.setattr(link.os, "geteuid", lambda: 1000)
    with slow_link(2) as joined:
        assert joined.note == "No slow link, loopback instead: network namespaces need root."
    assert Options().on_loopback().rates == ("loopback",)


def _dies(joined: Link, how: str, clock: Path) -> None:
    if dist.get_rank() == 1:
        clock.write_text(str(time.monotonic()))
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the last words of a rank")
    dist.barrier()


@pytest.mark.parametrize(("how", "words"), [("signal", "rank 1 was ended by SIGKILL"), ("raise", "the last words of a rank")])
def test_a_rank_that_dies_ends_all_and_the_link(how: str, words: str, tmp_path: Path) -> None:
    clock = tmp_path / "died"
    with pytest.raises(RankError, match="so all ranks were ended") as raised, slow_link(2) as joined:
        on_link(_dies, joined, 2, how, clock)
    assert words in str(raised.value)
    assert "rank 1" in raised.value.what
    assert time.monotonic() - float(clock.read_text()) < 30
    assert not set(joined.namespaces) & set(link.namespaces())


def _hangs(joined: Link) -> None:
    time.sleep(600)


def test_ranks_that_do_not_finish_are_ended() -> None:
    with pytest.raises(RankError, match="rank 0 did not finish within 4 s"), slow_link(1) as joined:
        on_link(_hangs, joined, 1, timeout_s=4)


# ---------------------------------------------------------------- contestants


def _trains(joined: Link, names: list[str]) -> dict[str, Any]:
    from benchmarks.step_time import prepare, reference_losses

    setting = Setting(WORKLOADS["tiny"], torch.float32)
    expected = reference_losses(setting)
    found = {name: prepare(name, setting, expected, 1e-4) for name in names}
    wrong = prepare("ddp", setting, [2 * loss for loss in expected], 1e-4)
    return {"found": [text for text in found.values() if isinstance(text, str)], "wrong": wrong, "falls": expected[-1] < expected[0]}


def test_contestants_train_as_plain_data_parallel_does_and_a_wrong_loss_is_told() -> None:
    names = ["ddp", "fsdp2", "fsdp2, tuned", "fsdp2, tuned, our collectives"]
    with slow_link(2) as joined:
        results = on_link(_trains, joined, 2, names, timeout_s=120)
    for found in results:
        assert found["found"] == []
        assert found["falls"]
        assert found["wrong"].startswith("wrong: loss")


def test_every_workload_builds_and_names_its_blocks() -> None:
    gpt = WORKLOADS["gpt"]
    with torch.device("meta"):
        model = gpt.build()
    assert 33e6 < sum(param.numel() for param in model.parameters()) < 35e6
    for name in ("narrow", "tiny", "llama"):
        workload = WORKLOADS[name]
        model = workload.build()
        assert len(workload.blocks(model)) > 1
        assert model(workload.batch(0)).shape == ()


def test_model_states_follow_zeros_formula() -> None:
    # AdamW, two ranks, fp32: 16 bytes a parameter replicated (parameter, gradient, two moments), half of it at stage 3
    assert memory.formula_bytes(0, 1000, torch.float32, 2) == 16_000
    assert memory.formula_bytes(3, 1000, torch.float32, 2) == 8_000
    # stage 2 keeps fp32 masters apart from the whole copies that compute
    assert memory.formula_bytes(2, 1000, torch.bfloat16, 2) == 2_000 + 2_000 + 6_000


# ---------------------------------------------------------------- figures


def _row(name: str, rate: str, *seconds: float, foreign_s: float = 0.0, sent_bytes: float = 1e8) -> dict[str, Any]:
    steps = [{"seconds": second, "foreign_s": foreign_s, "sent_bytes": sent_bytes} for second in seconds]
    return {"contestant": name, "dtype": "fp32", "rate": rate, "steps": steps}


def _result() -> dict[str, Any]:
    rows = [
        _row("zerofx 3", "loopback", 2.0, 2.2, 2.1),
        _row("fsdp2", "loopback", 4.0, 4.4, 4.2),
        _row(FLOOR, "loopback", 1.9, 2.0, 2.0, sent_bytes=0),
        _row("zerofx 3", "1gbit", 2.5, 2.5, 2.5),
        _row("fsdp2", "1gbit", 5.0, 5.0, 5.0),
        _row(FLOOR, "1gbit", 2.0, 2.0, 2.0, sent_bytes=0),
        {"contestant": "deepspeed 3", "dtype": "fp32", "error": "ModuleNotFoundError: No module named 'deepspeed'"},
    ]
    return {"subject": "step_time", "rates": ["loopback", "1gbit"], "workload": "gpt", "ranks": 2, "rows": rows}


def test_disturbed_steps_are_dropped_and_counted() -> None:
    share = measure.DISTURBED_SHARE * (os.cpu_count() or 1)
    assert not Step(1.0, 0.9 * share, 0.0).is_disturbed
    assert Step(1.0, 1.1 * share, 0.0).is_disturbed
    result = _result()
    result["rows"][0]["steps"][1]["foreign_s"] = 5.0
    (found,) = timings(result)
    assert found.median_s("zerofx 3", "loopback") == pytest.approx(2.05)
    assert found.dropped("zerofx 3") == 1
    assert found.ratio("zerofx 3", "fsdp2", "loopback") == pytest.approx(0.5)
    for step in result["rows"][0]["steps"]:
        step["foreign_s"] = 5.0
    assert timings(result)[0].median_s("zerofx 3", "loopback") == pytest.approx(2.1)  # better than nothing


def test_bounds_are_the_floor_and_the_wire() -> None:
    (found,) = timings(_result())
    assert found.wire_s("zerofx 3", "loopback") is None
    assert found.wire_s("zerofx 3", "1gbit") == pytest.approx(0.8 / 0.95)
    assert found.bound_s("zerofx 3", "1gbit") == pytest.approx(2.0)
    assert found.exposed_s("zerofx 3", "1gbit") == pytest.approx(0.5)


def test_tables_hold_medians_ratios_and_errors() -> None:
    text = " ".join(report.step_time(_result()).split())
    assert "| zerofx 3 | 2.10 | 2.50 | 100 | 0 of 6 |" in text
    assert "deepspeed 3: ModuleNotFoundError: No module named 'deepspeed'" in text
    assert "0.50 (fsdp2)" in text
    assert "0.50 (59% of 0.84)" in report.overlap(_result())


def test_the_picture_is_wellformed_and_shows_every_contestant() -> None:
    (found,) = timings(_result())
    root = ElementTree.fromstring(picture.svg(found, "<source> & date"))
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for words in ("zerofx 3", "fsdp2", "compute floor", "wire time", "1gbit", "loopback", "<source> & date"):
        assert any(words in text for text in texts), words
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 4
    for line in lines:
        for x, y in (point.split(",") for point in line.attrib["points"].split()):
            assert 0 <= float(x) <= 960
            assert 0 <= float(y) <= 560


def test_the_curves_show_every_point_and_name_the_first_series() -> None:
    series = {"measured": {"<all>": (1.0, 2e6), "none": (0.5, 4e6)}, "planned": {"<all>": (0.9, 2e6), "none": (0.4, 4e6)}}
    root = ElementTree.fromstring(picture.curves(series, "title & more", "source"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [texts.count(name) for name in ("<all>", "none", "measured", "planned", "title & more")] == [1] * 5
    lines = [line.attrib["points"].split() for line in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(line) for line in lines] == [2, 2]
    # less time is further left, less memory further down
    (slow, low), (fast, high) = ([float(number) for number in point.split(",")] for point in lines[0])
    assert fast < slow
    assert high < low


def test_a_report_is_made_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure.write(tmp_path / "result.json", **_result())
    written = json.loads((tmp_path / "result.json").read_text())
    assert {"torch", "python", "processor", "cores", "date"} <= set(written)
    report.main([str(tmp_path / "result.json"), "--svg", str(tmp_path / "picture.svg")])
    assert "workload gpt, ranks 2" in capsys.readouterr().out
    assert (tmp_path / "picture.svg").read_text().startswith("<svg")


def test_a_processor_that_is_slow_in_a_dtype_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_matmul_s", lambda dtype: 40.0 if dtype is torch.bfloat16 else 1.0)
    assert measure.slow_dtype_note(torch.float32) == ""
    assert "multiplies torch.bfloat16 40 times slower than fp32" in measure.slow_dtype_note(torch.bfloat16)


def test_options_are_shared() -> None:
    options, _ = parse(parser("subject"), ["--rates", "1gbit", "--contestants", "ddp", FLOOR, "--dtype", "bf16", "--steps", "3"])
    assert options == Options(rates=("1gbit",), contestants=("ddp", FLOOR), dtypes=("bf16",), steps=3)
    assert Options().contestants == tuple(CONTESTANTS)
    with pytest.raises(SystemExit):
        parse(parser("subject"), ["--rates", "fast"])


def test_bench_outside_of_a_source_tree_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("zerofx.__main__.__file__", str(tmp_path / "zerofx" / "__main__.py"))
    assert main(["bench"]) == 1
    assert "zerofx bench: benchmarks/ is no part of the installed package: run" in capsys.readouterr().err
