"""Tables of plans, and the search for the fastest that fits, on made-up plans and on real ones."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zerofx
from tests.programs import TiedStack
from zerofx.__main__ import main
from zerofx.errors import ConfigError, MemoryLimitError
from zerofx.sweeps import Fastest, fastest, sweep

GB = 10**9


@dataclass
class Made:
    """A plan with made-up figures."""

    seconds: float
    total_peak_bytes: int
    peak_bytes: dict[str, int]
    in_motion_bytes: int
    exposed_s: float = 0.0
    compute_s: float = 1.0
    tokens_per_s: float = 1.0
    mfu: float = 0.5
    micro_batches: int = 1
    traffic_bytes: dict[str, int] = field(default_factory=lambda: {"all_gather": GB})

    @property
    def states_bytes(self) -> dict[str, int]:
        return {"optimizer states": self.peak_bytes["optimizer states"]}

    @property
    def schedule(self) -> Any:
        return SimpleNamespace(peak_total_bytes=self.in_motion_bytes)

    def to_json(self) -> str:
        return json.dumps({"seconds": self.seconds, "total_peak_bytes": self.total_peak_bytes})


def _planner(
    stage: int, micro_batches: int = 1, memory_limit: int | None = None, keep_whole_bytes: int = 0, recompute: str | int | None = None
) -> Made:
    """States fall by stage, activations by micro-batch; stage 3 moves 4 GB at once, of which a limit may take up to 3.

    Parameters that stay whole save a little of every micro-batch but the first. Computing again takes time by the byte, and a working
    memory of 1 GB.
    """
    in_motion = 4 * GB if stage == 3 else 0
    limit = in_motion if memory_limit is None else min(in_motion, memory_limit)
    if stage == 3 and limit < GB:
        error = MemoryLimitError("too little", where="here", why="because", remedy="more")
        error.smallest_bytes = GB
        raise error
    states = {0: 40, 1: 20, 2: 15, 3: 5}[stage] * GB
    everything = 16 * GB // micro_batches
    activations = {None: everything, "selective": everything // 2, "blocks": everything // 8}.get(recompute, recompute)
    assert isinstance(activations, int)
    computes = 1 + 0.2 * (everything - activations) / everything
    working = GB if recompute else 0
    seconds = 1 + {2: 0.03, 3: 0.1}.get(stage, 0) + 0.01 * micro_batches + (in_motion - limit) / GB * 0.05
    peak = {"optimizer states": states, "saved activations": activations, "working memory": working, "whole parameters": limit}
    seconds -= keep_whole_bytes / GB * 0.02 * (micro_batches - 1)
    total = sum(peak.values()) + keep_whole_bytes
    waits = seconds - 1
    return Made(waits + computes, total, peak, in_motion, exposed_s=waits, compute_s=computes, micro_batches=micro_batches)


def _verdicts(found: Fastest) -> dict[tuple[Any, ...], str]:
    return {tuple(row.settings.values()): row.problem for row in found.tried}


def test_the_fastest_is_the_fastest_that_fits() -> None:
    assert fastest(_planner, 60 * GB, 8, [None]).chosen.settings == {
        "stage": 1,
        "micro_batches": 1,
        "recompute": None,
    }  # as fast as stage 0, and holds less
    assert fastest(_planner, "30GB", 8, [None]).chosen.settings == {"stage": 1, "micro_batches": 2, "recompute": None}
    assert fastest(_planner, "20GB", 8, [None]).chosen.settings == {"stage": 2, "micro_batches": 4, "recompute": None}
    tight = fastest(_planner, "8GB", 8, [None])
    assert tight.chosen.settings == {"stage": 3, "micro_batches": 8, "recompute": None, "memory_limit": GB}
    assert "8 of 8 GB" in tight.why


def test_what_was_tried_says_why_it_is_not_the_one() -> None:
    found = fastest(_planner, "30GB", 2, [None])
    verdicts = _verdicts(found)
    assert verdicts[0, 1, None] == "26 GB too much; 40 GB are optimizer states"
    assert verdicts[1, 2, None] == "chosen"
    assert verdicts[3, 1, None] == "8.8% slower"
    assert "the next, stage 2, micro_batches 2" in found.why
    assert all(text in str(found) for text in ("verdict", "chosen", "8.8% slower"))
    assert json.loads(found.to_json())["chosen"]["settings"] == {"stage": 1, "micro_batches": 2, "recompute": None}


def test_a_limit_is_lowered_by_what_is_too_much_and_no_further_than_it_can() -> None:
    found = fastest(_planner, "23GB", 1, [None])
    assert found.chosen.settings == {"stage": 3, "micro_batches": 1, "recompute": None, "memory_limit": 2 * GB}
    with pytest.raises(ConfigError, match=r"nothing fits in 21 GB: the least is 25 GB \(stage 3, micro_batches 1, recompute none\)"):
        fastest(_planner, "21GB", 1, [None])


def test_memory_to_spare_goes_to_the_limit_of_stage_3() -> None:
    found = fastest(_planner, "30GB", 1, [None])
    assert {"stage": 3, "micro_batches": 1, "recompute": None, "memory_limit": 9 * GB} in [row.settings for row in found.tried]


def test_memory_to_spare_keeps_parameters_whole_between_micro_batches() -> None:
    found = fastest(_planner, "13.5GB", 4, [None])
    assert found.chosen.settings == {"stage": 3, "micro_batches": 4, "recompute": None, "keep_whole_bytes": GB // 2}
    assert "the next, stage 3, micro_batches 4" in found.why


def test_as_much_is_computed_again_as_the_memory_needs() -> None:
    found = fastest(_planner, "21GB", 1)
    # stage 3 keeps 16 GB of 25 in all: 4 too much, and 1 more for what computing again takes
    assert found.chosen.settings == {"stage": 3, "micro_batches": 1, "recompute": 11 * GB}
    assert found.plan.total_peak_bytes == 21 * GB
    verdicts = _verdicts(found)
    assert verdicts[3, 1, 12 * GB] == "1 GB too much; 12 GB are saved activations"
    assert verdicts[3, 1, "selective"] == "3.2% slower"
    assert verdicts[3, 1, "blocks"] == "9.6% slower"
    assert (1, 1, "blocks") in verdicts
    assert (1, 1, "selective") not in verdicts  # not even the least fits
    assert "the next, stage 2, micro_batches 1, recompute 5000000000, takes 1.177 s and computes 0.075 s longer" in found.why


def test_nothing_is_computed_again_where_it_fits_or_is_not_to_be() -> None:
    assert {row.settings["recompute"] for row in fastest(_planner, "60GB", 8).tried} == {None}
    found = fastest(_planner, "60GB", 8, ["selective", "blocks"])
    assert {row.settings["recompute"] for row in found.tried} == {"selective", "blocks"}
    assert found.chosen.settings == {"stage": 1, "micro_batches": 1, "recompute": "selective"}


def test_no_split_of_the_batch_is_tried_where_the_states_do_not_fit() -> None:
    assert {row.settings["stage"]: row.settings["micro_batches"] for row in fastest(_planner, "18GB", 8).tried}[1] == 1


def test_a_table_shows_every_combination_and_what_cannot_be() -> None:
    found = sweep(_planner, {"stage": [2, 3], "memory_limit": [None, GB // 2], "micro_batches": 1})
    assert [tuple(row.settings.values()) for row in found.rows] == [(2, None, 1), (2, GB // 2, 1), (3, None, 1), (3, GB // 2, 1)]
    assert [row.problem for row in found.rows] == ["", "", "", "needs a limit of 1 GB"]
    assert "needs a limit of 1 GB" in str(found)
    assert len(json.loads(found.to_json())) == 4


def test_what_cannot_be_searched_is_told() -> None:
    def impossible(**settings: Any) -> Made:
        return _planner(3, memory_limit=1)

    with pytest.raises(ConfigError, match="no setting can be planned"):
        fastest(impossible, "1GB", 4)
    with pytest.raises(ConfigError, match="nothing fits"):
        fastest(_planner, "1GB", 0)
    with pytest.raises(ConfigError, match="no memory is given"):
        fastest(_planner, None, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(("settings", "told"), [({}, "nothing to sweep"), ({"stage": []}, "stage is empty")])
def test_nothing_to_sweep_over_is_told(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        sweep(_planner, settings)


def test_plans_of_a_model_sweep_and_search() -> None:
    tokens = torch.arange(16).view(2, 8)
    plan = zerofx.plan(TiedStack(2), (tokens,), world_size=4, hardware="a100", backend="aot_eager")
    found = plan.sweep(stage=[1, 3], world_size=[2])
    by_setting = {tuple(row.settings.values()): row.plan for row in found.rows}
    assert [(row.stage, row.world_size) for row in by_setting.values()] == list(by_setting)
    assert by_setting[3, 2].total_peak_bytes < by_setting[1, 2].total_peak_bytes
    tokens = torch.arange(256).view(8, 32)  # enough of them for activations to be most of a step
    plan = zerofx.plan(TiedStack(2), (tokens,), world_size=4, hardware="a100", backend="aot_eager")
    least = plan.fastest(plan.total_peak_bytes - 1, recompute=["blocks"])
    assert least.plan.total_peak_bytes < plan.total_peak_bytes
    assert least.chosen in least.tried
    assert {row.settings["recompute"] for row in least.tried} == {"blocks"}
    with pytest.raises(ConfigError, match="'stag' is no setting"):
        plan.sweep(stag=[1])
    with pytest.raises(ConfigError, match="world_size=0"):
        plan.sweep(world_size=[0])


def test_the_command_line_prints_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "use_cache": False, **sizes}))
    command = ["plan", "hf", "--config", str(tmp_path / "config.json"), "--positions", "8", "--world-size", "8", "16"]
    assert main([*command[:-1], "--recompute", "none,0.5"]) == 0
    assert [line.split()[:4] for line in capsys.readouterr().out.strip().splitlines()[2:]] == [
        ["3", "8", "none", value] for value in ("none", "0.5")
    ]
    assert main([*command, "--schedule"]) == 2
    assert "--schedule shows one plan" in capsys.readouterr().err
