"""The printed schedule is golden text, and it is the order that runs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import zerofx
from tests.programs import TiedStack, compilation, compiled, fake_ranks, stack
from zerofx.config import Config
from zerofx.events import Event, fold
from zerofx.hardware import hardware
from zerofx.origins import module_of
from zerofx.program import Program
from zerofx.regions import is_boundary, is_collective

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_golden_schedule(stage: int, request: pytest.FixtureRequest) -> None:
    text = str(zerofx.schedule(stack(6, stage=stage))) + "\n"
    path = GOLDEN / f"stack_stage{stage}.txt"
    if request.config.getoption("rewrite_golden"):
        path.write_text(text)
    assert text == path.read_text()


def test_a_schedule_for_known_hardware_draws_itself(tmp_path: Path) -> None:
    schedule = zerofx.schedule(stack(4, stage=3, hardware=hardware("h100")))
    assert schedule.timeline is not None
    assert len(schedule.timeline.events) == len(schedule.alive_bytes)
    assert schedule.timeline.seconds == pytest.approx(schedule.timeline.compute_s + schedule.timeline.exposed_s)
    schedule.to_svg(tmp_path / "step.svg")
    schedule.to_perfetto(tmp_path / "step.json")
    assert "stage 3, 2 ranks, aot_eager" in (tmp_path / "step.svg").read_text()
    assert any(event["ph"] == "X" for event in json.loads((tmp_path / "step.json").read_text())["traceEvents"])
    assert json.loads(schedule.to_json())["timeline"] is None
    with pytest.raises(zerofx.ConfigError, match="no times to draw"):
        zerofx.schedule(stack(1, stage=3)).to_svg(tmp_path / "none.svg")


@pytest.mark.parametrize("root", ["L['self']", "L['args'][0]"])
def test_a_computing_module_has_its_qualified_name(root: str) -> None:
    node = torch.fx.Graph().placeholder("x")
    for path, name in (("", ""), (".h.3.up", "h.3.up"), ("._modules['h']._modules['3']", "h.3")):
        node.meta["nn_module_stack"] = {"key": (f"{root}{path}", torch.nn.Module)}
        assert module_of(node) == name


def test_equal_layers_fold_whatever_the_depth() -> None:
    lengths = {layers: len(str(zerofx.schedule(stack(layers, stage=3))).splitlines()) for layers in (8, 10, 12)}
    assert lengths[8] == lengths[10] == lengths[12]


def test_unfolding_gives_every_event() -> None:
    events = zerofx.schedule(stack(12, stage=3)).events
    shown = list(fold(events))
    hidden = sum(repeats * lines for event, repeats, lines in shown if event is None)
    assert hidden > 0
    assert sum(event is not None for event, _, _ in shown) + hidden == len(events)


def test_text_is_equal_on_every_rank() -> None:
    texts = set()
    for rank in range(3):
        torch.manual_seed(rank)
        with fake_ranks(3, rank):
            model = zerofx.compile(TiedStack(3, vocabulary=301), stage=3, backend="aot_eager")
            model(torch.arange(16).view(2, 8)).backward()
            texts.add(str(zerofx.schedule(model)))
    assert len(texts) == 1


def test_json_holds_the_events() -> None:
    schedule = zerofx.schedule(stack(2, stage=3))
    data = json.loads(schedule.to_json())
    assert len(data["events"]) == len(schedule.events)
    assert data["traffic_bytes"] == schedule.traffic_bytes


def _printed(events: tuple[Event, ...], phase: str) -> list[tuple[str, str]]:
    return [(event.kind, event.what) for event in events if event.phase == phase and event.kind in ("launch", "wait")]


def _lowered(program: Program) -> Iterator[tuple[str, str]]:
    """The collectives of a lowered graph as (launch or wait, bucket), one for each bucket's run of them."""
    last = None
    for node in program.graph.nodes:
        if is_boundary(node):
            mark = node.meta["zerofx"]
            item = "wait" if mark.kind.endswith("_wait") else "launch", f"{mark.kind.partition('_')[0]} {mark.bucket}"
            if item != last:
                yield item
            last = item


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_lowered_graph_runs_what_is_printed(stage: int, world_size: int) -> None:
    model = stack(6, stage=stage, world_size=world_size)
    schedule = zerofx.schedule(model)
    for phase, program in compilation(model).lowered.items():
        assert list(_lowered(program)) == _printed(schedule.events, phase)


@pytest.mark.parametrize("stage", [0, 3])
def test_whole_graph_inductor_code_runs_what_is_printed(stage: int) -> None:
    torch.manual_seed(0)
    with fake_ranks(2):
        model = zerofx.compile(TiedStack(3), config=Config(stage=stage, whole_graph=True))
        _, codes = run_and_get_code(lambda: model(torch.arange(16).view(2, 8)).backward())
    for code, program in zip(codes, compilation(model).lowered.values(), strict=True):
        calls = re.findall(r"torch\.ops\._c10d_functional\.(\w+?)_?\.default\(", code)
        assert calls == [node.target._schema.name.removeprefix("_c10d_functional::") for node in program.graph.nodes if is_collective(node)]


def test_eval_forward_has_a_schedule_that_releases_everything() -> None:
    model = compiled(TiedStack(4), torch.arange(16).view(2, 8), train=False, stage=3)
    events = zerofx.schedule(model).events
    assert {event.phase for event in events} == {"forward"}
    assert events[-1].whole_bytes == 0


def test_no_schedule_before_the_first_step() -> None:
    with fake_ranks(2):
        model = zerofx.compile(TiedStack(1), stage=3, backend="aot_eager")
        with pytest.raises(zerofx.ShardingError, match="run one step first"):
            zerofx.schedule(model)
