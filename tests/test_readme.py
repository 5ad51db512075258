"""The README's code runs, and what it prints is what the library prints."""

import re
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch

import zerofx
from tests.programs import TiedStack, compilation, fake_ranks
from zerofx.program import Level

README = (Path(__file__).parent.parent / "README.md").read_text()


def _block(containing: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    (found,) = [block for block in blocks if containing in block]
    return found


@pytest.fixture
def custom_pass() -> Any:
    code = _block("class NoPrefetch")
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    names: dict[str, Any] = {"__name__": "readme"}
    exec(code, names)
    return names["NoPrefetch"]()


def _order(passes: list[Any]) -> list[tuple[str, int]]:
    torch.manual_seed(0)
    with fake_ranks(2):
        model = zerofx.compile(TiedStack(4), stage=3, backend="aot_eager", passes=passes)
        model(torch.arange(16).view(2, 8)).backward()
    forward = compilation(model).forward
    assert forward is not None
    return [(mark.kind, mark.bucket) for _, mark in forward.marked("gather_start", "gather_wait")]


def test_the_pass_of_the_readme_takes_prefetch_away(custom_pass: Any) -> None:
    order = _order([custom_pass])
    assert order == [(kind, bucket) for bucket in range(len(order) // 2) for kind in ("gather_start", "gather_wait")]
    assert _order([]) != order


def test_a_misplaced_pass_is_refused() -> None:
    misplaced = type("Misplaced", (), {"takes": Level.SCHEDULED, "gives": Level.UNSHARDED, "plan": None, "apply": None})()
    model = TiedStack(1)
    with fake_ranks(2), pytest.raises(zerofx.ConfigError, match="cannot stand here"):
        zerofx.compile(model, stage=3, backend="aot_eager", passes=[misplaced])


def test_the_schedule_of_the_readme_is_printed_by_the_library() -> None:
    printed = re.search(r"```text\n(ZeRO stage 3.*?)```", README, re.S)
    assert printed is not None
    torch.manual_seed(0)
    with fake_ranks(2):
        model = zerofx.compile(TiedStack(12, width=256, vocabulary=4096), stage=3, backend="aot_eager")
        model(torch.arange(16).view(2, 8)).backward()
        assert str(zerofx.schedule(model)).strip() == printed[1].strip()


def test_the_estimate_of_the_readme_is_printed_by_the_library() -> None:
    printed = re.search(r"```text\n(model states.*?)```", README, re.S)
    assert printed is not None
    assert str(zerofx.estimate(7.5e9, world_size=64)).strip() == printed[1].strip()
    params, ranks = sympy.symbols("P N")
    claim = re.search(r"`zerofx.estimate\(P, N\).by_stage\[2\].total_bytes` is `(.*?)`", README)
    assert claim is not None
    assert str(zerofx.estimate(params, ranks).by_stage[2].total_bytes) == claim[1]


def test_the_plan_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    exec(_block("zerofx.plan("), {"__name__": "readme"})
    assert "stage 3, 64 ranks of h100" in capsys.readouterr().out
    assert (tmp_path / "step.svg").read_text().startswith("<svg")


def test_the_training_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    torch._dynamo.reset()
    exec(_block("zerofx.init()"), {"__name__": "readme"})
    assert "ZeRO stage 3, 1 ranks" in capsys.readouterr().out
    assert (tmp_path / "checkpoint").is_dir()
