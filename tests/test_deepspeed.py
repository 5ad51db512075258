"""Settings written for DeepSpeed say what the arguments of an estimate would."""

import json
from pathlib import Path
from typing import Any

import pytest

import zerofx
from zerofx.__main__ import main

DEEPSPEED = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "gradient_accumulation_steps": 4,
}


def test_settings_of_deepspeed(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(DEEPSPEED))
    found = zerofx.estimate(7.5e9, 64, deepspeed=DEEPSPEED)
    assert found == zerofx.estimate(7.5e9, 64, deepspeed=path) == zerofx.estimate(7.5e9, 64, deepspeed=str(path))
    # The gradients go where the update runs.
    offload = ("optimizer", "gradients")
    assert found == zerofx.estimate(7.5e9, 64, stage=2, precision="bf16", optimizer="adamw", offload=offload, micro_batches=4)
    (stage,) = found.stages
    assert (stage.total_bytes, stage.host_bytes) == (15e9, 14 * 7.5e9 / 64)


@pytest.mark.parametrize(
    ("settings", "meaning"),
    [
        ({}, {"stage": 0, "precision": "fp32"}),
        ({"zero_optimization": None, "fp16": {"enabled": True}}, {"stage": 0, "precision": "fp16"}),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "none"}}},
            {"stage": 3, "precision": "fp32", "offload": "parameters"},
        ),
        (
            {"bf16": {"enabled": False}, "optimizer": {"type": "SGD", "params": {"momentum": 0.9}}},
            {"stage": 0, "precision": "fp32", "optimizer": "momentum"},
        ),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, {"stage": 0, "precision": "fp32", "optimizer": "sgd"}),
    ],
    ids=str,
)
def test_what_settings_of_deepspeed_leave_out(settings: dict[str, Any], meaning: dict[str, Any]) -> None:
    assert zerofx.estimate(1e9, 8, deepspeed=settings) == zerofx.estimate(1e9, 8, **meaning)


def test_arguments_go_before_settings_of_deepspeed() -> None:
    found = zerofx.estimate(1e9, 8, deepspeed={**DEEPSPEED, "gradient_accumulation_steps": "auto"}, stage=3, micro_batches=2)
    assert (found.stages[0].stage, found.setup.micro_batches, found.setup.optimizer) == (3, 2, "adamw")


def test_the_command_reads_a_file_of_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(DEEPSPEED))
    assert main(["estimate", "--params", "1e9", "--world-size", "4", "--optimizer", "lion", "--deepspeed", str(path)]) == 0
    assert capsys.readouterr().out == f"{zerofx.estimate(1e9, 4, optimizer='lion', deepspeed=DEEPSPEED)}\n"


BAD: dict[str, Any] = {
    "stage='auto'": {"zero_optimization": {"stage": "auto"}},
    "precision='auto'": {"bf16": {"enabled": "auto"}},
    "micro_batches='auto'": {"gradient_accumulation_steps": "auto"},
    "train_batch_size": {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4},
    "optimizer='onebitadam'": {"optimizer": {"type": "OneBitAdam"}},
    "offload_optimizer to 'nvme'": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
    "bf16=True is no mapping": {"bf16": True},
    "[] is no mapping": [],
    "'/no/such/file' is not a JSON file": "/no/such/file",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_settings_have_four_parts(words: str) -> None:
    with pytest.raises(zerofx.ConfigError) as caught:
        zerofx.estimate(1000, 4, deepspeed=BAD[words])
    error = caught.value
    assert words in error.what
    assert all(part.strip() for part in (error.what, error.where, error.why, error.remedy))
