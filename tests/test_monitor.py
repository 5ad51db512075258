"""What a monitor tells of training: to a logger, and to a sink of scalars."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.ranks import Pool
from zerofx.errors import ConfigError, ShardingError


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train(rank: int, world: int, backend: str) -> tuple[list[tuple[str, float, int]], list[str], float]:
    torch.manual_seed(0)
    model = zerofx.compile(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), stage=3, backend=backend)
    other = nn.Linear(2, 2)
    optimizer, foreign = (torch.optim.SGD(found.parameters(), 0.1) for found in (model, other))
    scalars: list[tuple[str, float, int]] = []
    log, lines = logging.getLogger("zerofx"), Lines()
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        with zerofx.Monitor(model, every=2, sink=lambda tag, value, step: scalars.append((tag, value, step))):
            for _ in range(5):
                model(torch.randn(4, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                foreign.step()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    finally:
        log.removeHandler(lines)
    return scalars, lines.texts, zerofx.schedule(model).peak_total_bytes


@pytest.mark.parametrize(("backend", "world"), [("aot_eager", 2), ("hooks", 2), ("hooks", 1)])
def test_each_report_holds_the_figures_of_its_steps(ranks: Pool, backend: str, world: int) -> None:
    for rank, (scalars, lines, peak_bytes) in enumerate(ranks.run(train, world, backend)):
        names = ["step_s", *(["exposed_s"] if backend == "aot_eager" else []), "whole_peak_bytes", "peak_bytes"]
        assert [(tag, step) for tag, _, step in scalars] == [(f"zerofx/{name}", step) for step in (2, 4) for name in names]
        assert [text.partition(":")[0] for text in lines] == [f"{f'rank {rank}, ' if world > 1 else ''}step {step}" for step in (2, 4)]
        assert all(name in text for name in names for text in lines)
        by_name: dict[str, Any] = {tag: value for tag, value, step in scalars if step == 4}
        assert by_name["zerofx/whole_peak_bytes"] == peak_bytes
        if backend == "aot_eager":
            assert 0 < by_name["zerofx/exposed_s"] < by_name["zerofx/step_s"]


def test_what_cannot_be_monitored_is_told() -> None:
    with pytest.raises(ShardingError, match="was not compiled by zerofx"):
        zerofx.Monitor(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="every=0"):
        zerofx.Monitor(nn.Linear(2, 2), every=0)
