"""A step planned without ranks is the step that ranks compile."""

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.programs import Repeated, TiedStack, compilation
from tests.ranks import Pool
from zerofx import planner
from zerofx.__main__ import main
from zerofx.config import Config
from zerofx.hardware import Hardware, Link
from zerofx.hardware import hardware as hardware_named
from zerofx.plans import Plan
from zerofx.program import digest


def _tokens() -> Tensor:
    return torch.arange(32).view(4, 8)


# What differs between a plan and a rank's own program is in these; 3 ranks have uneven shards.
PLANNED = ((1, None), (2, None), (3, None), (3, "h100"))


def _compiled_on_rank(rank: int, world: int) -> list[str]:
    found = []
    for stage, machine in PLANNED:
        torch.manual_seed(0)
        model = zerofx.compile(TiedStack(3), stage=stage, backend="aot_eager", hardware=machine)
        model(_tokens()).backward()
        programs = compilation(model).forward, compilation(model).backward
        found += [digest(program) for program in programs if program is not None]
    return found


def test_a_plan_for_ranks_is_what_the_ranks_compile(ranks: Pool) -> None:
    planned = []
    for stage, machine in PLANNED:
        config = Config(stage=stage, backend="aot_eager", hardware=None if machine is None else hardware_named(machine))
        planned += planner.trace(TiedStack(3), (_tokens(),), None, config, 3, "gloo").scheduled
    assert ranks.run(_compiled_on_rank, 3) == [[digest(program) for program in planned]] * 3


def test_a_digest_tells_programs_apart_and_not_names() -> None:
    settings: list[tuple[int, dict[str, Any]]] = [(2, {}), (2, {}), (4, {}), (2, {"prefetch_buckets": 0})]
    found = [
        tuple(map(digest, planner.trace(TiedStack(3), (_tokens(),), None, Config(backend="aot_eager", **changed), ranks, "gloo").scheduled))
        for ranks, changed in settings
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_a_plan_needs_no_weights_and_leaves_the_model_as_it_is() -> None:
    with torch.device("meta"):
        model = TiedStack(3)
    before = copy.deepcopy(model.state_dict())
    planned = planner.trace(model, (_tokens().to("meta"),), None, Config(backend="aot_eager"), 1024, "nccl")
    assert "1024 ranks" in str(planned.schedule)
    assert type(model) is TiedStack
    assert all(value.is_meta and value.shape == before[name].shape for name, value in model.state_dict().items())
    assert model.head.weight is model.wte.weight


def test_plans_of_one_class_with_other_sizes_stay_static() -> None:
    for rows in (4, 6, 2):
        planned = planner.trace(Repeated(), (torch.randn(rows, 64),), None, Config(backend="aot_eager"), 2, "gloo")
        assert not any(isinstance(node.meta.get("val"), torch.SymInt) for program in planned.scheduled for node in program.graph.nodes)


class Branching(nn.Module):
    """A forward whose way depends on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y.sum().item() > 0:
            y = 2 * y
        return y.sum()


def test_as_many_plans_as_you_like() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with torch._dynamo.config.patch(accumulated_recompile_limit=2):
        for rows in range(1, 5):
            assert zerofx.plan(model, (torch.ones(rows, 4),), world_size=2, backend="aot_eager").seconds > 0


def test_a_branch_on_data_is_told_with_its_line() -> None:
    with pytest.raises(zerofx.ConfigError) as raised:
        planner.trace(Branching(), (torch.zeros(2, 8),), None, Config(backend="aot_eager"), 4, "gloo")
    assert "y.sum().item() > 0" in raised.value.where
    assert __file__ in raised.value.where


def _planned(**options: Any) -> Plan:
    try:
        return _planned_once(**options)
    except TypeError:  # a setting that has no hash, for a test of what is refused
        return _planned_once.__wrapped__(**options)


@functools.cache
def _planned_once(**options: Any) -> Plan:
    options = {"world_size": 8, "hardware": "h100", "backend": "aot_eager", **options}
    return zerofx.plan(TiedStack(3), (_tokens(),), **options)


def test_a_plan_adds_up() -> None:
    found = _planned(stage=3)
    assert found.seconds == pytest.approx(found.compute_s + found.exposed_s + found.stolen_s)
    assert found.seconds >= max(found.compute_s, found.communication_s)
    assert found.traffic_bytes == found.schedule.traffic_bytes
    shards = sum(-(-parameter.shape[0] // 8) * 8 * parameter[0].numel() for parameter in TiedStack(3).parameters()) // 8 * 4
    assert found.states_bytes["shards"] == shards
    assert found.states_bytes["optimizer states"] == 2 * shards
    assert found.total_peak_bytes == max(found.alive_bytes)
    assert "seconds per optimizer step" in str(found)


def test_micro_batches_repeat_what_each_stage_repeats() -> None:
    for stage, gathers, reductions in ((1, 1, 1), (2, 1, 4), (3, 4, 4)):
        names = [event.task.name for event in _planned(stage=stage, micro_batches=4).timeline.events if event.task.kind == "launch"]
        once = [event.task.name for event in _planned(stage=stage).timeline.events if event.task.kind == "launch"]
        sent, sent_once = _planned(stage=stage, micro_batches=4).traffic_bytes, _planned(stage=stage).traffic_bytes
        repeated = {1: set(), 2: {"reduce_scatter", "all_reduce"}, 3: sent.keys()}[stage]
        assert sent == {kind: size * (4 if kind in repeated else 1) for kind, size in sent_once.items()}
        for word, times in (("gather", gathers), ("refresh", 1), ("all_to_all", reductions), ("reduce_scatter", reductions)):
            assert sum(word in name for name in names) == times * sum(word in name for name in once), (stage, word)


class Broken(nn.Module):
    """Two graphs that read one parameter, on both sides of a break."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        torch._dynamo.graph_break()
        return self.inner(x).sum()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_break_in_the_graph_is_planned_too(stage: int) -> None:
    found = zerofx.plan(Broken(), (torch.randn(4, 64),), world_size=8, stage=stage, backend="aot_eager")
    assert found.seconds > 0
    assert sum("refresh" in event.task.name and event.task.kind == "launch" for event in found.timeline.events) == (stage < 3)


def test_faster_links_expose_no_more() -> None:
    fast = hardware_named("h100")
    slow = dataclasses.replace(fast, inter_node=dataclasses.replace(fast.inter_node, rates=((2**20, 1e9),)))
    assert _planned(world_size=16, hardware=slow).seconds > _planned(world_size=16).seconds


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"hardware": "tpu"}, "a100, h100, h200"),
        ({"optimizer": "sdg"}, "adamw"),
        ({"stage": 5}, "0, 1, 2 or 3"),
        ({"prefetch_bucket": 2}, "did you mean 'prefetch_buckets'"),
        ({"world_size": -8}, "1 to 1048576"),
        ({"world_size": 8.5}, "1 to 1048576"),
        ({"world_size": 10**15}, "1 to 1048576"),
        ({"micro_batches": 0}, "1 to 4096"),
        ({"hardware": []}, "a100, h100, h200"),
        ({"optimizer": []}, "adamw"),
        ({"backend": "hooks"}, "takes no hardware"),
        ({"backend": "hooks", "optimize": False}, "no graph to plan"),
        ({"param_dtype": "bf16"}, "torch.dtype"),
        ({"memory_limit_bytes": "2GiB"}, "whole number"),
        ({"memory_limit": "9" * 400}, "not a number of bytes"),
        ({"passes": 3}, "pass a tuple"),
        ({"config": {"stage": 3}}, "is a dict"),
        ({"mesh": 8}, "a tuple of sizes"),
        ({"memory_limit": "lots"}, "not a number of bytes"),
        ({"mesh": (3, 4)}, "holds 12 ranks"),
        ({"mesh": (2, 4)}, "has 2 dimensions"),
    ],
)
def test_settings_that_cannot_be_say_what_can(options: dict[str, Any], told: str) -> None:
    with pytest.raises(zerofx.ConfigError) as raised:
        _planned(**options)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("model", "args", "told"),
    [
        (nn.ReLU(), (torch.zeros(3),), "no parameters"),
        (torch.relu, (torch.zeros(3),), "no torch.nn.Module"),
        (nn.Linear(8, 8), torch.zeros(1, 8), "pass args=(value,)"),
    ],
)
def test_what_is_no_model_and_no_arguments_is_told(model: Any, args: Any, told: str) -> None:
    with pytest.raises((zerofx.ConfigError, zerofx.ShardingError)) as raised:
        zerofx.plan(model, args, world_size=8)
    assert told in str(raised.value)


@functools.cache
def _slow_link() -> Hardware:
    link = Link(2e-6, ((1, 5e10),))
    return dataclasses.replace(hardware_named("h100"), intra_node=link, inter_node=link)


@pytest.mark.parametrize("settings", [{"bucket_max_bytes": 20_000}, {}, {"memory_limit": 300_000}])
def test_a_schedule_for_the_hardware_is_planned_to_be_no_slower(settings: dict[str, Any]) -> None:
    """But for what the scheduler, which sees no lowered graph, cannot know: a thousandth part."""
    with_it, without = (_planned(world_size=2, hardware=_slow_link(), optimize=optimize, **settings).seconds for optimize in (True, False))
    assert with_it <= 1.001 * without


def test_pictures_show_every_row(tmp_path: Path) -> None:
    found = _planned(world_size=64)
    found.to_svg(tmp_path / "step.svg")
    found.to_perfetto(tmp_path / "step.json")
    root = ElementTree.parse(tmp_path / "step.svg").getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"compute", "wait", "gather", "reduce"} <= set(texts)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    assert max(event["args"]["bytes"] for event in events if event["ph"] == "C") == found.total_peak_bytes


def test_the_command_line_plans_a_gpt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    sizes = ["--params", "7e6", "--positions", "32"]
    assert main(["plan", "gpt", *sizes, "--world-size", "1024", "--hardware", "a100", "--json", str(path)]) == 0
    assert "1024 ranks of a100" in capsys.readouterr().out
    assert json.loads(path.read_text())["world_size"] == 1024
    assert main(["plan", "gpt", *sizes, "--world-size", "8", "--hardware", "tpu"]) == 1
    assert "the names are a100" in capsys.readouterr().err
    assert main(["plan", "gpt", "--world-size", "8"]) == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["gpt", "--params", "nan"], "a GPT of nan parameters"),
        (["gpt", "--params", "1e30"], "a GPT of 1e+30 parameters"),
        (["gpt", "--params", "-5"], "a GPT of -5 parameters"),
        (["gpt", "--params", "7e6", "--rows", "9" * 20], "rows x positions"),
        (["hf", "--config", "none.json"], "none.json is no file"),
        (["hf", "--config", "odd.json"], "odd.json gives no model"),
        (["gpt", "--params", "7e6", "--recompute", "all"], "recompute='all' is not known"),
        (["gpt", "--params", "7e6", "--fit", "1GB", "--stage", "3"], "--fit searches stages"),
    ],
)
def test_the_command_says_in_a_sentence_what_cannot_be(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.json").write_text('{"model_type": "gpt2", "n_layer": "x"}')
    assert main(["plan", *options, "--world-size", "8"]) in (1, 2)
    assert told in capsys.readouterr().err
