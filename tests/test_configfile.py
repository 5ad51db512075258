"""Settings as TOML and JSON: an exact round trip, and words for what cannot be read."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zerofx
from zerofx.config import Config, HookLimits
from zerofx.errors import ConfigError
from zerofx.hardware import Hardware, Link, hardware

counts = st.integers(0, 10**12)
rates = st.floats(1e-3, 1e15)
dtypes = st.sampled_from([None, torch.bfloat16, torch.float16, torch.float32])
links = st.builds(
    lambda latency_s, rate, share: Link(latency_s, ((1, rate), (2**20, rate)), ((4, rate),), share), st.floats(0, 1), rates, st.floats(0, 1)
)
machines = st.builds(
    Hardware,
    name=st.text(),
    flops_per_s=st.lists(st.tuples(st.text(), rates | st.integers(1, 2**60)), min_size=1).map(tuple),
    memory_bytes_per_s=rates,
    memory_bytes=st.integers(1, 2**50),
    launch_s=st.floats(0, 1),
    ranks_per_node=st.integers(1, 16),
    intra_node=links,
    inter_node=links,
    source=st.text(),
    kernel_flops_per_s=st.lists(st.tuples(st.text(), st.text(), rates)).map(tuple),
)
configs = st.builds(
    Config,
    stage=st.integers(0, 3),
    backend=st.sampled_from(["inductor", "aot_eager"]),
    param_dtype=dtypes,
    reduce_dtype=dtypes,
    output_dtype=dtypes,
    cast_forward_inputs=st.booleans(),
    keep_fp32=st.lists(st.text()).map(tuple),
    memory_limit_bytes=st.none() | counts,
    bucket_max_bytes=counts,
    prefetch_buckets=counts,
    whole_graph=st.booleans(),
    hardware=st.none() | st.sampled_from(["h100", "this_machine"]) | machines,
    hooks=st.builds(HookLimits, prefetch_elements=counts, max_live_elements=counts),
)


@settings(max_examples=40)
@given(configs)
def test_what_is_written_reads_back_exactly(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    folder = tmp_path_factory.getbasetemp()
    for suffix, text in (("toml", config.to_toml()), ("json", config.to_json())):
        path = folder / f"settings.{suffix}"
        path.write_text(text, encoding="utf-8")
        assert Config.from_file(path) == config


def test_a_file_as_people_write_it(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(
        """
        stage = 2
        param_dtype = "bf16"
        reduce_dtype = "float32"
        memory_limit_bytes = "2GiB"
        keep_fp32 = ["LayerNorm"]
        hardware = "h100"
        """
    )
    assert Config.from_file(path) == Config(
        stage=2,
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        memory_limit_bytes=2**31,
        keep_fp32=("LayerNorm",),
        hardware="h100",
    )
    # a machine of one's own: a preset, written out, with one figure mended
    path.write_text(
        Config(hardware=dataclasses.replace(hardware("h100"), ranks_per_node=4)).to_toml().replace("launch_s = 2e-06", "launch_s = 0")
    )
    assert Config.from_file(path).hardware == dataclasses.replace(hardware("h100"), ranks_per_node=4, launch_s=0)


BAD: dict[str, tuple[str, str]] = {
    "stagee": ("stagee = 3", "'stage'"),
    "prefetch_element": ("[hooks]\nprefetch_element = 3", "'prefetch_elements'"),
    "'bfloat17' is no dtype": ('param_dtype = "bfloat17"', "'bfloat16'"),
    "hooks=3": ("hooks = 3", "HookLimits"),
    "not a number of bytes": ('memory_limit_bytes = "lots"', "GiB"),
    "passes=3 cannot be in a file": ("passes = 3", "zerofx.compile"),
    "stage='3'": ('stage = "3"', "whole number"),
    "stage=4": ("stage = 4", "settings.toml: zerofx.Config(stage=...)"),
    "hooks.max_live_elements=True": ("[hooks]\nmax_live_elements = true", "settings.toml: hooks.max_live_elements"),
    "prefetch_elements=-1": ("[hooks]\nprefetch_elements = -1", "settings.toml: hooks: zerofx.HookLimits(prefetch_elements=...)"),
    "hardware='h101'": ('hardware = "h101"', "did you mean 'h100'"),
    "hardware.intra_node.rates=[[1]]": ("[hardware.intra_node]\nrates = [[1]]", "settings.toml: hardware.intra_node.rates"),
    "reduce_dtype='int8' is no floating dtype": ('reduce_dtype = "int8"', "bfloat16"),
    "'latency'": ("[hardware.intra_node]\nlatency = 1", "'latency_s'"),
    "Hardware cannot be made": ('[hardware]\nname = "mine"', "flops_per_s"),
    "cast_forward_inputs": ('cast_forward_inputs = "yes"', "true or false"),
    "is no file of settings": ("stage = = 3", "to_toml"),
}


@pytest.mark.parametrize("words", BAD)
def test_a_file_that_cannot_be_read_says_what_and_how(tmp_path: Path, words: str) -> None:
    text, told = BAD[words]
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(zerofx.ConfigError) as caught:
        Config.from_file(path)
    assert words in caught.value.what
    assert told in str(caught.value)
    assert all(part.strip() for part in (caught.value.what, caught.value.where, caught.value.why, caught.value.remedy))


@pytest.mark.parametrize("name", ["none.toml", "settings.yaml", None])
def test_no_file_and_no_format(tmp_path: Path, name: Any) -> None:
    with pytest.raises(zerofx.ConfigError, match="no file of settings"):
        Config.from_file(name and tmp_path / name)


def test_passes_are_not_written() -> None:
    config: Any = Config(passes=(object(),))
    for write in (config.to_toml, config.to_json):
        with pytest.raises(zerofx.ConfigError, match="passes"):
            write()


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_only_floating_dtypes_are_taken(field: str) -> None:
    with pytest.raises(ConfigError, match="no floating dtype"):
        Config(**{field: torch.int8})


def test_methods_are_a_tuple_of_names() -> None:
    with pytest.raises(ConfigError, match="no tuple of names"):
        Config(methods="encode")  # type: ignore[arg-type]


def test_a_file_as_other_programs_write_it(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    # a byte order mark, and whole numbers as floats
    path.write_text('\ufeff{"stage": 2.0, "bucket_max_bytes": 1e6, "hooks": {"prefetch_elements": 5e7}}', encoding="utf-8")
    found = Config.from_file(path)
    assert found == Config(stage=2, bucket_max_bytes=10**6, hooks=HookLimits(prefetch_elements=50_000_000))
    assert isinstance(found.bucket_max_bytes, int)
    path.write_text('{"stage": 2, "stage": 3}')
    with pytest.raises(ConfigError, match="'stage' is there twice"):
        Config.from_file(path)


@pytest.mark.parametrize("machine", ["h101", "", 3, [], HookLimits()])
def test_a_machine_is_known_when_a_config_is_built(machine: Any) -> None:
    with pytest.raises(ConfigError, match=r"hardware=.* is not known"):
        Config(hardware=machine)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["auto", "h100", "bf16", "2GiB", "9" * 400]) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
links_as_read = st.fixed_dictionaries({}, optional={field.name: plain for field in dataclasses.fields(Link)})
machines_as_read = st.fixed_dictionaries(
    {}, optional={field.name: plain | links_as_read if field.name.endswith("_node") else plain for field in dataclasses.fields(Hardware)}
)
hooks_as_read = st.fixed_dictionaries({}, optional={field.name: plain for field in dataclasses.fields(HookLimits)})
tables: dict[str, st.SearchStrategy[Any]] = {"hooks": hooks_as_read, "hardware": machines_as_read}


@settings(max_examples=100)
@given(
    st.fixed_dictionaries({}, optional={field.name: plain | tables.get(field.name, plain) for field in dataclasses.fields(Config)}),
)
def test_any_file_is_settings_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, table: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(table))
    refused: ConfigError | None = None
    try:
        assert isinstance(Config.from_file(path), Config)
    except ConfigError as error:
        refused = error
    if refused is not None:
        assert str(path) in refused.where
        assert all(part.strip() for part in (refused.what, refused.why, refused.remedy))


@pytest.mark.parametrize("recompute", ["blocks", "selective", "2GiB", 1_000_000, 0.5, ("h.*.mlp", "h.0"), None])
def test_what_is_computed_again_is_read_back(tmp_path: Path, recompute: Any) -> None:
    for suffix in ("toml", "json"):
        path = tmp_path / f"settings.{suffix}"
        path.write_text(getattr(Config(recompute=recompute), f"to_{suffix}")())
        assert Config.from_file(path) == Config(recompute=recompute)


def test_a_policy_cannot_be_in_a_file() -> None:
    with pytest.raises(ConfigError, match="it is code"):
        Config(recompute=lambda *_: True).to_json()
