"""Settings written for DeepSpeed: what they say of an estimate, and what they become for ``zerofx.compile``."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

import zerofx
from zerofx.__main__ import main
from zerofx.batch import Batch
from zerofx.config import Config, HookLimits
from zerofx.deepspeed_keys import ALIASES, MAPPED, REFUSED, TYPES, UNUSED
from zerofx.lossscale import LossScale
from zerofx.offload import Offload

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
    "zero_optimisation": {"zero_optimisation": {"stage": 3}},
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


# As transformers' documentation has people write it.
TRAINER = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 3, "min_loss_scale": 2},
    "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "zero_quantized_weights": False,
        "offload_param": {"device": "none", "pin_memory": True},
    },
    "communication_data_type": "fp32",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 10,
}
ARGUMENTS = {
    "bf16": False,
    "fp16": True,
    "learning_rate": 3e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "warmup_steps": 0,
    "gradient_accumulation_steps": 4,
    "per_device_train_batch_size": 2,
    "max_grad_norm": 0.5,
    "hidden_size": 64,
}


def test_a_file_becomes_a_config_and_what_the_loop_needs(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(TRAINER))
    found = Config.from_deepspeed(path, world_size=8, auto=ARGUMENTS)
    assert found.config == Config(
        stage=3,
        param_dtype=torch.float16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # DeepSpeed casts inputs only where fp16.auto_cast says so
        bucket_max_bytes=2 * 64 * 64,
        reduces_in_flight=0,
        hooks=HookLimits(prefetch_elements=int(0.9 * 64 * 64), max_live_elements=10**9),
    )
    assert found.batch == Batch(train_size=64, micro_size=2, micro_batches=4)
    assert found.gradient_clipping == 0.5
    assert found.loss_scale == LossScale(initial_scale=2.0**12, hysteresis=3, min_scale=2)
    assert found.optimizer is not None
    # DeepSpeed's Adam decays as AdamW does, and nothing unless told; torch's AdamW would by default.
    assert (found.optimizer.name, found.optimizer.arguments) == (
        "AdamW",
        {"weight_decay": 0.0, "lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8},
    )
    assert found.scheduler is not None
    assert found.scheduler.arguments == {"warmup_min_lr": 0, "warmup_num_steps": 1}
    # 8 settings of their own, 1 + 5 + 1 + 3 + 1 + 2 + 8 in sections, each in the report once
    assert len({*found.report.mapped, *found.report.unused}) == len(found.report.mapped) + len(found.report.unused) == 27
    assert found.report.mapped["zero_optimization.reduce_bucket_size"] == "config.bucket_max_bytes"
    assert found.report.unused["zero_optimization.zero_quantized_weights"] == "it is off"
    assert "contiguous_gradients" in str(found.report)


@pytest.mark.parametrize("flag", ["false", "False"])
def test_a_flag_may_be_text(flag: str) -> None:
    found = zerofx.Config.from_deepspeed(
        {"bf16": {"enabled": flag}, "zero_optimization": {"stage": 2, "overlap_comm": flag}}, version="0.19.8"
    )
    assert found.config.param_dtype is None
    assert found.config.reduces_in_flight == 0


@pytest.mark.parametrize("world_size", [0, "2", True])
def test_a_world_is_a_number_of_ranks(world_size: Any) -> None:
    with pytest.raises(zerofx.ConfigError, match="is no number of ranks"):
        zerofx.Config.from_deepspeed({"train_batch_size": 8}, world_size=world_size)


def test_every_known_setting_has_one_meaning() -> None:
    assert not (MAPPED.keys() & UNUSED.keys()) | (MAPPED.keys() & REFUSED.keys()) | (UNUSED.keys() & REFUSED.keys())
    assert all(name in {*MAPPED, *UNUSED, *REFUSED, "bf16"} for name in ALIASES.values())


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused_by_name_and_may_be_off(name: str) -> None:
    section, _, key = name.rpartition(".")

    def settings(value: Any) -> dict[str, Any]:
        return {"gradient_clipping": 1.0, **({section: {key: value}} if section else {key: value})}

    refusal = REFUSED[name]
    for off in (refusal.off[0], {} if None in refusal.off else refusal.off[-1]):
        assert Config.from_deepspeed(settings(off)).config.stage == 0
    on = {refusal.switch: "cpu"} if refusal.switch else {"anything": 1}
    for value in (on, 7):
        with pytest.raises(zerofx.ConfigError) as caught:
            Config.from_deepspeed(settings(value))
        assert name in caught.value.what
        assert refusal.why in caught.value.why


def test_defaults_that_changed_go_by_the_version_or_warn() -> None:
    settings = {"bf16": {"enabled": True}}
    old = Config.from_deepspeed(settings, version="0.16.4")
    assert (old.gradient_clipping, old.loss_scale) == (None, None)
    new = Config.from_deepspeed(settings, version="0.19.3")
    # overflows skip their step, at a scale of 1
    assert (new.gradient_clipping, new.loss_scale) == (1.0, LossScale(initial_scale=1.0, is_dynamic=False))
    with pytest.warns(UserWarning, match=r"gradient_clipping was 0\.0 before 0\.19\.3.*check_grad_overflow") as warned:
        assert Config.from_deepspeed(settings) == new
    assert warned[0].filename == __file__
    explicit = Config.from_deepspeed({"bf16": {"enabled": True, "check_grad_overflow": False}, "gradient_clipping": 0})
    assert (explicit.gradient_clipping, explicit.loss_scale) == (None, None)


SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize(
    ("sizes", "world", "batch"),
    [
        ((256, 8, None), 8, (256, 8, 4)),
        ((256, None, 4), 8, (256, 8, 4)),
        ((None, 8, 4), 8, (256, 8, 4)),
        (("auto", 8, 4), 8, (256, 8, 4)),
        ((256, None, None), 8, (256, 32, 1)),
        ((None, 8, None), 8, (64, 8, 1)),
        ((None, None, None), 8, (None, None, None)),
        ((256, 8, 4), None, (256, 8, 4)),  # before there are ranks
        ((None, 8, 4), None, (None, 8, 4)),
    ],
)
def test_any_two_sizes_of_a_batch_give_the_third(sizes: tuple[Any, ...], world: int | None, batch: tuple[Any, ...]) -> None:
    settings = {"gradient_clipping": 1.0, **dict(zip(SIZES, sizes, strict=True))}
    assert Config.from_deepspeed(settings, world_size=world).batch == Batch(*batch)


@pytest.mark.parametrize(("sizes", "world"), [((256, 4, 8), 1), ((255, None, 4), 8), ((256, 7, None), 8), ((3, None, None), 8)])
def test_sizes_of_a_batch_that_do_not_fit(sizes: tuple[Any, ...], world: int) -> None:
    settings = {"gradient_clipping": 1.0, **dict(zip(SIZES, sizes, strict=True))}
    with pytest.raises(zerofx.ConfigError) as caught:
        Config.from_deepspeed(settings, world_size=world)
    told = str(caught.value)
    assert all(f"{name}={size}" in told for name, size in zip(SIZES, sizes, strict=True))
    assert f"world size of {world}" in told


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bf16": {"enabled": "auto"}}, ("bf16.enabled", "auto={'bf16': ...}")),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, ("reduce_bucket_size", "hidden_size")),
        ({"zero_optimization": {"overlap_comm": "auto"}}, ("zero_optimization.overlap_comm",)),
        ({"gradient_clipping": 1.0, "grad_accum_steps": 2}, ("grad_accum_steps",)),
        ({"zero_optimization": {"stage3_prefetch_bucket": 2}}, ("stage3_prefetch_bucket_size",)),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ("bf16", "fp16", "both")),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, ("bf16.enabled", "twice")),
        ({"optimizer": {"type": "OneBitAdam"}}, ("OneBitAdam", "torch.optim")),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, ("max_grad_norm", "gradient_clipping")),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, ("hysteresis=0",)),
        ({"gradient_clipping": "much"}, ("gradient_clipping='much'",)),
        ({"train_batch_size": 0}, ("train_batch_size=0",)),
        ({"zero_optimization": {"stage": 4}}, ("stage=4",)),
        ({"communication_data_type": "fp8"}, ("communication_data_type", "fp16")),
        ({"communication_data_type": "int8"}, ("communication_data_type='int8'", "floating")),
        ({"fp16": {"enabled": True, "initial_scale_power": 2000}}, ("fp16.initial_scale_power=2000", "below 128")),
        ({"fp16": {"enabled": True, "loss_scale_window": 0.5}}, ("fp16.loss_scale_window=0.5", "whole number of at least 1")),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 3, "min_loss_scale": 16}},
            ("=16", "at most initial_scale", "fp16.min_loss_scale"),
        ),
        ({"bf16": {"enabled": "no"}}, ("bf16.enabled='no'", "true or false")),
        ({"optimizer": {"type": "Adam", "params": {"lr": "3e-4"}}}, ("optimizer.params.lr='3e-4'", "a number")),
        ({"optimizer": {"type": ["Adam"]}}, ("optimizer.type=['Adam']", "text")),
    ],
    ids=str,
)
def test_settings_that_cannot_be_translated(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(zerofx.ConfigError) as caught:
        Config.from_deepspeed(settings, version="0.19.8")
    assert all(word in str(caught.value) for word in words)
    assert all(part.strip() for part in (caught.value.what, caught.value.where, caught.value.why, caught.value.remedy))


def test_a_setting_that_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"gradient_clipping": 1.0, "gradient_clipping": 0.0}')
    with pytest.raises(zerofx.ConfigError, match="'gradient_clipping' is there twice"):
        Config.from_deepspeed(path)


@pytest.mark.parametrize(
    ("auto", "words"),
    [
        ({"bf16": "no"}, "auto['bf16']='no' is not true or false"),
        ({"bf16.enabled": 2}, "auto['bf16.enabled']=2 is not true or false"),
        ({"bf16": True, "hidden_size": "wide"}, "auto['hidden_size']='wide' is not a whole number of at least 1"),
        (["bf16"], "auto=['bf16'] is no mapping"),
    ],
    ids=str,
)
def test_what_auto_stands_for_has_a_type(tmp_path: Path, auto: Any, words: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}))
    with pytest.raises(zerofx.ConfigError) as caught:
        Config.from_deepspeed(path, version="0.19.8", auto=auto)
    assert words in caught.value.what
    assert isinstance(auto, list) or str(path) in caught.value.where


def test_a_file_as_other_programs_write_it(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    # a byte order mark, and whole numbers as floats
    path.write_text('\ufeff{"fp16": {"enabled": true, "loss_scale_window": 1e3}, "train_batch_size": 8.0}', encoding="utf-8")
    found = Config.from_deepspeed(path, version="0.19.8")
    assert found.loss_scale == LossScale(growth_interval_steps=1000)
    assert found.batch.train_size == 8
    path.write_text('{"zero_optimization": {"stage": 4}}')
    with pytest.raises(zerofx.ConfigError, match=rf"zero_optimization.stage=4.*\n.*{path}: zero_optimization.stage\n"):
        Config.from_deepspeed(path)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["auto", "true", "bf16", "AdamW", "SGD", "none"]) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["enabled", "device", "lr"]) | st.text(), inner, max_size=2)
    ),
    max_leaves=4,
)
usual = st.sampled_from([0, 1, 2, 8, 1e3, True, False, "auto"])
begun = st.sampled_from([{}, {"bf16.enabled": True}, {"fp16.enabled": True}, {"optimizer.type": "Adam", "zero_optimization.stage": 3}])
known = st.sampled_from(list(TYPES)) | st.sampled_from([*MAPPED, *UNUSED, *REFUSED, *ALIASES])
tables = st.builds(lambda start, more: {**start, **more}, begun, st.dictionaries(known, plain | usual, max_size=4))
arguments = st.dictionaries(
    st.sampled_from(["bf16", "fp16", "learning_rate", "warmup_steps", "hidden_size", "adam_beta1", *TYPES]), plain | usual
)


@examples(max_examples=200)
@given(tables, arguments, st.none() | st.integers(1, 8))
def test_any_settings_are_translated_or_a_config_error(table: dict[str, Any], auto: dict[str, Any], world_size: int | None) -> None:
    nested: dict[str, Any] = {}
    for name, value in table.items():
        *sections, key = name.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                return
        inner[key] = value
    refused: zerofx.ConfigError | None = None
    try:
        found = Config.from_deepspeed(nested, version="0.19.8", world_size=world_size, auto=auto)
        assert isinstance(found.config, Config)
        assert str(found.report)
    except zerofx.ConfigError as error:
        refused = error
    assert refused is None or all(part.strip() for part in (refused.what, refused.where, refused.why, refused.remedy))


def test_states_on_nvme_go_to_disk() -> None:
    tables = {"offload_optimizer": {"device": "nvme", "nvme_path": "/local", "buffer_count": 4}, "offload_param": {"device": "nvme"}}
    found = Config.from_deepspeed({"zero_optimization": {"stage": 3, **tables}}, version="0.19.8")
    assert found.config.offload == Offload(optimizer="disk:/local", gradients="disk:/local", parameters="disk")
    assert found.report.mapped["zero_optimization.offload_param"] == "config.offload"
    stays = {"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}
    assert Config.from_deepspeed(stays, version="0.19.8").config.offload is None
    with pytest.raises(zerofx.ConfigError, match="offload_param cannot be had here"):
        Config.from_deepspeed({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, version="0.19.8")
